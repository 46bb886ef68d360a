"""Counting n-grams of whole numbers: TfIdfVectorizer.

An n-gram occurs where its items stand in a row in order, each `skip` places after the one before;
single items are counted once, as no skip changes them. A weight is that of the n-gram at the same
place of the pool, whatever its column. Nothing is looked for that the row is too short for, so rows
and pool bound the work, whatever the attributes say.
Source: ONNX's TfIdfVectorizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stitch.ops.attributes import Attributes, int_of, ints_of, string_of
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import INDICES
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction.reduction_batching import counted
from stitch.program import Array, DataType, ValueType

_MODES = ("TF", "IDF", "TFIDF")
Gram = tuple[int, ...]


def _ints(attributes: Attributes, name: str) -> Gram:
    return ints_of(attributes, name) or ()


def _pool(attributes: Attributes) -> Iterator[Gram]:
    """The n-grams of the pool, in order; sizes 1, 2, ... begin where `ngram_counts` says."""
    items, starts = _ints(attributes, "pool_int64s"), _ints(attributes, "ngram_counts")
    for size, (start, end) in enumerate(zip(starts, (*starts[1:], len(items)), strict=True), 1):
        for at in range(start, end - size + 1, size):
            yield items[at : at + size]


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, INDICES)
    context.require_rank(0, 0, 2)
    attributes = context.attributes
    if string_of(attributes, "mode") not in _MODES:
        raise context.fail("mode of TfIdfVectorizer", expected=", ".join(_MODES))
    if attributes.get("pool_strings"):
        raise context.fail("only numbers are supported, not strings")
    items, starts = _ints(attributes, "pool_int64s"), _ints(attributes, "ngram_counts")
    columns = _ints(attributes, "ngram_indexes")
    ends = (*starts[1:], len(items))
    spans = list(zip(starts, ends, strict=True)) if starts else [(-1, 0)]
    whole = all(0 <= a <= b and (b - a) % n == 0 for n, (a, b) in enumerate(spans, 1))
    if not whole or min(columns, default=-1) < 0 or len(list(_pool(attributes))) != len(columns):
        raise context.fail(
            "the pool of a TfIdfVectorizer does not fit its counts and indexes",
            expected=f"{len(columns)} n-grams",
            got=f"{len(items)} items, counts {list(starts)}",
        )
    weights = attributes.get("weights")
    if isinstance(weights, tuple) and len(weights) != len(columns):
        raise context.fail(
            "TfIdfVectorizer needs a weight per n-gram", expected=len(columns), got=len(weights)
        )
    sizes = [int_of(attributes, f"{side}_gram_length") for side in ("min", "max")]
    if not 1 <= sizes[0] <= sizes[1] or int_of(attributes, "max_skip_count") < 0:
        raise context.fail("the lengths of n-grams are at least 1, in order", got=sizes)
    return (ValueType((*x.shape[:-1], max(columns) + 1), DataType.FLOAT32),)


def _count(row: Gram, numbers: dict[Gram, int], attributes: Attributes) -> Array:
    """Count each n-gram of the pool: look at the sizes that it has, and at skips that leave an
    n-gram inside the row."""
    least, most = (int_of(attributes, f"{side}_gram_length") for side in ("min", "max"))
    skips = int_of(attributes, "max_skip_count") + 1
    counts = np.zeros(len(_ints(attributes, "ngram_indexes")), np.float32)
    for size in sorted({len(gram) for gram in numbers}):
        if not least <= size <= min(most, len(row)):
            continue
        furthest = min(skips, (len(row) - 1) // (size - 1)) if size > 1 else 1
        for skip in range(1, furthest + 1):
            for start in range(len(row) - (size - 1) * skip):
                number = numbers.get(row[start : start + (size - 1) * skip + 1 : skip])
                if number is not None:
                    counts[number] += 1
    return counts


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.given(0), arguments.outputs[0], arguments.attributes
    columns = np.array(_ints(attributes, "ngram_indexes"))
    numbers = {gram: number for number, gram in enumerate(_pool(attributes))}
    mode, weights = string_of(attributes, "mode"), attributes.get("weights")
    factors = np.ones(len(columns), out.dtype)
    if isinstance(weights, tuple) and mode != "TF":
        factors[...] = weights
    results = out.reshape(-1, out.shape[-1])
    rows = x.reshape(len(results), x.shape[-1] if x.ndim else 1)

    def run() -> None:
        results[...] = 0
        for row, result in zip(rows.tolist(), results, strict=True):
            counts = _count(tuple(row), numbers, attributes)
            if mode == "IDF":
                # Of several n-grams of one column, the first that occurs.
                found = np.flatnonzero(counts)[::-1]
                result[columns[found]] = factors[found]
            else:
                np.add.at(result, columns, counts * factors)

    return (run,)


_NUMBER, _NUMBERS = Attribute("int", required=True), Attribute("ints", required=True)

OPERATORS = (
    OpDef(
        "TfIdfVectorizer", (1, 1), _infer, _kernel,
        attributes=declared(
            max_gram_length=_NUMBER, max_skip_count=_NUMBER, min_gram_length=_NUMBER,
            mode=Attribute("string", required=True), ngram_counts=_NUMBERS, ngram_indexes=_NUMBERS,
            pool_int64s=Attribute("ints"), pool_strings=Attribute("strings"),
            weights=Attribute("floats"),
        ), batching=counted,
    ),
)  # fmt: skip

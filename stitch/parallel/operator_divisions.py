"""How operators run in shards: which axis of each operand is divided, and what that gives.

A product with weights gives divided results if its weights are divided by columns, and partial sums
if they are divided by rows, along which its other operand is divided too. Other operators keep
an axis divided where no element of the result depends on another shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stitch.ops import attributes_of, is_elementwise
from stitch.program import ABSENT, Operation, ValueType


class Division(NamedTuple):
    """One way to run an operation in shards.

    Attributes:
        operands: The axis along which each operand is divided; None: equal copies.
        results: The axis along which each result is divided; None: partial sums.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


def divisions_of(
    operation: Operation, operands: Sequence[ValueType | None], results: Sequence[ValueType | None]
) -> Iterator[Division]:
    """Yield all ways to run an operation in shards, whatever the number of shards is.

    Args:
        operands: The types of the operands, None for an absent one.
        results: The types of the results, None for an unused one.
    """
    if operation.body != ABSENT or operation.domain or operation.is_foreign:
        return
    out = results[0]
    if out is None or not operands:
        return
    kinds = [ValueType((), out.data_type) if kind is None else kind for kind in operands]
    ranks = [len(kind.shape) for kind in kinds]
    if any(kind is not None for kind in results[1:]):
        return  # Splits, and statistics of norms.
    words, copies = attributes_of(operation), (None,) * (len(kinds) - 1)
    match operation.op:
        case "MatMul" if min(ranks) >= 2:
            yield from _matmul(kinds, out)
        case "Gemm":
            yield from _gemm(kinds, bool(words["transA"]), bool(words["transB"]))
        case "Conv" if words["group"] == 1:
            bias = (0,) * (len(kinds) - 2)
            yield Division((None, 0, *bias), (1,))
            if not bias:
                yield Division((1, 1), (None,))
        case "Gather":
            axis, places = _axis(words["axis"], ranks[0]), ranks[1]
            for data in range(ranks[0]):
                if data != axis:
                    yield Division((data, None), (data if data < axis else data + places - 1,))
            for place in range(places):
                yield Division((None, place), (axis + place,))
        case "Transpose":
            given = words["perm"]
            order = given if isinstance(given, tuple) else tuple(reversed(range(ranks[0])))
            for axis, source in enumerate(order):
                yield Division((_axis(source, ranks[0]),), (axis,))
        case "Reshape" | "Flatten" | "Unsqueeze":
            for before, after in _same_axes(kinds[0].shape, out.shape):
                yield Division((before, *copies), (after,))
        case "Softmax" | "LogSoftmax":
            for axis in range(ranks[0]):
                if axis != _axis(words["axis"], ranks[0]):
                    yield Division((axis,), (axis,))
        case "LayerNormalization" | "RMSNormalization":
            for axis in range(_axis(words["axis"], ranks[0])):
                yield Division((axis, *copies), (axis,))
        case "MaxPool" | "AveragePool" | "GlobalAveragePool" | "GlobalMaxPool":
            yield Division((0,), (0,))
            yield Division((1,), (1,))
        case _ if is_elementwise(operation) and all(_broadcasts(kind, out) for kind in kinds):
            for axis in range(len(out.shape)):
                yield Division(tuple([_aligned(k, out, axis) for k in kinds]), (axis,))


def _axis(number: object, rank: int) -> int:
    assert isinstance(number, int)
    return number % rank if rank else 0


def _aligned(kind: ValueType, out: ValueType, axis: int) -> int | None:
    """Return the axis of an operand that broadcasts to an axis of the result, None: a copy."""
    own = axis - len(out.shape) + len(kind.shape)
    return own if own >= 0 and kind.shape[own] == out.shape[axis] else None


def _broadcasts(kind: ValueType, out: ValueType) -> bool:
    shape = (1,) * (len(out.shape) - len(kind.shape)) + kind.shape
    return len(shape) == len(out.shape) and all(
        size in (1, wanted) for size, wanted in zip(shape, out.shape, strict=True)
    )


def _matmul(kinds: Sequence[ValueType], out: ValueType) -> Iterator[Division]:
    (left, right), last = kinds, len(out.shape) - 1
    a, b = len(left.shape), len(right.shape)
    yield Division((None, b - 1), (last,))
    yield Division((a - 1, b - 2), (None,))
    yield Division((a - 2, None), (last - 1,))
    for axis in range(last - 1):
        yield Division((_aligned(left, out, axis), _aligned(right, out, axis)), (axis,))


def _gemm(kinds: Sequence[ValueType], turns_a: bool, turns_b: bool) -> Iterator[Division]:
    def bias(axis: int) -> tuple[int | None, ...]:
        """The bias is broadcast to rows and columns of the result."""
        if len(kinds) < 3:
            return ()
        own = axis - 2 + len(kinds[2].shape)
        return (own if own >= 0 and kinds[2].shape[own] > 1 else None,)

    yield Division((None, 0 if turns_b else 1, *bias(1)), (1,))
    if len(kinds) < 3:
        yield Division((0 if turns_a else 1, 1 if turns_b else 0), (None,))
    yield Division((1 if turns_a else 0, None, *bias(0)), (0,))


def _same_axes(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield axes before and after a Reshape whose equal blocks hold the same elements: as many
    elements lie before both."""
    for i, size in enumerate(before):
        for k, other in enumerate(after):
            if 1 not in (size, other) and math.prod(before[:i]) == math.prod(after[:k]):
                yield i, k

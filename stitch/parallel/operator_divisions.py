"""All ways in which an operation may run in shards: which axes of operands and results are divided.

Of a product with weights, these are the columns of the weights, which give columns of the result,
and the rows, which with an equally divided other operand give partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from stitch.errors import CompileError
from stitch.ops import (
    COPIES,
    SUMS,
    DividedOperation,
    Part,
    attributes_of,
    definition_of,
    infer_operation,
)
from stitch.program import ABSENT, Array, Operation, ValueType

#: Operations with more ways to divide their operands run whole.
_MOST_WAYS = 256


class Division(NamedTuple):
    """One way to run an operation in shards.

    Attributes:
        operands: The axis along which each operand is divided; None: equal copies.
        results: The axis along which each result is divided; None: partial sums.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


def divisions_of(
    operation: Operation, operands: Sequence[ValueType | None],
    results: Sequence[ValueType | None], constants: Sequence[Array | None], degree: int,
) -> Iterator[Division]:  # fmt: skip
    """Yield all ways to run an operation in `degree` shards.

    Args:
        operands: The types of the operands, None for an absent one.
        results: The types of the results, None for an unused one.
        constants: The data of operands that are known at compile time.
    """
    if operation.body != ABSENT or operation.is_foreign or results[0] is None:
        return
    definition, words = definition_of(operation), attributes_of(operation)
    ways = [[COPIES, *_axes(kind, degree)] for kind in operands]
    if prod(map(len, ways)) > _MOST_WAYS:
        return
    for parts in product(*ways):
        if all(part == COPIES for part in parts):
            continue
        shards = tuple([_shard(k, part, degree) for k, part in zip(operands, parts, strict=True)])
        for made in [SUMS, *_axes(results[0], degree)]:
            of_results = tuple([_shard(kind, made, degree) for kind in results])
            divided = DividedOperation(
                operation, definition, words, shards, of_results, tuple(constants), parts,
                tuple(results),
            ).divided_results()  # fmt: skip
            if divided == (made,) * len(results) and _computes(
                operation, shards, of_results, constants, parts
            ):
                yield Division(tuple(map(_axis, parts)), tuple(map(_axis, divided)))


def _computes(
    operation: Operation, shards: Sequence[ValueType | None],
    of_results: Sequence[ValueType | None], constants: Sequence[Array | None],
    parts: Sequence[Part],
) -> bool:  # fmt: skip
    """Whether the operator has these types; the shape operand of a Reshape is that of a shard."""
    if operation.op == "Reshape":
        return True
    known = [data if part == COPIES else None for data, part in zip(constants, parts, strict=True)]
    try:
        return tuple(infer_operation(operation, shards, known)) == tuple(of_results)
    except CompileError:
        return False


def _axes(kind: ValueType | None, degree: int) -> list[Part]:
    """Return the axes that divide into so many shards."""
    return [] if kind is None else [i for i, n in enumerate(kind.shape) if n and not n % degree]


def _shard(kind: ValueType | None, part: Part, degree: int) -> ValueType | None:
    if kind is None or not isinstance(part, int) or part >= len(kind.shape):
        return kind
    shape = list(kind.shape)
    shape[part] //= degree
    return ValueType(tuple(shape), kind.data_type)


def _axis(part: Part) -> int | None:
    return part if isinstance(part, int) else None

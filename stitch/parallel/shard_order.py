"""The order of the shards of a value: the divisions that made them, the first one outermost.

`Repartition` and `Replicate` divide each shard further, and its parts follow one another. So the
number of a shard has a digit for each division, the last division is the fastest one, and only that
can be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias

from stitch.errors import CompileError
from stitch.ops import COPIES, SUMS, DividedOperation, Part, attributes_of, definition_of
from stitch.program import ABSENT, Array, Operation, ValueType

#: Micro-batches side by side along axis 0: independent of one another in all operators.
REPLICAS: Final = "replicas"


class Division(NamedTuple):
    """One division of each shard into `degree` parts: along an axis, `COPIES`, `SUMS` or
    `REPLICAS`."""

    part: Part
    degree: int

    def text(self) -> str:
        """Return the division in words."""
        return f"{f'axis {self.part}' if isinstance(self.part, int) else self.part} {self.degree}"


Order: TypeAlias = tuple[Division, ...]


def text_of(order: Order) -> str:
    """Return an order in words."""
    return ", then ".join(division.text() for division in order) or "whole"


def joined(divisions: Iterable[Division]) -> Order:
    """Return divisions of which equal ones that follow one another are one."""
    order: list[Division] = []
    for division in divisions:
        if order and order[-1].part == division.part:
            division = Division(division.part, order.pop().degree * division.degree)
        if division.degree > 1:
            order.append(division)
    return tuple(order)


def order_after(order: Order, operation: Operation, rank: int, replicas: int = 1) -> Order:
    """Return the order after a parallel operator.

    Args:
        rank: The number of axes of the value.
        replicas: The number of replicas that a division along axis 0 begins with.

    Raises:
        CompileError: It joins shards in another order than that of their divisions.
    """
    words = attributes_of(operation)
    axis, degree = words.get("axis", 0), words["degree"]
    assert isinstance(axis, int) and isinstance(degree, int)
    axis %= max(rank, 1)
    if operation.op == "Replicate":
        return joined([*order, Division(COPIES, degree)])
    if operation.op == "Repartition":
        first = replicas if axis == 0 and not order and degree % replicas == 0 else 1
        return joined([*order, Division(REPLICAS, first), Division(axis, degree // first)])
    undone: set[Part] = {SUMS} if operation.op == "Reduction" else {axis}
    undone |= {REPLICAS} if axis == 0 and operation.op == "Combine" else set()
    left, rest = degree, list(order)
    while left > 1:
        last = rest.pop() if rest else None
        if last is None or last.part not in undone or (last.degree % left and left % last.degree):
            raise CompileError(
                f"{operation.op} joins other shards than those of the last division",
                expected=f"the inverse of the last division of: {text_of(order)}",
                got=Division(SUMS if operation.op == "Reduction" else axis, degree).text(),
                remedy="join the shards in the reverse order of their divisions",
            )
        if last.degree > left:
            rest.append(Division(last.part, last.degree // left))
        left = max(1, left // last.degree)
    return tuple(rest)


def orders_of_results(
    operation: Operation, orders: Sequence[Order | None], inputs: Sequence[ValueType | None],
    outputs: Sequence[ValueType | None], constants: Sequence[Array | None],
    wholes: Sequence[ValueType | None] = (),
) -> list[Order]:  # fmt: skip
    """Return the order of each result of an operator that runs on shard i of its operands.

    Args:
        orders: That of each operand, None for one that all shards read whole.
        inputs: The type of a shard of each operand.
        outputs: The type of a shard of each result.
        constants: The data of operands that are known at compile time.
        wholes: The type of the whole of each result.

    Raises:
        CompileError: The shards of operands do not correspond, or the operator does not permit how
            they are divided.
    """
    if not any(orders):
        return [()] * len(outputs)
    definition, words = definition_of(operation), attributes_of(operation)
    found: list[list[Division]] = [[] for _ in outputs]
    kinds, results = list(inputs), list(outputs)
    for level in reversed(_levels(orders)):
        degree = max(division.degree for division in level if division is not None)
        parts = tuple([COPIES if division is None else division.part for division in level])
        divided: Sequence[Part] | None
        if REPLICAS in parts:
            divided = [REPLICAS] * len(outputs) if {*parts} <= {REPLICAS, COPIES} else None
        else:
            divided = DividedOperation(
                operation,
                definition,
                words,
                tuple(kinds),
                tuple(results),
                tuple(constants),
                parts,
                tuple(wholes),
            ).divided_results()
        if divided is None:
            raise _refusal(operation, parts, degree)
        for own, part in zip(found, divided, strict=True):
            own.insert(0, Division(part, degree))
        kinds = [_whole(kind, part, degree) for kind, part in zip(kinds, parts, strict=True)]
        results = [_whole(kind, part, degree) for kind, part in zip(results, divided, strict=True)]
    return [joined(own) for own in found]


def _whole(kind: ValueType | None, part: Part, degree: int) -> ValueType | None:
    """Return the type of what is divided, of the type of a part."""
    axis = 0 if part == REPLICAS else part
    if kind is None or not isinstance(axis, int) or axis >= len(kind.shape):
        return kind
    shape = list(kind.shape)
    shape[axis] *= degree
    return ValueType(tuple(shape), kind.data_type)


def _levels(orders: Sequence[Order | None]) -> list[list[Division | None]]:
    """Return the divisions of all operands side by side, the outermost first.

    Divisions are cut where those of other operands end; None: an operand that is read whole.

    Raises:
        CompileError: They have no common cuts.
    """
    ends = sorted({
        prod(division.degree for division in order[: i + 1])
        for order in orders if order for i in range(len(order))
    })  # fmt: skip
    pairs = list(zip([1, *ends], ends, strict=False))
    if any(end % start for start, end in pairs):
        raise _of_other_shards(orders)
    degrees = [end // start for start, end in pairs]
    levels: list[list[Division | None]] = [[None] * len(orders) for _ in degrees]
    for i, order in enumerate(orders):
        rest = list(reversed(order or ()))
        for level, degree in enumerate(degrees if order else ()):
            division = rest.pop()
            if division.degree % degree:
                raise _of_other_shards(orders)
            levels[level][i] = Division(division.part, degree)
            if division.degree > degree:
                rest.append(Division(division.part, division.degree // degree))
    return levels


def _of_other_shards(orders: Sequence[Order | None]) -> CompileError:
    return CompileError(
        "the shards of the operands do not correspond",
        got="; ".join(text_of(order) for order in orders if order is not None),
        remedy="divide the operands into the same numbers in the same order",
    )


def _refusal(operation: Operation, parts: Sequence[Part], degree: int) -> CompileError:
    """Return the error of an operator that does not permit how its operands are divided."""
    present = [part for v, part in zip(operation.inputs, parts, strict=True) if v != ABSENT]
    how = ", ".join(f"axis {part}" if isinstance(part, int) else part for part in present)
    undo = [
        f"Reduction(degree={degree}) of operand {i}" if part == SUMS
        else f"Combine(axis={0 if part == REPLICAS else part}, degree={degree}) of operand {i}"
        for i, part in enumerate(parts) if part != COPIES
    ]  # fmt: skip
    return CompileError(
        f"{operation.op} of shards gives no shards of its result",
        expected="operands divided along an axis that the operator keeps or sums over; partial "
        "sums only of operands in which it is linear",
        got=f"operands divided into {degree} by: {how}",
        remedy=f"insert {' and '.join(undo)} before it",
    )

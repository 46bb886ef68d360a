"""Orders of axes: what a transpose does, and which transposes exchange rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.program import Operation, Value


def axis_order(operation: Operation, values: Sequence[Value]) -> tuple[int, ...] | None:
    """The operand's axes in the order of the result's; None for what is no transpose."""
    if operation.op != "Transpose" or operation.domain:
        return None
    order = operation.attributes.get("perm")
    if isinstance(order, tuple):
        return tuple(map(int, order))
    return tuple(range(len(values[operation.inputs[0]].type.shape)))[::-1]


def exchange(rank: int) -> tuple[int, ...]:
    """The order that makes rows of the columns of each matrix.

    >>> exchange(3)
    (0, 2, 1)
    """
    return (*range(rank - 2), rank - 1, rank - 2)

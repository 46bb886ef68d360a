"""Nesting: what bodies within bodies come to, counted before anything is written out or bound.

Both in time linear in what is there: a few bytes describe any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from stitch.program.operation import Constant, Operation, Value
from stitch.program.scans import ScanForm, is_scan

#: Operations, values and constants that the bodies of one program may come to: written out, and a
#: scan's as often as executors bind it.
MAX_EXPANSION = 1 << 18
#: So many scans may stand within each other: who walks bodies may do so recursively.
MAX_SCAN_DEPTH = 16


class Nested(Protocol):
    """What counts of a body."""

    @property
    def values(self) -> tuple[Value, ...]:
        """Its values."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What it computes."""

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Its constants."""


def expansion_size(operations: Sequence[Operation], bodies: Sequence[Nested]) -> int:
    """Operations, values and constants that the bodies of operations come to; counted to a little
    more than `MAX_EXPANSION` for each."""
    sizes: list[int] = []
    for body in bodies:
        own = len(body.operations) + len(body.values) + len(body.constants)
        inner = sum(_times(o) * sizes[o.body] for o in _carriers(body.operations, len(sizes)))
        sizes.append(min(own + inner, MAX_EXPANSION + 1))
    return sum(_times(o) * sizes[o.body] for o in _carriers(operations, len(sizes)))


def scan_depth(operations: Sequence[Operation], bodies: Sequence[Nested]) -> int:
    """How many scans stand within each other; 0 without any."""
    depths: list[int] = []
    for body in bodies:
        deepest = _deepest(body.operations, depths)
        depths.append(deepest)
    return _deepest(operations, depths)


def _deepest(operations: Sequence[Operation], depths: Sequence[int]) -> int:
    carriers = _carriers(operations, len(depths))
    return max((is_scan(o) + depths[o.body] for o in carriers), default=0)


def _carriers(operations: Sequence[Operation], usable: int) -> Iterator[Operation]:
    """The operations that carry a body that they may carry."""
    return (o for o in operations if 0 <= o.body < usable)


def _times(operation: Operation) -> int:
    """How often the body of an operation counts."""
    if not is_scan(operation):
        return 1
    try:
        return max(1, ScanForm.of(operation).sides)
    except ValueError:
        return 1  # Said elsewhere.

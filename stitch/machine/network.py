"""The network on chip: rates and latencies of its links, and the load of the busiest link.

A chip is a grid of routers, closed to a ring in both directions, with two networks. On the first,
reads and writes go east along their row and then south; on the second, north along their column and
then west (tt-npe's device models). So the load of each link of a ring follows from the bytes
between each pair of its routers, by one product with a table of paths.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Curve = tuple[tuple[int, float], ...]
#: Floats or integers.
Array = np.ndarray[Any, np.dtype[Any]]


def read_curve(curve: Curve, transfer_nbytes: int) -> float:
    """Return the rate at a transfer size: linear between the points, constant above the last.

    Below the first point the time of a transfer is constant, so the rate is proportional to the
    size.

    >>> read_curve(((128, 4.0), (256, 8.0)), 192), read_curve(((128, 4.0), (256, 8.0)), 64)
    (6.0, 2.0)
    """
    before = curve[0]
    if transfer_nbytes <= before[0]:
        return before[1] * max(1, transfer_nbytes) / before[0]
    for after in curve[1:]:
        if transfer_nbytes <= after[0]:
            share = (transfer_nbytes - before[0]) / (after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1]


class Route(enum.Enum):
    """How far the bytes of a copy go: within a core, along a column, a row, or both."""

    CORE = "core"
    COLUMN = "column"
    ROW = "row"
    BOTH = "both"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Routers:
    """Router rows and columns of the core grid, and the router (row, column) of each DRAM bank."""

    grid: tuple[int, int]
    core_rows: tuple[int, ...]
    core_columns: tuple[int, ...]
    dram: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Noc:
    """The network on chip: rates in bytes per cycle, latencies in cycles.

    `curve`: the rate of one core's link by transfer size. `read_latency`: until the first bytes of
    a read arrive, by route. `link`, `core`, `dram`: limits of one link, of one core's L1, and of
    one DRAM bank, shared by all readers. Measured: `dram_queueing`, the slowdown of links between
    DRAM and cores; `turns`, the share of sequential reads of one source that does not overlap with
    others. Without `routers`, link loads are ignored.
    """

    clock_hz: float
    curve: Curve
    latency_cycles: float
    latency_cycles_per_hop: float
    read_latency: tuple[tuple[Route, float], ...] = ()
    link: float | None = None
    core: float | None = None
    dram: float | None = None
    dram_queueing: float = 1.0
    turns: float = 0.0
    routers: Routers | None = None

    def write_latency_cycles(self, hops: float) -> float:
        """Return the cycles until the first bytes of a write arrive, `hops` routers away."""
        return self.latency_cycles + self.latency_cycles_per_hop * hops

    def read_latency_cycles(self, route: Route) -> float | None:
        """Return the cycles until the first bytes of a read arrive; None if not described."""
        return dict(self.read_latency).get(route)


@dataclass(frozen=True, slots=True, eq=False)
class AlongAxis:
    """Rows or columns of routers, one for each segment of tensor axis 0 or 1."""

    axis: int
    values: Array

    def select(self, axis: int, at: Array) -> AlongAxis:
        """Select segments of an axis."""
        return AlongAxis(axis, self.values[at]) if axis == self.axis else self

    def differs(self, other: AlongAxis) -> bool:
        """Whether any flow leads to another row or column."""
        if self.axis == other.axis:
            return bool((self.values != other.values).any())
        one = self.values[0]
        return bool((other.values != one).any() or (self.values != one).any())


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """The source or target routers of flows: the row by one tensor axis, the column by another."""

    row: AlongAxis
    column: AlongAxis

    def select(self, axis: int, at: Array) -> End:
        """Select segments of an axis."""
        return End(self.row.select(axis, at), self.column.select(axis, at))


def route_between(sent: End, received: End) -> Route:
    """Return how far flows go."""
    if sent.row.differs(received.row):
        return Route.BOTH if sent.column.differs(received.column) else Route.COLUMN
    return Route.ROW if sent.column.differs(received.column) else Route.CORE


def busiest_link_of_flows(
    routers: Routers, sent: End, received: End, parts: tuple[Array, Array]
) -> float:
    """Return the share of all bytes that the busiest link of the first network carries.

    Segment i of the first axis and j of the second flow `parts[0][i] * parts[1][j]`. For the second
    network, swap the ends.
    """
    rows, columns = routers.grid
    return max(
        _busiest_of_rings(parts, sent.row, sent.column, received.column, rows, columns),
        _busiest_of_rings(parts, received.column, sent.row, received.row, columns, rows),
    )


def _busiest_of_rings(
    parts: tuple[Array, Array], ring: AlongAxis, start: AlongAxis, end: AlongAxis,
    rings: int, length: int,
) -> float:  # fmt: skip
    """Return the load of the busiest link of equal rings, with each flow on one ring."""
    paths = _ring(length)

    def counted(first: AlongAxis, *then: AlongAxis) -> Array:
        key = first.values
        for place in then:
            key = key * length + place.values
        size = (length if first is not ring else rings) * length ** len(then)
        return np.bincount(key, parts[first.axis], size)

    if start.axis == end.axis == ring.axis:
        between = counted(ring, start, end).reshape(rings, length * length)
        whole = math.fsum(parts[1 - ring.axis].tolist())
        return whole * float((between @ paths.reshape(-1, length)).max())
    if start.axis == end.axis:
        loads = counted(start, end) @ paths.reshape(-1, length)
        return float(loads.max()) * float(counted(ring).max())
    if ring.axis == start.axis:
        onward = counted(end) @ paths
        return float((counted(ring, start).reshape(rings, length) @ onward).max())
    back = (counted(start) @ paths.reshape(length, -1)).reshape(length, length)
    return float((counted(ring, end).reshape(rings, length) @ back).max())


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """A tensor that every core reads equally, with its `shares` by router, on the first network.

    `along`: the load of each link of each row by reading column; `across`: the load of each link of
    a column by reading router. Writes over the second network take the same paths back.
    """

    shares: Array
    along: Array
    across: Array

    @classmethod
    def of(cls, shares: Array) -> Spread:
        """Precompute the loads for `shares`."""
        rows, columns = shares.shape
        along = np.einsum("yx,xtl->tyl", shares, _ring(columns)).reshape(columns, -1)
        across = np.einsum("y,ytl->tl", shares.sum(1), _ring(rows))
        return cls(shares, along, across)

    def busiest_link(self, nbytes: Array) -> float:
        """Return the bytes on the busiest link if every router reads its `nbytes`."""
        return max(float((nbytes.sum(0) @ self.along).max()), float((nbytes.T @ self.across).max()))


@lru_cache(maxsize=16)
def _ring(length: int) -> Array:
    """Return the links between each pair of routers of a ring: 1 or 0 by (from, to, link)."""
    start, end, link = np.ogrid[:length, :length, :length]
    paths: Array = ((link - start) % length < (end - start) % length).astype(np.float64)
    paths.setflags(write=False)
    return paths

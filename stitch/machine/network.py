"""The network on chip: rates and latencies of its links, and how much the busiest link carries.

A chip is a grid of routers, closed to a ring in both directions, with two networks. What a read or
a write carries goes, on the first network, east along its row and then south; on the second north
along its column and then west (tt-npe's device models). So the load of each link of a ring follows
from how many bytes go between each pair of its routers, by one product with a table of paths.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Curve = tuple[tuple[int, float], ...]
#: Floats or whole numbers: bytes by router, or positions.
Array = np.ndarray[Any, np.dtype[Any]]


def read_curve(curve: Curve, transfer_nbytes: int) -> float:
    """The rate at a transfer size: linear between the points, flat above the last.

    Below the first point the time of one transfer is that of the first point, so the rate falls in
    proportion to the size.

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
    """How far the bytes of a copy go: not beyond their core, along a column, a row, or both."""

    CORE = "core"
    COLUMN = "column"
    ROW = "row"
    BOTH = "both"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Routers:
    """Where cores and DRAM stand: the rows and columns of routers that compute cores have, in the
    order of the core grid (what goes beyond it is not used), and the router (row, column) that each
    DRAM bank answers at."""

    grid: tuple[int, int]
    core_rows: tuple[int, ...]
    core_columns: tuple[int, ...]
    dram: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Noc:
    """The network on chip: rates in bytes per cycle, latencies in cycles.

    `curve`: what one core carries over its link, by the size of a transfer. `read_latency`: from
    a read until its first bytes, by route. `link`, `core` and `dram`: what one link, what lies in
    one core, and one DRAM bank give at most, to all who read it together. By measurement:
    `dram_queueing`: how many times as long links take over what goes between DRAM and cores;
    `turns`: how much of what sources give in turn, one after the other, is not given beside each
    other. Without `routers` no link is looked at.
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

    def bytes_per_cycle(self, transfer_nbytes: int) -> float:
        """Bytes per cycle over one core's link, in transfers of a size."""
        return read_curve(self.curve, transfer_nbytes)

    @property
    def issue_cycles(self) -> float:
        """What a core takes to issue a transfer: as long as the least of its table takes."""
        nbytes, rate = self.curve[0]
        return nbytes / rate

    def write_latency_cycles(self, hops: float) -> float:
        """Cycles from the start of a write until its first bytes arrive, `hops` routers away."""
        return self.latency_cycles + self.latency_cycles_per_hop * hops

    def read_latency_cycles(self, route: Route) -> float | None:
        """Cycles from the start of a read until its first bytes arrive; None: not described."""
        return dict(self.read_latency).get(route)


# -- loads of links --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AlongAxis:
    """Rows or columns of routers, one for each stretch of an axis, 0 or 1, of a tensor."""

    axis: int
    values: Array

    def only(self, axis: int, at: Array) -> AlongAxis:
        """Of some stretches of an axis only."""
        return AlongAxis(axis, self.values[at]) if axis == self.axis else self

    def differs(self, other: AlongAxis) -> bool:
        """Whether any flow leads from one to another."""
        if self.axis == other.axis:
            return bool((self.values != other.values).any())
        one = self.values[0]
        return bool((other.values != one).any() or (self.values != one).any())


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """One end of flows that are the product of two axes: the router of each, its row and column."""

    row: AlongAxis
    column: AlongAxis

    def only(self, axis: int, at: Array) -> End:
        """Of some stretches of an axis only."""
        return End(self.row.only(axis, at), self.column.only(axis, at))


def route_between(sent: End, received: End) -> Route:
    """How far flows go."""
    if sent.row.differs(received.row):
        return Route.BOTH if sent.column.differs(received.column) else Route.COLUMN
    return Route.ROW if sent.column.differs(received.column) else Route.CORE


def busiest_link_of_flows(
    routers: Routers, sent: End, received: End, parts: tuple[Array, Array]
) -> float:
    """Which part of all that flows the busiest link of the first network carries.

    From stretch i of the first axis and j of the second flows `parts[0][i] * parts[1][j]`. On the
    second network bytes go the way on which others, on the first, would come back.
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
    """What the busiest link carries of several rings alike, each flow on one, from start to end."""
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
    """A tensor of which everybody reads the same `shares` from each router, on the first network.

    `along`: how much of what a column gets goes over each link of each row; `across`: how much of
    what a router gets over each link of its column. What is written to a spread over the second
    network goes the same ways back.
    """

    shares: Array
    along: Array
    across: Array

    @classmethod
    def of(cls, shares: Array) -> Spread:
        """`shares`: which part lies at each router."""
        rows, columns = shares.shape
        along = np.einsum("yx,xtl->tyl", shares, _ring(columns)).reshape(columns, -1)
        across = np.einsum("y,ytl->tl", shares.sum(1), _ring(rows))
        return cls(shares, along, across)

    def busiest_link(self, nbytes: Array) -> float:
        """The bytes that the busiest link carries where every router gets its `nbytes`."""
        return max(float((nbytes.sum(0) @ self.along).max()), float((nbytes.T @ self.across).max()))


@lru_cache(maxsize=16)
def _ring(length: int) -> Array:
    """For each pair of a ring's routers, which links (by the router that they leave) lead from the
    one to the other: 1 or 0, by (from, to, link)."""
    start, end, link = np.ogrid[:length, :length, :length]
    paths: Array = ((link - start) % length < (end - start) % length).astype(np.float64)
    paths.setflags(write=False)
    return paths

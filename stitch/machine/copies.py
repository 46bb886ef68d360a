"""How the bytes of a copy spread over cores, banks and links: `copy_counts`, from two descriptors.

As in tt-metal's kernels, the cores of the target's shards read; without shards there, those of the
source's shards write; else all compute cores take the pages in turn, and read and write. Shards
read by shards use both networks, half of a shard's pages each (the upper half on the first, or the
left one of a shard of one row of pages); otherwise reads use the first network and writes the
second. Interleaved pages are assumed to be even over all banks. Copies within L1 that keep the
layout or the shards stay in their cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stitch.machine.machine import CopyCounts, Machine
from stitch.machine.network import (
    AlongAxis,
    Array,
    End,
    Route,
    Routers,
    Spread,
    busiest_link_of_flows,
    route_between,
)
from stitch.machine.shape import Footprint, MachineShape, footprint, page_shape, shard_counts
from stitch.program import MemoryLayout, Orientation, Space, TensorDesc


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """The segments of an axis in which one piece of the source (`own`) meets one of the target.

    `part` is the share of the axis; `is_late`: the segment is in the second half of the target's
    piece; `is_first`: it is the first of its half. Without halves none is late.
    """

    own: Array
    piece: Array
    part: Array
    is_late: Array
    is_first: Array
    is_halved: bool

    def given(self) -> tuple[float, float]:
        """Return the busiest source piece's share for one half, and its sum over turns."""
        pieces, halves = int(self.own[-1]) + 1, 1 + self.is_halved
        if self.is_first.all():
            turns, turn = 1, np.zeros(1, np.int64)
        else:
            order = np.arange(len(self.own))
            turn = order - np.maximum.accumulate(order * self.is_first)
            turns = int(turn.max()) + 1
        row = self.is_late * turns + turn if self.is_halved else turn
        parts = np.bincount(row * pieces + self.own, self.part, halves * turns * pieces)
        if turns == 1:
            busiest = float(parts.max())
            return busiest, busiest
        by_turn = parts.reshape(halves, turns, pieces)
        return float(by_turn.sum(1).max()), float(by_turn.max(2).sum(1).max())


def overlaps_along(
    lengths: tuple[int, int], steps: tuple[int, int], page: int, *, is_halved: bool
) -> Overlaps:
    """Return the overlaps of two divisions of an axis; a half consists of whole pages.

    `lengths` and `steps` are those of source and target.
    """
    # Different padding: scale both ends to a common length.
    (own_length, length), (own, step) = lengths, steps
    half = -(-step // page // 2) * page if is_halved else step
    if own_length != length:
        own, step, half = own * length, step * own_length, half * own_length
        length *= own_length
    finest = min(own, half)
    if own % finest == step % finest == half % finest == 0:
        at = np.append(np.arange(0, length, finest), length)
    else:
        ends = (np.arange(0, length, own), np.arange(0, length, step))
        halves = (np.arange(half, length, step),) if is_halved else ()
        at = np.concatenate((*ends, *halves, (length,)))
        at.sort()
        is_new = np.empty(len(at), bool)
        is_new[0] = True
        np.not_equal(at[1:], at[:-1], out=is_new[1:])
        at = at[is_new]
    start = at[:-1]
    piece = start // step
    offset = start - piece * step
    is_late, is_first = offset >= half, offset == 0
    if is_halved:
        is_first |= offset == half
    return Overlaps(start // own, piece, (at[1:] - start) / length, is_late, is_first, is_halved)


@lru_cache(maxsize=4096)
def copy_counts(source: TensorDesc, target: TensorDesc, machine: Machine) -> CopyCounts:
    """Return what determines the time of a copy; addresses do not matter.

    The bytes are those of the larger end: of tiles that are cut to rows all is read. Padding of
    shards does not count.

    >>> from stitch.machine import load_machine
    >>> from stitch.program import DataType, Layout
    >>> ends = [TensorDesc((64, 512), Layout(DataType.FLOAT32, s)) for s in (Space.DRAM, Space.L1)]
    >>> counts = copy_counts(*ends, load_machine("wormhole_n150"))
    >>> counts.transfers, counts.reading_cores, counts.source_nodes, counts.busiest_source_nbytes
    (64, 64, 12, 12288)
    """
    ends = _Ends(source, target, machine.shape)
    from_space, to_space = source.layout.space, target.layout.space
    if Space.HOST in (from_space, to_space) or 0 in source.shape:
        return CopyCounts(from_space, to_space, ends.transfers, ends.nbytes, ends.page_nbytes)
    routers = None if machine.noc is None else machine.noc.routers
    if routers is not None:
        dram = machine.shape.dram
        routers = _routers_for(routers, machine.shape.core_grid, 0 if dram is None else dram.banks)
    if (
        from_space is to_space is Space.L1
        and source.layout.without_address() == target.layout.without_address()
    ):
        return _within_cores(ends)
    if _has_cores(target):
        return _read_by_shards(ends, routers)
    if _has_cores(source):
        return _written_by_shards(ends, routers)
    return _by_all_cores(ends, routers)


@lru_cache(maxsize=64)
def _routers_for(routers: Routers, core_grid: tuple[int, int], banks: int) -> Routers | None:
    """Return the routers of so many cores and banks; None if the machine describes fewer."""
    rows, columns = routers.core_rows[: core_grid[0]], routers.core_columns[: core_grid[1]]
    if (len(rows), len(columns)) != core_grid or len(routers.dram) < banks:
        return None
    return Routers(routers.grid, rows, columns, routers.dram[:banks])


class _Contention(NamedTuple):
    """Contention: see `CopyCounts`."""

    networks: int
    link: float
    route: Route | None
    port: float = 0.0
    in_turn: float = 0.0


class _Ends:
    """Both ends of a copy, its bytes and its transfers."""

    __slots__ = ("nbytes", "page_nbytes", "read", "shape", "source", "target", "transfers",
                 "written")  # fmt: skip

    def __init__(self, source: TensorDesc, target: TensorDesc, shape: MachineShape) -> None:
        self.source, self.target, self.shape = source, target, shape
        self.read, self.written = footprint(source, shape), footprint(target, shape)
        self.nbytes = max(_nbytes_of(source), _nbytes_of(target))
        self.page_nbytes = max(1, min(self.read.page_nbytes, self.written.page_nbytes))
        self.transfers = -(-self.nbytes // self.page_nbytes)

    def counts(
        self, cores: int, busiest_nbytes: int, nodes: tuple[int, int], contention: _Contention
    ) -> CopyCounts:
        """`nodes`: their number, and the bytes of the busiest."""
        return CopyCounts(
            self.source.layout.space, self.target.layout.space, self.transfers, self.nbytes,
            self.page_nbytes, cores, busiest_nbytes, -(-busiest_nbytes // self.page_nbytes),
            *nodes, contention.networks, round(contention.port or nodes[1]), round(contention.link),
            round(contention.in_turn), contention.route,
        )  # fmt: skip

    def nodes(self, desc: TensorDesc, found: Footprint) -> tuple[int, int]:
        """Return the number of cores or banks of an end, and the bytes in the fullest."""
        if desc.layout.shard_spec is not None:
            down, across = shard_counts(desc, desc.layout.shard_spec)
            (rows, columns), (high, wide) = desc.rows_and_columns, desc.layout.shard_spec.shape
            fullest = min(rows, high) * min(columns, wide)
            return down * across, -(-fullest * self.nbytes // max(1, rows * columns))
        pages = max(1, found.pages)
        return min(pages, found.banks), -(-pages // found.banks) * self.nbytes // pages


def _nbytes_of(desc: TensorDesc) -> int:
    rows, columns = desc.rows_and_columns
    return desc.layout.data_type.nbytes(rows * columns)


def _has_cores(desc: TensorDesc) -> bool:
    return desc.layout.shard_spec is not None and desc.layout.space is Space.L1


def _within_cores(ends: _Ends) -> CopyCounts:
    cores, busiest = ends.nodes(ends.target, ends.written)
    return ends.counts(cores, busiest, (cores, busiest), _Contention(1, 0.0, Route.CORE))


def _read_by_shards(ends: _Ends, routers: Routers | None) -> CopyCounts:
    cores, busiest = ends.nodes(ends.target, ends.written)
    nodes = ends.nodes(ends.source, ends.read)
    if not _has_cores(ends.source):
        link = _link_of_shards(ends, routers, ends.target, ends.source)
        return ends.counts(cores, busiest, nodes, _Contention(1, link, Route.BOTH))
    # At most two transfers are made by one of the two processors.
    networks = 2 if busiest > 2 * ends.page_nbytes else 1
    return ends.counts(cores, busiest, nodes, _between_shards(ends, routers, networks))


def _written_by_shards(ends: _Ends, routers: Routers | None) -> CopyCounts:
    cores, busiest = ends.nodes(ends.source, ends.read)
    nodes = ends.nodes(ends.target, ends.written)
    link = _link_of_shards(ends, routers, ends.source, ends.target)
    return ends.counts(cores, busiest, nodes, _Contention(1, link, None))


def _link_of_shards(
    ends: _Ends, routers: Routers | None, shards: TensorDesc, other: TensorDesc
) -> float:
    if routers is None:
        return 0.0
    return _spread(routers, other).busiest_link(ends.nbytes * _shares(routers, shards))


def _by_all_cores(ends: _Ends, routers: Routers | None) -> CopyCounts:
    l1 = ends.shape.l1
    cores = min(ends.transfers, 1 if l1 is None else l1.banks)
    busiest = -(-ends.transfers // cores) * ends.page_nbytes
    sides = ((ends.source, ends.read), (ends.target, ends.written))
    in_dram = [side for side in sides if side[0].layout.space is Space.DRAM]
    nodes = max((ends.nodes(*side) for side in in_dram or sides), key=lambda node: node[1])
    link = 0.0
    if routers is not None:
        link = ends.nbytes * max(_link_to_all_cores(routers, desc) for desc, _ in sides)
    return ends.counts(cores, busiest, nodes, _Contention(1, link, None))


def _link_to_all_cores(routers: Routers, desc: TensorDesc) -> float:
    if desc.layout.shard_spec is None:
        return _even_link_to_all_cores(routers, desc.layout.space)
    return _spread(routers, desc).busiest_link(_evenly(routers, Space.L1).shares)


@lru_cache(maxsize=64)
def _even_link_to_all_cores(routers: Routers, space: Space) -> float:
    return _evenly(routers, space).busiest_link(_evenly(routers, Space.L1).shares)


def _spread(routers: Routers, desc: TensorDesc) -> Spread:
    if desc.layout.shard_spec is None:
        return _evenly(routers, desc.layout.space)
    return Spread.of(_shares(routers, desc))


@lru_cache(maxsize=64)
def _evenly(routers: Routers, space: Space) -> Spread:
    """Return equal shares at every core, or at every DRAM bank."""
    shares: Array = np.zeros(routers.grid)
    if space is Space.L1:
        shares[np.ix_(routers.core_rows, routers.core_columns)] = 1
    else:
        np.add.at(shares, tuple(np.transpose(routers.dram)), 1)
    return Spread.of(shares / shares.sum())


def _shares(routers: Routers, desc: TensorDesc) -> Array:
    """Return the share of a sharded tensor at each router."""
    spec = desc.layout.shard_spec
    assert spec is not None
    down, across = shard_counts(desc, spec)
    parts = [
        np.minimum(step, length - step * np.arange(count)) / max(1, length)
        for count, step, length in zip(
            (down, across), spec.shape, desc.rows_and_columns, strict=True
        )
    ]
    nbytes = np.multiply.outer(*parts)
    shares: Array = np.zeros(routers.grid)
    if desc.layout.space is Space.L1:
        end = _routers_of(routers, desc, (np.arange(down), np.arange(across)))
        rows, columns = (
            at.values if at.axis else at.values[:, None] for at in (end.row, end.column)
        )
        shares[rows, columns] = nbytes
    else:
        banks = np.asarray(routers.dram)[: down * across]
        np.add.at(shares, tuple(banks.T), nbytes.ravel())
    return shares


def _routers_of(routers: Routers, desc: TensorDesc, pieces: tuple[Array, Array]) -> End:
    """Return the routers of shards by their position down and across."""
    spec, layout = desc.layout.shard_spec, desc.layout.memory_layout
    assert spec is not None
    by_rows = spec.orientation is Orientation.ROW_MAJOR
    core_rows, core_columns = np.asarray(routers.core_rows), np.asarray(routers.core_columns)
    if layout is MemoryLayout.BLOCK_SHARDED:
        row, column = (0, 1) if by_rows else (1, 0)
        rows, columns = pieces[row], pieces[column]
    else:
        row = column = int(layout is MemoryLayout.WIDTH_SHARDED)
        if by_rows:
            rows, columns = divmod(pieces[row], spec.core_grid[1])
        else:
            columns, rows = divmod(pieces[row], spec.core_grid[0])
    return End(AlongAxis(row, core_rows[rows]), AlongAxis(column, core_columns[columns]))


def _between_shards(ends: _Ends, routers: Routers | None, networks: int) -> _Contention:
    source, target = ends.source, ends.target
    own, other = source.layout.shard_spec, target.layout.shard_spec
    assert own is not None and other is not None
    lengths = tuple(zip(source.rows_and_columns, target.rows_and_columns, strict=True))
    page = page_shape(target)
    # A shard is halved by rows of pages, or by columns if it has a single row.
    halved = int(other.shape[0] <= page[0])
    down, across = (
        overlaps_along(lengths[axis], (own.shape[axis], other.shape[axis]), page[axis],
                  is_halved=networks == 2 and axis == halved)
        for axis in (0, 1)
    )  # fmt: skip
    whole, split = (down, across)[1 - halved], (down, across)[halved]
    given = zip(whole.given(), split.given(), strict=True)
    port, in_turn = (part * other * ends.nbytes for part, other in given)
    if routers is None:
        return _Contention(networks, 0.0, None, port, in_turn)
    sent = _routers_of(routers, source, (down.own, across.own))
    received = _routers_of(routers, target, (down.piece, across.piece))
    route = route_between(sent, received)
    if route is Route.CORE:
        return _Contention(networks, 0.0, route, port)
    link = 0.0
    for second in (False, True)[:networks]:
        part, of, to = split.part, sent, received
        if networks == 2:
            at = (split.is_late if second else ~split.is_late).nonzero()[0]
            part, of, to = part[at], of.select(halved, at), to.select(halved, at)
        if second:
            of, to = to, of
        parts = (whole.part, part) if halved else (part, whole.part)
        link = max(link, busiest_link_of_flows(routers, of, to, parts))
    return _Contention(networks, link * ends.nbytes, route, port, in_turn)

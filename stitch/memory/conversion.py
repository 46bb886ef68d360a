"""Layout conversion: any legal layout to any other, prepared once and run often.

The cheapest path: same form, the used bytes as they are; same kind of cell, one strided copy per
pair of shards; else strips of about 256 KiB run through gather, decode, cast, tilize or untilize,
cast, encode, scatter, of which most conversions need one or two, and staging stays in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from stitch.errors import LayoutError
from stitch.machine import Footprint, MachineShape
from stitch.memory.cells import Bytes, CellMap, map_cells, paired_views, shared_parts
from stitch.memory.space_memory import WriteCounter
from stitch.memory.stages import Call, Staging, Strip, bind_strips
from stitch.memory.strips import Side, conversion_strips, dense_twin
from stitch.program import TensorDesc

_NO_STAGING = Staging((0, 0), 0)
#: Copy pairs of shards directly up to this many calls per shard; beyond, by way of dense rows.
_CALLS_PER_SHARD = 4
#: Calls of a copy that a run makes one by one; where there are more, what a call costs weighs
#: little.
_FEW_CALLS = 4


@dataclass(frozen=True, slots=True)
class _Leg:
    """One part of a conversion: strips, or cell-by-cell copies between two maps of cells."""

    strips: tuple[Strip, ...]
    cells: tuple[CellMap, CellMap] | None
    staging: Staging

    def calls(self, source: Bytes, target: Bytes) -> list[Call]:
        if self.cells is None:
            return bind_strips(self.strips, self.staging, source, target)
        ours, theirs = self.cells
        nbytes = theirs.cell_nbytes
        pairs = (
            paired_views(source, target, parts, nbytes) for parts in shared_parts(ours, theirs)
        )
        return [partial(np.copyto, goal, given) for given, goal in pairs]


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """A prepared copy between two layouts; `path` says what it does, in order.

    `written_nbytes` is what a counter records per run: see `Footprint.own_nbytes`.
    """

    source: TensorDesc
    target: TensorDesc
    path: tuple[str, ...]
    source_footprint: Footprint
    target_footprint: Footprint
    legs: tuple[_Leg, ...]
    #: Bytes of dense rows after each leg but the last.
    between: tuple[int, ...]
    changes_numbers: bool

    @property
    def staging_nbytes(self) -> int:
        """Bytes that `bind` allocates beside source and target."""
        return sum(self.between) + sum(leg.staging.nbytes for leg in self.legs)

    @property
    def written_nbytes(self) -> int:
        return self.target_footprint.own_nbytes

    def bind(self, source: Bytes, target: Bytes, counter: WriteCounter | None = None) -> Call:
        """The copy on given bytes, as a call without arguments that allocates nothing.

        `source`, `target`: one-dimensional uint8 arrays, at least as long as the footprints (a
        dense side may be as short as its elements). Each run adds itself to `counter`.
        """
        calls = self.calls(source, target, counter)
        if not self.changes_numbers:
            return calls[0] if len(calls) == 1 else partial(_call_all, calls)
        return partial(_call_all_quietly, calls)

    def calls(
        self, source: Bytes, target: Bytes, counter: WriteCounter | None = None
    ) -> tuple[Call, ...]:
        """As `bind`: few calls one after the other, for a run in which NumPy ignores overflow and
        NaN, of which it would warn (they are defined here, see strips)."""
        stops = [source, *(np.empty(nbytes, np.uint8) for nbytes in self.between), target]
        calls: list[Call] = []
        for i, leg in enumerate(self.legs):
            calls += leg.calls(stops[i], stops[i + 1])
        if len(calls) > _FEW_CALLS:
            calls = [partial(_call_all, tuple(calls))]
        if counter is not None:
            calls.append(counter.arrivals(1, self.written_nbytes))
        return tuple(calls)


def _call_all(calls: tuple[Call, ...]) -> None:
    for call in calls:
        call()


def _call_all_quietly(calls: tuple[Call, ...]) -> None:
    with np.errstate(all="ignore"):
        _call_all(calls)


@lru_cache(maxsize=1024)
def prepare_copy(source: TensorDesc, target: TensorDesc, machine: MachineShape) -> CopyKernel:
    """The cheapest copy from one layout to another; remembered per pair of descriptions.

    Raises `LayoutError` where the shapes differ or a layout does not fit the machine.
    """
    if source.shape != target.shape:
        raise LayoutError(
            "a copy changes layouts, never shapes",
            expected=f"shape {target.shape}",
            got=f"shape {source.shape}",
            remedy="reshape first",
        )
    ours, theirs = (
        Side(source, map_cells(source, machine)),
        Side(target, map_cells(target, machine)),
    )
    legs, between = _plan_legs(ours, theirs, machine)
    return CopyKernel(
        source, target, _path(ours, theirs), ours.cells.footprint, theirs.cells.footprint,
        legs, between, source.layout.data_type is not target.layout.data_type,
    )  # fmt: skip


def _plan_legs(
    source: Side, target: Side, machine: MachineShape
) -> tuple[tuple[_Leg, ...], tuple[int, ...]]:
    """The legs from source to target, and the bytes of dense rows between them."""
    if not source.desc.elements:
        return (), ()
    if source.is_tiled == target.is_tiled and source.data_type is target.data_type:
        shards = len(source.cells.rectangles) + len(target.cells.rectangles)
        pairs = sum(1 for _ in shared_parts(source.cells, target.cells))
        if source.is_tiled or pairs <= _CALLS_PER_SHARD * shards:
            return (_Leg((), (source.cells, target.cells), _NO_STAGING),), ()
    # Row-major shards become dense rows before anything else, or after everything else.
    for side in (source, target):
        if side.is_sharded and not side.is_tiled:
            dense = dense_twin(side, machine)
            first, before = _plan_legs(source, dense, machine)
            second, after = _plan_legs(dense, target, machine)
            nbytes = dense.desc.elements * dense.data_type.itemsize
            return first + second, (*before, nbytes, *after)
    strips = tuple(conversion_strips(source, target))
    return (_Leg(strips, None, Staging.of(strips)),), ()


def _path(source: Side, target: Side) -> tuple[str, ...]:
    ours, theirs = source.desc.layout, target.desc.layout
    words = []
    if ours.data_type is not theirs.data_type:
        words.append("cast")
    if theirs.is_tiled and not ours.is_tiled:
        words.append("tilize")
    if ours.is_tiled and not theirs.is_tiled:
        words.append("untilize")
    if (ours.memory_layout, ours.shard_spec) != (theirs.memory_layout, theirs.shard_spec):
        words.append("reshard")
    if not words or ours.space is not theirs.space:
        words.append("move")
    return tuple(words)

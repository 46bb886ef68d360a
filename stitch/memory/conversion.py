"""Layout conversion: any legal layout to any other, prepared once and run often.

The cheapest path: same form, the used bytes as they are; same kind of cell, one strided copy per
pair of shards; else strips of about 256 KiB run through gather, decode, cast, tilize or untilize,
cast, encode, scatter, of which most conversions need one or two, and staging stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from stitch.errors import LayoutError
from stitch.machine import Footprint, MachineShape
from stitch.memory.block_float import decode_stage, encode_stage
from stitch.memory.cells import Bytes, CellMap, CellRectangle, map_cells, paired_views, shared_parts
from stitch.memory.space_memory import WriteCounter
from stitch.memory.stages import Call, Stage, Staging, Strip, bind_strips, typed
from stitch.memory.tiles import StripShape, tilize_stage, untilize_stage
from stitch.ops import conversion_steps, workspace_nbytes
from stitch.program import TILE_SHAPE, DataType, TensorDesc, host_layout

# Strips and their stages --------------------------------------------------------------------------

#: A strip's bytes: small enough that staging stays in the second-level cache.
_STRIP_NBYTES = 256 << 10
_TILE_ELEMENTS = TILE_SHAPE[0] * TILE_SHAPE[1]


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a conversion: the description and where its cells lie."""

    desc: TensorDesc
    cells: CellMap

    @property
    def data_type(self) -> DataType:
        return self.desc.layout.data_type

    @property
    def is_tiled(self) -> bool:
        return self.desc.layout.is_tiled

    @property
    def is_sharded(self) -> bool:
        return self.desc.layout.is_sharded


def dense_twin(side: Side, machine: MachineShape) -> Side:
    """The same tensor as dense rows on the host."""
    desc = TensorDesc(side.desc.shape, host_layout(side.data_type))
    return Side(desc, map_cells(desc, machine))


def conversion_strips(source: Side, target: Side) -> Iterator[Strip]:
    """The strips of a conversion; neither side may be row-major and sharded."""
    if not source.is_tiled and not target.is_tiled:
        yield from _dense_strips(source, target)
        return
    columns = source.desc.shape[-1] if source.desc.shape else 1
    widest = max(side.data_type.in_arrays.itemsize for side in (source, target))
    for at in _strip_places(source.desc, widest):
        stages = list(_middle(source, target, at, columns))
        place, goal = _place(source, at, columns), _place(target, at, columns)
        if place is None:
            stages.insert(0, _carry(source.cells, _gapless(source.cells, at), at))
        if goal is None:
            stages.append(_carry(_gapless(target.cells, at), target.cells, at))
        yield Strip(tuple(stages), place, goal)


@dataclass(frozen=True, slots=True)
class _StripPlace:
    """Whole matrices, or tile rows of one matrix; rows counted in elements and in tiles."""

    row: int
    outer: int
    rows: int
    tile_row: int
    tile_rows: int


def _strip_places(desc: TensorDesc, itemsize: int) -> Iterator[_StripPlace]:
    shape = desc.shape
    height = shape[-2] if len(shape) > 1 else 1
    outer = math.prod(shape[:-2])
    _, width = desc.rows_and_columns
    step = TILE_SHAPE[0]
    tiles_high = -(-height // step)
    padded_width = -(-width // TILE_SHAPE[1]) * TILE_SHAPE[1]
    tile_rows_at_once = max(1, _STRIP_NBYTES // (itemsize * step * padded_width))
    if tile_rows_at_once >= tiles_high:
        group = max(1, tile_rows_at_once // tiles_high)
        for o in range(0, outer, group):
            count = min(group, outer - o)
            yield _StripPlace(o * height, count, height, o * tiles_high, count * tiles_high)
        return
    for o in range(outer):
        for t in range(0, tiles_high, tile_rows_at_once):
            tiles = min(tile_rows_at_once, tiles_high - t)
            rows = min(tiles * step, height - t * step)
            yield _StripPlace(o * height + t * step, 1, rows, o * tiles_high + t, tiles)


def _place(side: Side, at: _StripPlace, columns: int) -> slice | None:
    """Where a strip lies contiguously on one side; None where its cells have to be carried."""
    if not side.is_tiled:
        row = columns * side.data_type.itemsize
        return slice(at.row * row, (at.row + at.outer * at.rows) * row)
    start = side.cells.contiguous(at.tile_row, at.tile_rows)
    if start is None:
        return None
    return slice(start, start + at.tile_rows * side.cells.columns * side.cells.cell_nbytes)


def _gapless(cells: CellMap, at: _StripPlace) -> CellMap:
    """The strip's cells as they lie in staging: in order, without gaps."""
    cell, row = cells.cell_nbytes, cells.columns * cells.cell_nbytes
    whole = CellRectangle(at.tile_row, 0, at.tile_rows, cells.columns, 0, row, cell)
    return replace(cells, rectangles=(whole,))


def _carry(ours: CellMap, theirs: CellMap, at: _StripPlace) -> Stage:
    nbytes = ours.cell_nbytes

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        shared = shared_parts(ours, theirs, at.tile_row, at.tile_rows)
        pairs = (paired_views(source, target, parts, nbytes) for parts in shared)
        return [partial(np.copyto, goal, given) for given, goal in pairs]

    return Stage(at.tile_rows * ours.columns * nbytes, calls)


def _middle(source: Side, target: Side, at: _StripPlace, columns: int) -> Iterator[Stage]:
    """Decode, cast, tilize or untilize, encode: those that are needed, from strip to strip."""
    before, after = source.data_type.in_arrays.dtype, target.data_type.in_arrays.dtype
    shape = StripShape(at.outer, at.rows, columns, before.itemsize)
    tiles = shape.tiled_elements // _TILE_ELEMENTS
    if source.data_type.is_block:
        yield decode_stage(source.data_type, tiles)
    cast = partial(_cast_stages, source.data_type, target.data_type)
    changed = replace(shape, itemsize=after.itemsize)
    # The fewest bytes go through the tiles: cast first where the target is narrower, or where
    # most of a tile is padding that need not be cast.
    narrower = after.itemsize <= before.itemsize
    padded = shape.elements * 2 < shape.tiled_elements
    if source.is_tiled and target.is_tiled:
        yield from cast(shape.tiled_elements)
    elif target.is_tiled:
        if narrower or padded:
            yield from cast(shape.elements)
            yield tilize_stage(changed)
        else:
            yield tilize_stage(shape)
            yield from cast(shape.tiled_elements)
    elif narrower and not padded:
        yield from cast(shape.tiled_elements)
        yield untilize_stage(changed)
    else:
        yield untilize_stage(shape)
        yield from cast(shape.elements)
    if target.data_type.is_block:
        yield encode_stage(target.data_type, tiles)


def _dense_strips(source: Side, target: Side) -> Iterator[Strip]:
    before, after = source.data_type.dtype, target.data_type.dtype
    step, elements = _STRIP_NBYTES // 4, source.desc.elements
    for start in range(0, elements, step):
        count = min(step, elements - start)
        yield Strip(
            _cast_stages(source.data_type, target.data_type, count),
            slice(start * before.itemsize, (start + count) * before.itemsize),
            slice(start * after.itemsize, (start + count) * after.itemsize),
        )


def _cast_stages(source: DataType, target: DataType, count: int) -> tuple[Stage, ...]:
    """The stages that cast `count` elements; the dense elements of block formats are float32."""
    if source is target:
        return ()
    before, after = source.compute_dtype, target.compute_dtype
    stages = []
    if not source.is_block and source.dtype != before:
        stages.append(_converting(source.dtype, before, count))
    if before != after:
        rounds_again = target.is_block or target.dtype != after
        stages.append(_converting(before, after, count, rounds_again))
    if not target.is_block and target.dtype != after:
        stages.append(_converting(after, target.dtype, count))
    return tuple(stages)


def _converting(
    before: np.dtype[Any], after: np.dtype[Any], count: int, rounds_again: bool = False
) -> Stage:
    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        ours, theirs = typed(source, before, count), typed(target, after, count)
        return [*conversion_steps(ours, theirs, scratch, rounds_again=rounds_again)]

    scratch_nbytes = count * workspace_nbytes(before, after, rounds_again)
    return Stage(count * after.itemsize, calls, scratch_nbytes)


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

"""Convert any legal layout to any other: prepared once, run often.

Layouts with the same kind of cell are copied by strided copies between shards. Others run in strips
of about 256 KiB, whose staging stays in the cache, through the stages gather, decode, cast, tilize
or untilize, cast, encode, scatter, of which most conversions need one or two.
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

# Strips

#: Bytes of a strip: its staging fits in a second-level cache.
_STRIP_NBYTES = 256 << 10
_TILE_ELEMENTS = TILE_SHAPE[0] * TILE_SHAPE[1]


@dataclass(frozen=True, slots=True)
class Side:
    """The source or target of a conversion."""

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
    """Return the tensor as dense rows on the host."""
    desc = TensorDesc(side.desc.shape, host_layout(side.data_type))
    return Side(desc, map_cells(desc, machine))


def conversion_strips(source: Side, target: Side) -> Iterator[Strip]:
    """Yield the strips of a conversion; neither side may be row-major and sharded."""
    if not source.is_tiled and not target.is_tiled:
        yield from _dense_strips(source, target)
        return
    columns = source.desc.shape[-1] if source.desc.shape else 1
    widest = max(side.data_type.in_arrays.itemsize for side in (source, target))
    for rows in _strip_rows(source.desc, widest):
        stages = list(_middle(source, target, rows, columns))
        start, end = _contiguous(source, rows, columns), _contiguous(target, rows, columns)
        if start is None:
            stages.insert(0, _copy_cells(source.cells, _contiguous_cells(source.cells, rows), rows))
        if end is None:
            stages.append(_copy_cells(_contiguous_cells(target.cells, rows), target.cells, rows))
        yield Strip(tuple(stages), start, end)


@dataclass(frozen=True, slots=True)
class _StripRows:
    """Whole matrices, or tile rows of one matrix: rows counted in elements and in tiles."""

    row: int
    outer: int
    rows: int
    tile_row: int
    tile_rows: int


def _strip_rows(desc: TensorDesc, itemsize: int) -> Iterator[_StripRows]:
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
            yield _StripRows(o * height, count, height, o * tiles_high, count * tiles_high)
        return
    for o in range(outer):
        for t in range(0, tiles_high, tile_rows_at_once):
            tiles = min(tile_rows_at_once, tiles_high - t)
            rows = min(tiles * step, height - t * step)
            yield _StripRows(o * height + t * step, 1, rows, o * tiles_high + t, tiles)


def _contiguous(side: Side, at: _StripRows, columns: int) -> slice | None:
    """Return a strip's bytes on one side; None if they are not contiguous."""
    if not side.is_tiled:
        row = columns * side.data_type.itemsize
        return slice(at.row * row, (at.row + at.outer * at.rows) * row)
    start = side.cells.contiguous(at.tile_row, at.tile_rows)
    if start is None:
        return None
    return slice(start, start + at.tile_rows * side.cells.columns * side.cells.cell_nbytes)


def _contiguous_cells(cells: CellMap, at: _StripRows) -> CellMap:
    """Return the strip's cells as they are in staging, contiguous."""
    cell, row = cells.cell_nbytes, cells.columns * cells.cell_nbytes
    whole = CellRectangle(at.tile_row, 0, at.tile_rows, cells.columns, 0, row, cell)
    return replace(cells, rectangles=(whole,))


def _copy_cells(before: CellMap, after: CellMap, at: _StripRows) -> Stage:
    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        return _cell_copies(source, target, before, after, at.tile_row, at.tile_rows)

    return Stage(at.tile_rows * before.columns * before.cell_nbytes, calls)


def _cell_copies(
    source: Bytes, target: Bytes, before: CellMap, after: CellMap, row: int = 0,
    rows: int | None = None,
) -> list[Call]:  # fmt: skip
    """Return the strided copies between two cell maps, of `rows` rows from `row` on."""
    copies: list[Call] = []
    for parts in shared_parts(before, after, row, rows):
        ours, theirs = paired_views(source, target, parts, after.cell_nbytes)
        copies.append(partial(np.copyto, theirs, ours))
    return copies


def _middle(source: Side, target: Side, at: _StripRows, columns: int) -> Iterator[Stage]:
    """Yield the stages between gather and scatter that a conversion needs."""
    before, after = source.data_type.in_arrays.dtype, target.data_type.in_arrays.dtype
    shape = StripShape(at.outer, at.rows, columns, before.itemsize)
    tiles = shape.tiled_elements // _TILE_ELEMENTS
    if source.data_type.is_block:
        yield decode_stage(source.data_type, tiles)
    cast = partial(_cast_stages, source.data_type, target.data_type)
    changed = replace(shape, itemsize=after.itemsize)
    # Tilize the fewest bytes: cast first if the target is narrower or tiles are mostly padding.
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
    """Return the stages that cast `count` elements; those of block formats are float32."""
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
#: Calls per shard up to which shards are copied directly; else by way of dense rows.
_CALLS_PER_SHARD = 4
#: Calls that a plan makes one by one; more are grouped into one call.
_FEW_CALLS = 4


@dataclass(frozen=True, slots=True)
class _Leg:
    """One part of a conversion: strips, or copies between two cell maps."""

    strips: tuple[Strip, ...]
    cells: tuple[CellMap, CellMap] | None
    staging: Staging

    def calls(self, source: Bytes, target: Bytes) -> list[Call]:
        if self.cells is None:
            return bind_strips(self.strips, self.staging, source, target)
        return _cell_copies(source, target, *self.cells)


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """A prepared copy between two layouts.

    Attributes:
        path: The names of its conversions, in order.
        between: Bytes of dense rows after each leg but the last.
        changes_numbers: Whether it casts.
    """

    source: TensorDesc
    target: TensorDesc
    path: tuple[str, ...]
    target_footprint: Footprint
    legs: tuple[_Leg, ...]
    between: tuple[int, ...]
    changes_numbers: bool

    @property
    def staging_nbytes(self) -> int:
        """Bytes that `bind` allocates."""
        return sum(self.between) + sum(leg.staging.nbytes for leg in self.legs)

    @property
    def written_nbytes(self) -> int:
        return self.target_footprint.own_nbytes

    def bind(self, source: Bytes, target: Bytes, counter: WriteCounter | None = None) -> Call:
        """Return the copy as a call without arguments that allocates nothing.

        Args:
            source, target: One-dimensional uint8 arrays, at least as long as the footprints (for
                dense layouts, as the elements).
            counter: Counts the write at each run.
        """
        calls = self.calls(source, target, counter)
        if not self.changes_numbers:
            return calls[0] if len(calls) == 1 else partial(_call_all, calls)
        return partial(_call_all_ignoring_errors, calls)

    def calls(
        self, source: Bytes, target: Bytes, counter: WriteCounter | None = None
    ) -> tuple[Call, ...]:
        """Return the copy as a few calls, for callers that ignore NumPy's floating-point errors."""
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


def _call_all_ignoring_errors(calls: tuple[Call, ...]) -> None:
    with np.errstate(all="ignore"):
        _call_all(calls)


@lru_cache(maxsize=1024)
def prepare_copy(source: TensorDesc, target: TensorDesc, machine: MachineShape) -> CopyKernel:
    """Prepare the cheapest copy between two layouts (cached).

    Raises `LayoutError` if the shapes differ or a layout does not fit the machine.
    """
    if source.shape != target.shape:
        raise LayoutError(
            "a copy cannot change the shape",
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
        source, target, _path(ours, theirs), theirs.cells.footprint, legs, between,
        source.layout.data_type is not target.layout.data_type,
    )  # fmt: skip


def _plan_legs(
    source: Side, target: Side, machine: MachineShape
) -> tuple[tuple[_Leg, ...], tuple[int, ...]]:
    """Return the legs from source to target, and the bytes of dense rows between them."""
    if not source.desc.elements:
        return (), ()
    if source.is_tiled == target.is_tiled and source.data_type is target.data_type:
        shards = len(source.cells.rectangles) + len(target.cells.rectangles)
        pairs = sum(1 for _ in shared_parts(source.cells, target.cells))
        if source.is_tiled or pairs <= _CALLS_PER_SHARD * shards:
            return (_Leg((), (source.cells, target.cells), _NO_STAGING),), ()
    # Row-major shards are converted to dense rows first, or from dense rows last.
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

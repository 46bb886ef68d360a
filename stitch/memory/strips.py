"""How a conversion is cut into strips, and which stages each strip needs.

A cast is what `Cast` computes, bit for bit: both go by way of the compute types and share
`stitch.ops.conversion_steps`. The rules are those of ONNX, with its undefined cases defined:
* float to float rounds to nearest even, once; too large becomes infinite; NaN stays NaN. A block
  format takes float32, which wider types reach rounded to odd: there, too, one rounding counts.
* integer to float rounds to nearest even, once; integer to integer keeps the low bits (wraps).
* float to integer truncates toward zero; out of range saturates; NaN becomes 0.
* to bool is `!= 0` (NaN is true); bool is 0 or 1.
* float8 and float4 saturate, float8_e8m0 rounds up; int4 and int2 keep the low bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stitch.machine import MachineShape
from stitch.memory.block_float import decode_stage, encode_stage
from stitch.memory.cells import Bytes, CellMap, CellRectangle, map_cells, paired_views, shared_parts
from stitch.memory.stages import Call, Stage, Strip, typed
from stitch.memory.tiles import StripShape, tilize_stage, untilize_stage
from stitch.ops import conversion_steps, workspace_nbytes
from stitch.program import TILE_SHAPE, DataType, TensorDesc, host_layout

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

"""The positions of a tensor's cells in its footprint: a cell is a tile, or an element if row-major.

From tt-metal's tensor layout reports: interleaved cells follow each other at aligned pages (dense
if row-major); the pages of a shard are in order in its core's bank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.machine import Footprint, MachineShape, footprint, shard_counts
from stitch.program import Array, MemoryLayout, Orientation, ShardSpec, TensorDesc

Bytes = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class CellRectangle:
    """Cells `[row, row + rows) x [column, column + columns)`; `offset` and strides in bytes."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int
    row_stride: int
    column_stride: int

    def part(self, row: int, column: int, rows: int, columns: int) -> CellRectangle:
        """Return the intersection with another rectangle of cells."""
        top, left = max(self.row, row), max(self.column, column)
        bottom = min(self.row + self.rows, row + rows)
        right = min(self.column + self.columns, column + columns)
        offset = self.offset
        offset += (top - self.row) * self.row_stride + (left - self.column) * self.column_stride
        return CellRectangle(
            top, left, max(0, bottom - top), max(0, right - left),
            offset, self.row_stride, self.column_stride,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellMap:
    """The matrix of cells of one tensor, as rectangles with constant strides in its footprint."""

    rows: int
    columns: int
    cell_nbytes: int
    footprint: Footprint
    rectangles: tuple[CellRectangle, ...]

    def contiguous(self, row: int, rows: int) -> int | None:
        """Return the byte offset of whole rows of cells if they are contiguous, else None."""
        for r in self.rectangles:
            if r.row <= row and row + rows <= r.row + r.rows:
                whole = r.columns == self.columns and (
                    r.columns == 1 or r.column_stride == self.cell_nbytes
                )
                gapless = rows == 1 or r.row_stride == self.columns * self.cell_nbytes
                return r.offset + (row - r.row) * r.row_stride if whole and gapless else None
        return None


def shard_bank(spec: ShardSpec, memory_layout: MemoryLayout, down: int, across: int) -> int:
    """Return the bank of the shard that is `down`-th from the top and `across`-th from the left.

    The core in row r and column c of a grid has bank r * columns + c. Height and width shards are
    assigned to cores row by row, or column by column if col_major; block shards to the core at
    their own position, in a transposed grid if col_major, as in tt-metal.
    """
    rows, columns = spec.core_grid
    by_row = spec.orientation is Orientation.ROW_MAJOR
    if memory_layout is MemoryLayout.BLOCK_SHARDED:
        return down * columns + across if by_row else across * rows + down
    k = max(down, across)
    return k if by_row else (k % rows) * columns + k // rows


def map_cells(desc: TensorDesc, machine: MachineShape) -> CellMap:
    """Return the cells of a tensor; raises `LayoutError` if its shards do not fit the machine."""
    place = footprint(desc, machine)
    layout, spec = desc.layout, desc.layout.shard_spec
    height, width = layout.tile_shape or (1, 1)
    element_rows, element_columns = desc.rows_and_columns
    rows, columns = element_rows // height, element_columns // width
    cell = place.page_nbytes if layout.is_tiled else layout.data_type.itemsize
    step = place.aligned_page_nbytes if layout.is_tiled else cell
    if rows == 0 or columns == 0:
        return CellMap(0, 0, cell, place, ())
    if spec is None:
        whole = CellRectangle(0, 0, rows, columns, 0, columns * step, step)
        return CellMap(rows, columns, cell, place, (whole,))
    shard_rows, shard_columns = spec.shape[0] // height, spec.shape[1] // width
    row_stride = shard_columns * step if layout.is_tiled else place.aligned_page_nbytes
    down, across = shard_counts(desc, spec)
    rectangles = tuple(
        CellRectangle(
            i * shard_rows,
            j * shard_columns,
            min(shard_rows, rows - i * shard_rows),
            min(shard_columns, columns - j * shard_columns),
            shard_bank(spec, layout.memory_layout, i, j) * place.size_per_bank,
            row_stride,
            step,
        )
        for i in range(down)
        for j in range(across)
    )
    return CellMap(rows, columns, cell, place, rectangles)


def cell_view(region: Bytes, part: CellRectangle, dtype: np.dtype[Any]) -> Array:
    """Return the cells of a rectangle as a strided array with one `dtype` item per cell."""
    strides = (part.row_stride, part.column_stride)
    return np.ndarray((part.rows, part.columns), dtype, region, part.offset, strides)


def shared_parts(
    source: CellMap, target: CellMap, row: int = 0, rows: int | None = None
) -> Iterator[tuple[CellRectangle, CellRectangle]]:
    """Yield (source, target) rectangles that hold the same cells, of `rows` rows from `row` on."""
    rows = target.rows - row if rows is None else rows
    for mine in target.rectangles:
        if mine.row >= row + rows or mine.row + mine.rows <= row:
            continue
        goal = mine.part(row, 0, rows, target.columns)
        for theirs in source.rectangles:
            part = theirs.part(goal.row, goal.column, goal.rows, goal.columns)
            if part.rows and part.columns:
                yield part, goal.part(part.row, part.column, part.rows, part.columns)


def paired_views(
    source: Bytes, target: Bytes, parts: tuple[CellRectangle, CellRectangle], cell_nbytes: int
) -> tuple[Array, Array]:
    """Return both rectangles as arrays of one shape, in the widest items contiguous in both."""
    ours, theirs = parts
    if ours.column_stride == theirs.column_stride == cell_nbytes or ours.columns == 1:
        shape = (ours.rows, ours.columns * cell_nbytes)
        return (
            np.ndarray(shape, np.uint8, source, ours.offset, (ours.row_stride, 1)),
            np.ndarray(shape, np.uint8, target, theirs.offset, (theirs.row_stride, 1)),
        )
    dtype = np.dtype((np.void, cell_nbytes))
    return cell_view(source, ours, dtype), cell_view(target, theirs, dtype)


def used_bytes(desc: TensorDesc, machine: MachineShape) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bytes of a footprint that hold the tensor: (offset, count, stride, run length).

    Padding elements of a tile are used, as kernels may read them. Page padding, cells of a shard
    beyond the matrix, and the rest of the footprint are never written.
    """
    cells = map_cells(desc, machine)
    for r in cells.rectangles:
        if r.columns == 1 or r.column_stride == cells.cell_nbytes:
            yield r.offset, r.rows, r.row_stride, r.columns * cells.cell_nbytes
        elif r.row_stride == r.columns * r.column_stride:
            yield r.offset, r.rows * r.columns, r.column_stride, cells.cell_nbytes
        else:
            for row in range(r.rows):
                start = r.offset + row * r.row_stride
                yield start, r.columns, r.column_stride, cells.cell_nbytes

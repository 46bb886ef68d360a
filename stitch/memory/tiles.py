"""Tilize and untilize one strip: dense rows to tiles of four faces, and back.

Comes in: the sizes of a strip. Goes out: stages. Must not know: spaces, shards, casts.

A strip is either some whole matrices, or some tile rows of one matrix; both sides are contiguous.
A tile is four 16 x 16 faces, row-major, in the order top-left, top-right, bottom-left,
bottom-right (tt-metal tensor layouts); its padding elements are zeros.

Two ways. Where rows are a multiple of 8 bytes, `ndarray.take` with a prepared index copies chunks
of up to 32 bytes: its inner loop is a fixed-size copy, measured 1.2 to 1.7 times as fast as a
strided `np.copyto`. Else strided `np.copyto` runs over at most 5 x 5 edge blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.memory.cells import Bytes
from stitch.memory.stages import Call, Stage
from stitch.program import TILE_SHAPE, Array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TILE = TILE_SHAPE[0]
_FACE = 16
#: `take` copies chunks of these sizes without a call per chunk.
_LARGEST_CHUNK = 32
_LEAST_CHUNK = 8
#: An index this long still lies in the second-level cache.
_LARGEST_INDEX = 1 << 17


@dataclass(frozen=True, slots=True)
class StripShape:
    """`outer` matrices of `rows` x `columns` elements of `itemsize` bytes."""

    outer: int
    rows: int
    columns: int
    itemsize: int

    @property
    def tile_rows(self) -> int:
        return -(-self.rows // _TILE)

    @property
    def tile_columns(self) -> int:
        return -(-self.columns // _TILE)

    @property
    def elements(self) -> int:
        return self.outer * self.rows * self.columns

    @property
    def tiled_elements(self) -> int:
        return self.outer * self.tile_rows * self.tile_columns * _TILE * _TILE


def tilize_stage(shape: StripShape) -> Stage:
    """Dense rows to tiles, padding elements zeroed."""
    chunk = _chunk_nbytes(shape, shape.tiled_elements, _LARGEST_CHUNK)
    # A strip that is mostly padding is cheaper to clear first.
    mostly_padding = shape.elements * 2 < shape.tiled_elements

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        dense, tiled = _dense_bytes(source, shape), _tiled_bytes(target, shape)
        if mostly_padding:
            return [partial(tiled.fill, 0), *_block_copies(dense, tiled, shape, True)]
        if chunk is None:
            return [*_block_copies(dense, tiled, shape, True), *_padding_fills(tiled, shape)]
        cell = np.dtype((np.void, chunk))
        take = dense.view(cell).take
        index = _tiled_index(shape, chunk)
        return [partial(take, index, None, tiled.view(cell), "clip"), *_padding_fills(tiled, shape)]

    return Stage(shape.tiled_elements * shape.itemsize, calls)


def untilize_stage(shape: StripShape) -> Stage:
    """Tiles to dense rows; padding elements are dropped."""
    # Measured: 16 bytes beat 32 (0.78 of memcpy to 0.60) where a face row is 64 bytes or more.
    wide = shape.itemsize * _FACE > _LARGEST_CHUNK
    chunk = _chunk_nbytes(shape, shape.elements, _LARGEST_CHUNK // 2 if wide else _LARGEST_CHUNK)

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        tiled, dense = _tiled_bytes(source, shape), _dense_bytes(target, shape)
        if chunk is None:
            return list(_block_copies(dense, tiled, shape, False))
        cell = np.dtype((np.void, chunk))
        index = _dense_index(shape, chunk)
        return [partial(tiled.view(cell).take, index, None, dense.view(cell), "clip")]

    return Stage(shape.elements * shape.itemsize, calls)


def _dense_bytes(raw: Bytes, shape: StripShape) -> Bytes:
    return raw[: shape.elements * shape.itemsize]


def _tiled_bytes(raw: Bytes, shape: StripShape) -> Bytes:
    return raw[: shape.tiled_elements * shape.itemsize]


def _chunk_nbytes(shape: StripShape, elements: int, most: int) -> int | None:
    """The size of the chunks that rows and face rows consist of; None where `take` loses."""
    row, run = shape.columns * shape.itemsize, _FACE * shape.itemsize
    chunk = math.gcd(row, run, most)
    worthwhile = chunk >= _LEAST_CHUNK and elements * shape.itemsize <= _LARGEST_INDEX * chunk
    return chunk if worthwhile and elements else None


@lru_cache(maxsize=64)
def _tiled_index(shape: StripShape, chunk: int) -> NDArray[np.intp]:
    """For each chunk of the tiles, in order, its place in the dense rows (0 for padding)."""
    per_run = _FACE * shape.itemsize // chunk
    per_row = shape.columns * shape.itemsize // chunk
    y = np.arange(shape.tile_rows * _TILE).reshape(1, shape.tile_rows, 1, 2, 1, _FACE, 1)
    x = np.arange(shape.tile_columns * 2 * per_run).reshape(
        1, 1, shape.tile_columns, 1, 2, 1, per_run
    )
    o = np.arange(shape.outer).reshape(-1, 1, 1, 1, 1, 1, 1)
    index = np.where((y < shape.rows) & (x < per_row), (o * shape.rows + y) * per_row + x, 0)
    return _flat(index)


@lru_cache(maxsize=64)
def _dense_index(shape: StripShape, chunk: int) -> NDArray[np.intp]:
    """For each chunk of the dense rows, in order, its place in the tiles."""
    per_run = _FACE * shape.itemsize // chunk
    o = np.arange(shape.outer).reshape(-1, 1, 1)
    y = np.arange(shape.rows).reshape(1, -1, 1)
    x = np.arange(shape.columns * shape.itemsize // chunk).reshape(1, 1, -1)
    tile = (o * shape.tile_rows + y // _TILE) * shape.tile_columns + x // (2 * per_run)
    face = tile * 4 + y // _FACE % 2 * 2 + x // per_run % 2
    return _flat((face * _FACE + y % _FACE) * per_run + x % per_run)


def _flat(index: Array) -> NDArray[np.intp]:
    # Not read-only, although it is shared: `take` copies a read-only index at every call.
    return np.ascontiguousarray(index, dtype=np.intp).reshape(-1)


@dataclass(frozen=True, slots=True)
class _AxisRun:
    """Elements `[start, start + tiles * faces * length)` of one axis as whole, even pieces."""

    start: int
    tiles: int
    faces: int
    length: int


def _axis_runs(start: int, stop: int) -> Iterator[_AxisRun]:
    """A range of one axis as runs of whole tiles, one whole face, or a part of a face."""
    while start < stop:
        if start % _TILE == 0 and stop - start >= _TILE:
            run = _AxisRun(start, (stop - start) // _TILE, 2, _FACE)
        else:
            inside = start % _FACE
            run = _AxisRun(start, 1, 1, min(_FACE - inside, stop - start))
        yield run
        start += run.tiles * run.faces * run.length


def _tile_block(
    raw: Bytes, shape: StripShape, rows: _AxisRun, columns: _AxisRun, dtype: np.dtype[Any]
) -> Array:
    """[outer, tile rows, face rows, y, tile columns, face columns, x] of a block in tiles."""
    item = shape.itemsize
    face, tile = _FACE * _FACE * item, _TILE * _TILE * item
    tile_row = shape.tile_columns * tile
    offset = _axis_offset(rows.start, tile_row, 2 * face, _FACE * item)
    offset += _axis_offset(columns.start, tile, face, item)
    return np.ndarray(
        (shape.outer, rows.tiles, rows.faces, rows.length, columns.tiles, columns.faces, 1),
        dtype, raw, offset,
        (shape.tile_rows * tile_row, tile_row, 2 * face, _FACE * item, tile, face, dtype.itemsize),
    )  # fmt: skip


def _axis_offset(start: int, tile: int, face: int, item: int) -> int:
    return start // _TILE * tile + start % _TILE // _FACE * face + start % _FACE * item


def _dense_block(
    raw: Bytes, shape: StripShape, rows: _AxisRun, columns: _AxisRun, dtype: np.dtype[Any]
) -> Array:
    """The same axes of the same block in dense rows."""
    item = shape.itemsize
    row = shape.columns * item
    return np.ndarray(
        (shape.outer, rows.tiles, rows.faces, rows.length, columns.tiles, columns.faces, 1),
        dtype, raw, rows.start * row + columns.start * item,
        (shape.rows * row, _TILE * row, _FACE * row, row, _TILE * item, _FACE * item,
         dtype.itemsize),
    )  # fmt: skip


def _block_copies(dense: Bytes, tiled: Bytes, shape: StripShape, tilize: bool) -> Iterator[Call]:
    if not shape.elements:
        return
    for rows in _axis_runs(0, shape.rows):
        for columns in _axis_runs(0, shape.columns):
            # A run of one face row is one item: its bytes lie side by side on both sides.
            dtype = np.dtype((np.void, columns.length * shape.itemsize))
            in_rows = _dense_block(dense, shape, rows, columns, dtype)
            in_tiles = _tile_block(tiled, shape, rows, columns, dtype)
            target, source = (in_tiles, in_rows) if tilize else (in_rows, in_tiles)
            yield partial(np.copyto, target, source)


def _padding_fills(tiled: Bytes, shape: StripShape) -> Iterator[Call]:
    """Zeros right of the last column, then below the last row."""
    height, width = shape.tile_rows * _TILE, shape.tile_columns * _TILE
    right = [(r, c) for r in _axis_runs(0, shape.rows) for c in _axis_runs(shape.columns, width)]
    below = [(r, c) for r in _axis_runs(shape.rows, height) for c in _axis_runs(0, width)]
    for rows, columns in right + below:
        dtype = np.dtype((np.void, columns.length * shape.itemsize))
        block = _tile_block(tiled, shape, rows, columns, dtype)
        yield partial(np.copyto, block, np.zeros((), dtype))

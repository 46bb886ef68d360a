"""Tilize and untilize one strip: dense rows to tiles of four faces, and back.

Comes in: the sizes of a strip. Goes out: stages. Must not know: spaces, shards, casts.

A strip is either some whole matrices, or some tile rows of one matrix; both sides are contiguous.
A tile is four 16 x 16 faces, row-major, in the order top-left, top-right, bottom-left,
bottom-right (tt-metal tensor layouts); its padding elements are zeros.

All ways give the same bytes. `ndarray.take` with a prepared index copies chunks of 16 or 32 bytes:
its inner loop is a fixed-size copy. It needs rows of whole chunks; staged, rows of any size go by
way of longer rows in the scratch, of whole tiles where tiles are made of them. Strided `np.copyto`
runs over at most 5 x 5 edge blocks, and wins where a strip is mostly padding.
"""

from __future__ import annotations

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

    @property
    def is_mostly_padding(self) -> bool:
        return self.elements * 2 < self.tiled_elements


@dataclass(frozen=True, slots=True)
class Way:
    """How tiles are copied: `take` of chunks of so many bytes; 0: strided copies of blocks.

    `staged`: dense rows lie in the scratch, long enough for whole chunks (and whole tiles, where
    tiles are made of them).
    """

    chunk: int
    staged: bool = False

    def fits(self, shape: StripShape, tilize: bool) -> bool:
        """Whether a strip can be copied this way, and not only slowly."""
        if not self.chunk:
            return True
        row, run = shape.columns * shape.itemsize, _FACE * shape.itemsize
        taken = shape.tiled_elements if tilize else shape.elements
        if run % self.chunk or taken * shape.itemsize > _LARGEST_INDEX * self.chunk:
            return False
        return self.staged or row % self.chunk == 0


#: In order: the first that fits a strip is taken. Blocks always fit.
TILIZE_WAYS: tuple[Way, ...] = (Way(32), Way(16), Way(32, staged=True), Way(0))
UNTILIZE_WAYS: tuple[Way, ...] = (
    Way(32), Way(16), Way(32, staged=True), Way(16, staged=True), Way(0),
)  # fmt: skip


def _way(shape: StripShape, tilize: bool) -> Way:
    ways = TILIZE_WAYS if tilize else UNTILIZE_WAYS
    if not tilize and shape.itemsize * _FACE > 32:
        # Measured: 16 bytes beat 32 (0.78 of memcpy to 0.60) where a face row is longer.
        ways = tuple(way for way in ways if way.chunk != 32)
    if shape.is_mostly_padding:
        # Cheaper to clear first; its rows are not worth staging.
        ways = ways[-1:] if tilize else tuple(way for way in ways if not way.staged)
    return next(way for way in ways if way.fits(shape, tilize))


def tilize_stage(shape: StripShape, way: Way | None = None) -> Stage:
    """Dense rows to tiles, padding elements zeroed; a given way has to fit."""
    way = way or _way(shape, True)
    row = shape.columns * shape.itemsize
    whole_row = shape.tile_columns * _TILE * shape.itemsize
    nbytes = shape.tiled_elements * shape.itemsize

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        dense, tiled = source[: shape.elements * shape.itemsize], target[:nbytes]
        if not way.chunk:
            copies = _block_copies(dense, tiled, shape, True)
            if shape.is_mostly_padding:
                return [partial(tiled.fill, 0), *copies]
            return [*copies, *_padding_fills(tiled, shape)]
        index = _tiled_index(shape, way.chunk, way.staged)
        if not way.staged:
            return [_taking(dense, tiled, index, way.chunk), *_padding_fills(tiled, shape)]
        staged = scratch[:nbytes]
        rows = staged.reshape(shape.outer, -1, whole_row)
        given = dense.reshape(shape.outer, shape.rows, row)
        padding = rows[:, : shape.rows, row:], rows[:, shape.rows :]
        return [
            partial(np.copyto, rows[:, : shape.rows, :row], given),
            *(partial(np.copyto, part, 0) for part in padding if part.size),
            _taking(staged, tiled, index, way.chunk),
        ]

    return Stage(nbytes, calls, nbytes if way.staged else 0)


def untilize_stage(shape: StripShape, way: Way | None = None) -> Stage:
    """Tiles to dense rows, padding elements dropped; a given way has to fit."""
    way = way or _way(shape, False)
    row = shape.columns * shape.itemsize
    chunks = -(-row // way.chunk) if way.chunk else 0
    staged_nbytes = shape.outer * shape.rows * chunks * way.chunk if way.staged else 0

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        tiled = source[: shape.tiled_elements * shape.itemsize]
        dense = target[: shape.elements * shape.itemsize]
        if not way.chunk:
            return list(_block_copies(dense, tiled, shape, False))
        index = _dense_index(shape, way.chunk, chunks)
        if not way.staged:
            return [_taking(tiled, dense, index, way.chunk)]
        staged = scratch[:staged_nbytes]
        rows = staged.reshape(-1, chunks * way.chunk)[:, :row]
        return [
            _taking(tiled, staged, index, way.chunk),
            partial(np.copyto, dense.reshape(-1, row), rows),
        ]

    return Stage(shape.elements * shape.itemsize, calls, staged_nbytes)


def _taking(source: Bytes, target: Bytes, index: NDArray[np.intp], chunk: int) -> Call:
    cell = np.dtype((np.void, chunk))
    return partial(source.view(cell).take, index, None, target.view(cell), "clip")


@lru_cache(maxsize=64)
def _tiled_index(shape: StripShape, chunk: int, staged: bool) -> NDArray[np.intp]:
    """For each chunk of the tiles, in order, its place in the dense rows (0 for padding).

    `staged`: the rows are as long and as many as those of the tiles.
    """
    height = shape.tile_rows * _TILE
    places = np.zeros(
        (shape.outer, height, shape.tile_columns * _TILE * shape.itemsize // chunk), np.intp
    )
    used = places if staged else places[:, : shape.rows, : shape.columns * shape.itemsize // chunk]
    used[:] = np.arange(used.size).reshape(used.shape)
    rows = places.reshape(shape.outer * shape.tile_rows, 2, _FACE, shape.tile_columns, 2, -1)
    return _flat(rows.transpose(0, 3, 1, 4, 2, 5))


@lru_cache(maxsize=64)
def _dense_index(shape: StripShape, chunk: int, chunks: int) -> NDArray[np.intp]:
    """For each chunk of dense rows of so many chunks, in order, its place in the tiles."""
    tiles = shape.outer * shape.tile_rows, shape.tile_columns
    places = np.arange(shape.tiled_elements * shape.itemsize // chunk)
    rows = places.reshape(*tiles, 2, 2, _FACE, -1).transpose(0, 2, 4, 1, 3, 5)
    return _flat(rows.reshape(shape.outer, shape.tile_rows * _TILE, -1)[:, : shape.rows, :chunks])


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

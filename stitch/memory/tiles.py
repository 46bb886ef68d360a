"""Tilize and untilize one strip: dense rows to tiles of four faces, and back.

A strip is whole matrices or tile rows of one matrix, contiguous on both sides. A tile is four
16 x 16 faces, row-major, in the order top-left, top-right, bottom-left, bottom-right (tt-metal
tensor layouts); its padding elements are zeros.

`ndarray.take` with a prepared index copies chunks of 16 or 32 bytes. Rows of whole chunks are taken
directly. Others, and rows that collide in the first-level cache, are staged in longer rows after a
cache line of zeros, which is the tiles' padding. If tiles are mostly padding, they are cleared and
the rows put into them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from stitch.memory.cells import Bytes
from stitch.memory.stages import Call, Stage
from stitch.program import TILE_SHAPE, Array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TILE = TILE_SHAPE[0]
_FACE = 16
#: The longest index that stays in the second-level cache.
_LARGEST_INDEX = 1 << 17
#: Larger staged tile rows are copied in pieces, so that rows and index stay in the cache.
_PIECE_NBYTES = 256 << 10
#: A cache line, a multiple of every chunk.
_LINE_NBYTES = 64
#: Rows at multiples of this distance share a set of the first-level cache.
_COLLIDING_NBYTES = 4096


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
    def is_sparse(self) -> bool:
        """Whether clearing the tiles first is cheaper than taking their padding."""
        return max(self.elements, _TILE * _TILE) * 16 <= self.tiled_elements

    @property
    def is_in_one_face(self) -> bool:
        return self.outer == 1 and max(self.rows, self.columns) <= _FACE

    @property
    def row_nbytes(self) -> int:
        return self.columns * self.itemsize

    @property
    def tiled_nbytes(self) -> int:
        return self.tiled_elements * self.itemsize

    @property
    def chunk(self) -> int:
        """Bytes of a chunk of staged rows."""
        return min(32, _FACE * self.itemsize)

    @property
    def direct_chunk(self) -> int:
        """Bytes of a chunk of unstaged rows; 0 if rows must be staged."""
        for chunk in (self.chunk, 16):
            fits = self.elements * self.itemsize <= _LARGEST_INDEX * chunk
            if fits and self.row_nbytes % chunk == 0:
                return chunk
        return 0

    @property
    def is_tiled_directly(self) -> bool:
        """Whether to take tiles from unstaged rows, and clear their padding."""
        if not self.direct_chunk or self.tiled_elements * 8 > self.elements * 9:
            return False
        # If rows collide, a cache line is evicted before the next face reads the rest of it.
        is_part_of_a_line = _FACE * self.itemsize < _LINE_NBYTES
        return not (is_part_of_a_line and self.row_nbytes % _COLLIDING_NBYTES == 0)

    @property
    def staged_row_nbytes(self) -> int:
        return -(-self.row_nbytes // self.chunk) * self.chunk


@dataclass(frozen=True, slots=True)
class _Piece:
    """Columns of a strip: their byte offsets in its first row, its tiles and the scratch, and the
    stride of rows in the scratch."""

    shape: StripShape
    row_start: int
    tiles_start: int
    staged_start: int
    stride: int

    @property
    def staged_stop(self) -> int:
        return self.staged_start + self.shape.outer * self.shape.rows * self.stride

    def dense_rows(self, dense: Bytes, row_nbytes: int) -> Array:
        return _row_items(self.shape, dense, self.row_start, row_nbytes)

    def staged_rows(self, scratch: Bytes) -> Array:
        return _row_items(self.shape, scratch, self.staged_start, self.stride)

    def tiles(self, tiled: Bytes) -> Bytes:
        return tiled[self.tiles_start : self.tiles_start + self.shape.tiled_nbytes]


def _row_items(shape: StripShape, raw: Bytes, start: int, stride: int) -> Array:
    """Return the rows as an array of one item each."""
    row = np.dtype((np.void, shape.row_nbytes))
    return np.ndarray(shape.outer * shape.rows, row, raw, start, (stride,))


def _pieces(shape: StripShape, *, apart: bool = False) -> list[_Piece]:
    """Return the strip, or its only tile row in pieces from left to right.

    Offsets of staged rows do not depend on the strip's height, so strips of all heights share
    zeroed scratch. `apart`: pad strides so that staged rows do not collide in the cache.
    """
    step = shape.columns
    if shape.outer * shape.tile_rows == 1 and not shape.is_sparse:
        step = max(1, _PIECE_NBYTES // (_TILE * _TILE * shape.itemsize)) * _TILE
    pieces: list[_Piece] = []
    row_start = tiles_start = 0
    for start in range(0, shape.columns, step):
        part = replace(shape, columns=min(step, shape.columns - start))
        is_narrower = bool(pieces) and part != pieces[0].shape
        staged_start = _LINE_NBYTES + (_TILE * pieces[0].stride if is_narrower else 0)
        stride = part.staged_row_nbytes
        if apart and stride % _COLLIDING_NBYTES == 0:
            stride += _LINE_NBYTES
        pieces.append(_Piece(part, row_start, tiles_start, staged_start, stride))
        row_start, tiles_start = row_start + part.row_nbytes, tiles_start + part.tiled_nbytes
    return pieces


def _scratch_nbytes(pieces: list[_Piece]) -> int:
    return pieces[-1].staged_stop if pieces else 0


def tilize_stage(shape: StripShape) -> Stage:
    """Convert dense rows to tiles with zeroed padding."""
    if shape.is_in_one_face:
        return Stage(shape.tiled_nbytes, partial(_copy_face, shape, tilize=True))
    if shape.is_sparse:
        nbytes = 0 if shape.direct_chunk else _scratch_nbytes(_pieces(shape))
        return Stage(shape.tiled_nbytes, partial(_put_rows, shape), nbytes)
    if shape.is_tiled_directly:
        return Stage(shape.tiled_nbytes, partial(_take_tiles, shape))
    pieces = _pieces(shape, apart=True)

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        copies: list[Call] = []
        for piece in pieces:
            chunk = piece.shape.chunk
            first, stride = piece.staged_start // chunk, piece.stride // chunk
            index = _tiled_index(piece.shape, chunk, stride, first)
            dense = piece.dense_rows(source, shape.row_nbytes)
            copies += [
                partial(np.copyto, piece.staged_rows(scratch), dense),
                _taking(scratch, piece.tiles(target), index, chunk),
            ]
        return copies

    spans = tuple([(p.staged_start, p.stride, p.shape.row_nbytes) for p in pieces])
    return Stage(shape.tiled_nbytes, calls, 0, _scratch_nbytes(pieces), spans)


def _take_tiles(shape: StripShape, source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
    """Take the tiles from unstaged rows, then clear the padding."""
    chunk, tiled = shape.direct_chunk, target[: shape.tiled_nbytes]
    index = _tiled_index(shape, chunk, shape.row_nbytes // chunk, 0)
    taking = _taking(source, tiled, index, chunk)
    padding = _padding_index(shape, chunk)
    if not padding.size:
        return [taking]
    chunks = _chunks(tiled, chunk)
    return [taking, partial(chunks.put, padding, np.zeros(1, chunks.dtype), "wrap")]


def _put_rows(shape: StripShape, source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
    """Clear the tiles, then put the chunks of the rows into them."""
    tiled = target[: shape.tiled_nbytes]
    calls: list[Call] = [partial(tiled.fill, 0)]
    rows, chunk = source[: shape.elements * shape.itemsize], shape.direct_chunk
    if not chunk:
        [piece] = _pieces(shape)
        dense, chunk = piece.dense_rows(rows, shape.row_nbytes), shape.chunk
        rows = scratch[piece.staged_start : piece.staged_stop]
        calls += [partial(rows.fill, 0), partial(np.copyto, piece.staged_rows(scratch), dense)]
    places, chunks = _dense_index(shape, chunk), _chunks(rows, chunk)
    return [*calls, partial(_chunks(tiled, chunk).put, places, chunks, "wrap")]


def untilize_stage(shape: StripShape) -> Stage:
    """Convert tiles to dense rows, dropping padding."""
    nbytes = shape.elements * shape.itemsize
    if shape.is_in_one_face:
        return Stage(nbytes, partial(_copy_face, shape, tilize=False))
    pieces = _pieces(shape)

    def direct(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        index = _dense_index(shape, shape.direct_chunk)
        return [_taking(source, target[:nbytes], index, shape.direct_chunk)]

    def staged(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        copies: list[Call] = []
        for piece in pieces:
            rows = scratch[piece.staged_start : piece.staged_stop]
            dense = piece.dense_rows(target, shape.row_nbytes)
            index = _dense_index(piece.shape, piece.shape.chunk)
            copies += [
                _taking(piece.tiles(source), rows, index, piece.shape.chunk),
                partial(np.copyto, dense, piece.staged_rows(scratch)),
            ]
        return copies

    if shape.direct_chunk:
        return Stage(nbytes, direct)
    return Stage(nbytes, staged, _scratch_nbytes(pieces))


def _copy_face(
    shape: StripShape, source: Bytes, target: Bytes, scratch: Bytes, *, tilize: bool
) -> list[Call]:
    face_row = _FACE * shape.itemsize
    if not tilize:
        in_tile, dense = _row_items(shape, source, 0, face_row), target
        return [partial(np.copyto, _row_items(shape, dense, 0, shape.row_nbytes), in_tile)]
    in_tile, dense = _row_items(shape, target, 0, face_row), source
    clearing = partial(target[: shape.tiled_nbytes].fill, 0)
    return [clearing, partial(np.copyto, in_tile, _row_items(shape, dense, 0, shape.row_nbytes))]


def _chunks(raw: Bytes, chunk: int) -> Array:
    return raw[: raw.size // chunk * chunk].view(np.dtype((np.void, chunk)))


def _taking(source: Bytes, target: Bytes, index: NDArray[np.intp], chunk: int) -> Call:
    # No index is out of bounds; mode "wrap" is 1.4 times as fast as "clip".
    return partial(_chunks(source, chunk).take, index, None, _chunks(target, chunk), "wrap")


@lru_cache(maxsize=64)
def _tiled_index(shape: StripShape, chunk: int, stride: int, first: int) -> NDArray[np.intp]:
    """Return for each chunk of the tiles its chunk in dense rows (0 for padding).

    Rows begin every `stride` chunks, from chunk `first` on.
    """
    row_chunks = -(-shape.row_nbytes // chunk)
    all_chunks = shape.tile_columns * _TILE * shape.itemsize // chunk
    places = np.zeros((shape.outer, shape.tile_rows * _TILE, all_chunks), np.intp)
    rows = np.arange(shape.outer * shape.rows).reshape(shape.outer, -1, 1) * stride + first
    places[:, : shape.rows, :row_chunks] = rows + np.arange(row_chunks)
    faces = places.reshape(shape.outer * shape.tile_rows, 2, _FACE, shape.tile_columns, 2, -1)
    return _flat(faces.transpose(0, 3, 1, 4, 2, 5))


@lru_cache(maxsize=64)
def _padding_index(shape: StripShape, chunk: int) -> NDArray[np.intp]:
    """Return the chunks of the tiles that are padding."""
    return np.flatnonzero(_tiled_index(shape, chunk, shape.row_nbytes // chunk, 1) == 0)


@lru_cache(maxsize=64)
def _dense_index(shape: StripShape, chunk: int) -> NDArray[np.intp]:
    """Return for each chunk of dense rows its chunk in the tiles."""
    chunks = -(-shape.row_nbytes // chunk)
    tiles = shape.outer * shape.tile_rows, shape.tile_columns
    places = np.arange(shape.tiled_elements * shape.itemsize // chunk)
    rows = places.reshape(*tiles, 2, 2, _FACE, -1).transpose(0, 2, 4, 1, 3, 5)
    return _flat(rows.reshape(shape.outer, shape.tile_rows * _TILE, -1)[:, : shape.rows, :chunks])


def _flat(index: Array) -> NDArray[np.intp]:
    # Writable although shared: `take` copies a read-only index at every call.
    return np.ascontiguousarray(index, dtype=np.intp).reshape(-1)

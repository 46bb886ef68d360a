"""Convolutions whose columns do not fit in the memory limit: tile by tile.

A tile is some output rows of one sample and group. If whole columns of one row are still too
large, they are split along channels or kernel elements, and the products of the pieces are summed.
Such a tile has several rows, too: each kernel element costs one copy, however short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.ops.definition import Thunk
from stitch.ops.inference import Shape
from stitch.ops.steps import slice_range
from stitch.ops.windows import Windows, lines_of
from stitch.ops.workspaces import workspace
from stitch.program import Array

#: Limit of the columns of a tile in bytes (at least one row and kernel element).
TILE_NBYTES = 1 << 22
#: Samples with at most this many bytes of columns are not tiled.
MOST_NBYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of the columns of one sample and group.

    Args:
        rows: Output rows of a tile, along the first spatial axis.
        column: The shape of a column: channels of a group, then the kernel.
        axis: The axis of a column that is split; a piece has all of the later axes.
        length: Indices of the axis in a piece.
    """

    rows: int
    column: Shape
    axis: int
    length: int

    def pieces(self) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield for each piece its slice of a flat column, and its slices of a column's axes."""
        inner = math.prod(self.column[self.axis + 1 :])
        rest = tuple(slice(0, size) for size in self.column[self.axis + 1 :])
        for index, outer in enumerate(np.ndindex(*self.column[: self.axis])):
            before = tuple(slice(at, at + 1) for at in outer)
            first = index * self.column[self.axis]
            for part in slice_range(self.column[self.axis], self.length):
                flat = slice((first + part.start) * inner, (first + part.stop) * inner)
                yield flat, (*before, part, *rest)

    def row_slices(self, windows: Windows) -> Iterator[slice]:
        """Slice the output rows into tiles."""
        return slice_range(windows.output[0], self.rows)

    def elements(self, windows: Windows) -> int:
        """Return the elements of the columns of one tile and piece."""
        inner = math.prod(self.column[self.axis + 1 :])
        return self.rows * math.prod(windows.output[1:]) * self.length * inner


def is_cut(nbytes: int) -> bool:
    """Return whether one sample's columns must be tiled."""
    return nbytes > MOST_NBYTES


def one_sample_nbytes(windows: Windows, channels: int, itemsize: int) -> int:
    """Return the bytes of one sample's columns, and of the images they are gathered from."""
    columns = math.prod(windows.kernel) * math.prod(windows.output)
    images = math.prod(windows.kernel[1:]) * math.prod((windows.padded[0], *windows.output[1:]))
    return channels * (columns + max(images, math.prod(windows.padded))) * itemsize


def tiles_of(windows: Windows, channels: int, itemsize: int, filters: int = 1) -> Tiles:
    """Return the tiling for the channels of a group.

    Args:
        windows: The windows of the convolution.
        channels: The channels of a group.
        itemsize: Bytes of an element.
        filters: The filters of a group whose products with a piece are kept until they are added.
    """
    column = (channels, *windows.kernel)
    row = math.prod(windows.output[1:]) * itemsize
    rows = TILE_NBYTES // (row * math.prod(column))
    if rows:
        return Tiles(min(rows, windows.output[0]), column, 0, channels)
    rows = min(TILE_NBYTES // 64 // row, TILE_NBYTES // 4 // (row * filters), windows.output[0])
    rows = max(1, rows)
    return Tiles(rows, column, *_split(column, row * rows))


def _split(column: Shape, nbytes: int) -> tuple[int, int]:
    """Return axis and length of pieces of a column, whose elements take `nbytes` bytes each."""
    axis = 0
    while axis < len(column) - 1 and nbytes * math.prod(column[axis + 1 :]) > TILE_NBYTES:
        axis += 1
    length = TILE_NBYTES // max(1, nbytes * math.prod(column[axis + 1 :]))
    return axis, min(max(1, length), column[axis])


def tile_steps(x: Array, windows: Windows, weights: Array, result: Array) -> list[Thunk]:
    """Return steps for result[n, g] = weights[g] @ columns of sample n and group g."""
    samples, group, filters, _ = result.shape
    grouped = x.reshape(samples, group, -1, *windows.size)
    tiles, gather = _gathering(grouped, windows, filters)
    row = math.prod(windows.output[1:])
    whole = tiles.axis == 0 and tiles.length == grouped.shape[2]
    products = workspace(0 if whole else filters * tiles.rows * row, x.dtype)

    def run() -> None:
        for n, g in np.ndindex(samples, group):
            for rows in tiles.row_slices(windows):
                into = result[n, g][:, rows.start * row : rows.stop * row]
                for flat, (channels, *kernel) in tiles.pieces():
                    columns = gather(grouped[n, g, channels], kernel, rows)
                    if flat.start == 0:
                        np.matmul(weights[g][:, flat], columns, into)
                    else:
                        product = products[: into.size].reshape(into.shape)
                        np.matmul(weights[g][:, flat], columns, product)
                        np.add(into, product, into)

    return [run]


def spread_steps(x: Array, windows: Windows, weights: Array, out: Array) -> list[Thunk]:
    """Return steps that add columns, transposed weights[g] @ x of each sample and group, to `out`
    at the positions of their windows."""
    group, channels, _ = weights.shape
    samples, filters = out.shape[0], out.shape[1] // group
    lines, places = lines_of(windows), math.prod(windows.output)
    column = (filters, *windows.kernel)
    tiles = Tiles(windows.output[0], column, *_split(column, places * x.dtype.itemsize))
    work = workspace(tiles.elements(windows), x.dtype)
    rows = x.reshape(samples, group, channels, places)
    result = out.reshape(samples, group, filters, *windows.size)

    def run() -> None:
        out.fill(0)
        for n, g in np.ndindex(samples, group):
            for flat, (some, *kernel) in tiles.pieces():
                columns = work[: (flat.stop - flat.start) * places].reshape(-1, places)
                np.matmul(weights[g][:, flat].T, rows[n, g], columns)
                sizes = [k.stop - k.start for k in kernel]
                taps = columns.reshape(-1, *sizes, *windows.output)
                for place in np.ndindex(*sizes):
                    met = [
                        line.met(k.start + at)
                        for line, k, at in zip(lines, kernel, place, strict=True)
                    ]
                    into = result[(n, g, some, *(places for _, places in met))]
                    np.add(into, taps[(slice(None), *place, *(which for which, _ in met))], into)

    return [run]


def weight_steps(x: Array, windows: Windows, gradient: Array, sums: Array) -> list[Thunk]:
    """Return steps for sums[g] = columns of group g @ the gradient of its filters."""
    group, depth, filters = sums.shape
    grouped = x.reshape(len(x), group, -1, *windows.size)
    tiles, gather = _gathering(grouped, windows)
    row = math.prod(windows.output[1:])
    products = workspace(depth * filters, x.dtype)
    by_group = gradient.reshape(len(x), group, filters, -1)

    def run() -> None:
        sums.fill(0)
        for n, g in np.ndindex(len(x), group):
            for rows in tiles.row_slices(windows):
                seen = by_group[n, g][:, rows.start * row : rows.stop * row].T
                for flat, (channels, *kernel) in tiles.pieces():
                    into = sums[g][flat]
                    product = products[: into.size].reshape(into.shape)
                    np.matmul(gather(grouped[n, g, channels], kernel, rows), seen, product)
                    np.add(into, product, into)

    return [run]


#: Returns the columns of some channels [channels, *size], kernel elements and output rows.
_Gather = Callable[[Array, Sequence[slice], slice], Array]


def _gathering(grouped: Array, windows: Windows, filters: int = 1) -> tuple[Tiles, _Gather]:
    """Return the tiling of [samples, groups, channels, *size], and the gatherer of columns."""
    tiles = tiles_of(windows, grouped.shape[2], grouped.dtype.itemsize, filters)
    columns, lines = workspace(tiles.elements(windows), grouped.dtype), lines_of(windows)

    def gather(x: Array, kernel: Sequence[slice], rows: slice) -> Array:
        outputs = (rows, *(slice(0, line.output) for line in lines[1:]))
        sizes = [k.stop - k.start for k in kernel]
        shape = (len(x), *sizes, *(m.stop - m.start for m in outputs))
        target = columns[: math.prod(shape)].reshape(shape)
        if windows.needs_padding:
            target.fill(0)
        for place in np.ndindex(*sizes):
            there: list[slice] = []
            read: list[slice] = []
            for line, k, m, at in zip(lines, kernel, outputs, place, strict=True):
                which, positions = line.met(k.start + at, m)
                there.append(slice(which.start - m.start, which.stop - m.start))
                read.append(positions)
            target[(slice(None), *place, *there)] = x[(slice(None), *read)]
        return target.reshape(len(x) * math.prod(sizes), -1)

    return tiles, gather

"""A batch of images as planes, one for each sample and channel, and its sums over channels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.definition import Thunk
from stitch.ops.reduction import SPREAD_FROM, row_means
from stitch.ops.steps import CHUNK_SIZE, scalar, stretches, workspace
from stitch.program import Array

#: From this many places on, the sum of a channel's products is a product of its row by another.
SHORT_ROW = 16


class Planes:
    """A batch as (samples, channels, places), cut into dense chunks that stay in the caches.

    A number per channel is spread over a chunk's places once: whole arrays are twice as fast to
    combine as arrays that broadcast. A few chunks only would not make up for it.
    """

    def __init__(self, x: Array) -> None:
        samples, channels = x.shape[0], x.shape[1] if x.ndim > 1 else 1
        self.x = x.reshape(samples, channels, -1)
        places = self.x.shape[2]
        at_once = min(samples, max(1, CHUNK_SIZE // (channels * places)))
        whole = at_once > 1 or channels * places <= CHUNK_SIZE
        wide = channels if whole else max(1, CHUNK_SIZE // places)
        self.chunks = [
            (part, some)
            for some in stretches(channels, wide)
            for part in stretches(samples, at_once)
        ]
        # One channel at a time needs no more than its number.
        self.spreads = samples >= SPREAD_FROM * at_once and wide > 1
        self.wide = (at_once, channels, places if self.spreads else 1)

    def over_places(self, vector: Array) -> tuple[Array, list[Thunk]]:
        """A number per channel for all chunks, and the steps that refresh it."""
        column = vector.reshape(1, -1, 1)
        if not self.spreads:
            return np.broadcast_to(column, self.wide), []
        spread = workspace(self.wide, vector.dtype)
        return spread, [partial(np.copyto, spread, column)]

    def statistics(self, mean: Array, variance: Array) -> list[Thunk]:
        """Mean and variance per channel, in one pass.

        All is counted from what the first chunk's mean is: near the whole's, so that little is lost
        where squares are subtracted, and its own last digits, which are worth much where numbers
        are far from zero and near each other, do not count.
        """
        first, wild = self.x[: self.wide[0]], np.empty(mean.shape, np.bool_)
        steps: list[Thunk] = [
            *Planes(first).means(first, mean),
            # From infinity nothing can be counted.
            partial(np.isfinite, mean, wild),
            partial(np.logical_not, wild, wild),
            partial(np.copyto, mean, scalar(0, mean), where=wild),
        ]
        before, chunks = self.centered(mean)
        squares, rests = ChannelSums(self, mean), ChannelSums(self, mean)
        rest, square = np.empty_like(mean), np.empty_like(mean)
        for part, some, here, center in chunks:
            before += [
                center, *squares.steps(part, some, here, here), *rests.plain(part, some, here)
            ]  # fmt: skip
        return [
            *steps, *before, *squares.means(variance), *rests.means(rest),
            partial(np.add, mean, rest, mean),
            partial(np.multiply, rest, rest, square),
            partial(np.subtract, variance, square, variance),
            partial(np.maximum, variance, scalar(0, variance), out=variance),
        ]  # fmt: skip

    def means(self, x: Array, mean: Array) -> list[Thunk]:
        """Means per channel of an array of the same shape."""
        samples, channels, places = self.x.shape
        if places >= SHORT_ROW:
            sums = np.empty((samples, channels), mean.dtype)
            return [
                *row_means(x.reshape(-1, places), sums.reshape(-1)),
                partial(np.add.reduce, sums, 0, None, mean),
                partial(np.divide, mean, scalar(samples, mean), mean),
            ]
        # Channels have few places, or one: sums go over samples first.
        sums = np.empty((channels, places), mean.dtype)
        ones, flat = np.ones((1, samples), mean.dtype), x.reshape(samples, -1)
        return [
            partial(np.dot, ones, flat, sums.reshape(1, -1)),
            partial(np.add.reduce, sums, 1, None, mean),
            partial(np.divide, mean, scalar(samples * places, mean), mean),
        ]

    def centered(self, mean: Array) -> tuple[list[Thunk], list[tuple[slice, slice, Array, Thunk]]]:
        """Steps before; then per chunk where it is, a workspace, and the step that writes into that
        by how much the chunk is above the means."""
        means, before = self.over_places(mean)
        wide = self.chunks[0][1].stop
        work = workspace((self.wide[0], wide, self.x.shape[2]), mean.dtype)
        chunks: list[tuple[slice, slice, Array, Thunk]] = []
        for part, some in self.chunks:
            count = part.stop - part.start
            here = work[:count, : some.stop - some.start]
            step = partial(np.subtract, self.x[part, some], means[:count, some], here)
            chunks.append((part, some, here, step))
        return before, chunks

    def in_chunks(self, out: Array, *by: tuple[np.ufunc, Array]) -> list[Thunk]:
        """out = x, each function of that and a number per channel applied after the other."""
        result, steps = out.reshape(self.x.shape), list[Thunk]()
        spread = []
        for function, vector in by:
            numbers, before = self.over_places(vector)
            spread.append((function, numbers))
            steps += before
        # What came last is still in the caches.
        for part, some in reversed(self.chunks):
            target, count = result[part, some], part.stop - part.start
            seen = self.x[part, some]
            for function, numbers in spread:
                steps.append(partial(function, seen, numbers[:count, some], target))
                seen = target
        return steps


def by_distance(
    mean: Array, variance: Array, most: float, near: Sequence[Thunk], far: Sequence[Thunk]
) -> None:
    """The steps for numbers whose means are up to so many deviations from zero, or for others: a
    product with all of those would leave nothing of their differences, so they are centred first,
    which takes a pass more."""
    is_far = np.any(np.abs(mean) > most * np.sqrt(variance))
    for step in far if is_far else near:
        step()


class ChannelSums:
    """Sums of products over the places of a channel, gathered chunk by chunk."""

    def __init__(self, planes: Planes, like: Array) -> None:
        samples, channels, places = planes.x.shape
        self.at_once, self.count = planes.wide[0], scalar(samples * places, like)
        self.is_short = places < SHORT_ROW
        self.ones = np.ones((1, self.at_once if self.is_short else places), like.dtype)
        if self.is_short:
            pieces = -(-samples // self.at_once)
            self.rows = np.empty((pieces, channels, places), like.dtype)
            wide = planes.chunks[0][1].stop
            self.product = workspace((self.at_once, wide, places), like.dtype)
        else:
            self.rows = np.empty((samples, channels), like.dtype)

    def steps(self, part: slice, some: slice, a: Array, b: Array) -> list[Thunk]:
        """Steps that take one chunk of both factors."""
        if not self.is_short:
            return [partial(np.vecdot, a, b, self.rows[part, some])]
        product = self.product[: a.shape[0], : a.shape[1]]
        return [partial(np.multiply, a, b, product), *self.plain(part, some, product)]

    def plain(self, part: slice, some: slice, a: Array) -> list[Thunk]:
        """Steps that take one chunk of the first, where the other is one everywhere."""
        if not self.is_short:
            return [partial(np.vecdot, a, self.ones, self.rows[part, some])]
        flat, row = a.reshape(a.shape[0], -1), self.rows[part.start // self.at_once, some]
        return [partial(np.dot, self.ones[:, : a.shape[0]], flat, row.reshape(1, -1))]

    def means(self, out: Array) -> list[Thunk]:
        """Steps that give, after all chunks, the sums over how many places a channel has."""
        axes = (0, 2) if self.is_short else 0
        return [
            partial(np.add.reduce, self.rows, axes, None, out),
            partial(np.divide, out, self.count, out),
        ]

"""A batch of images as planes, one for each sample and channel, and its sums over channels.

Comes in: a batch [samples, channels, *places]. Goes out: steps over chunks of it that stay in the
caches. Must not know: operators.
"""

from __future__ import annotations

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
        """Mean and variance per channel."""
        steps = self.means(self.x, mean)
        before, chunks = self.centered(mean)
        squares = ChannelSums(self, mean)
        for part, some, here, center in chunks:
            before += [center, *squares.steps(part, some, here, here)]
        return [*steps, *before, *squares.means(variance)]

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

    def scale_and_shift(self, factor: Array, offset: Array, out: Array) -> list[Thunk]:
        """out = factor x + offset, with a number of each per channel."""
        result = out.reshape(self.x.shape)
        (factors, steps), (offsets, more) = map(self.over_places, (factor, offset))
        steps = [*steps, *more]
        for part, some in self.chunks:
            target, count = result[part, some], part.stop - part.start
            steps += [
                partial(np.multiply, self.x[part, some], factors[:count, some], target),
                partial(np.add, target, offsets[:count, some], target),
            ]
        return steps


class ChannelSums:
    """Sums of products over the places of a channel, gathered chunk by chunk."""

    def __init__(self, planes: Planes, like: Array) -> None:
        samples, channels, places = planes.x.shape
        self.at_once, self.count = planes.wide[0], scalar(samples * places, like)
        self.is_short = places < SHORT_ROW
        if self.is_short:
            pieces = -(-samples // self.at_once)
            self.rows = np.empty((pieces, channels, places), like.dtype)
            self.ones = np.ones((1, self.at_once), like.dtype)
            wide = planes.chunks[0][1].stop
            self.product = workspace((self.at_once, wide, places), like.dtype)
        else:
            self.rows = np.empty((samples, channels), like.dtype)

    def steps(self, part: slice, some: slice, a: Array, b: Array) -> list[Thunk]:
        """Steps that take one chunk of both factors."""
        if not self.is_short:
            return [partial(np.vecdot, a, b, self.rows[part, some])]
        product = self.product[: a.shape[0], : a.shape[1]]
        flat, row = product.reshape(a.shape[0], -1), self.rows[part.start // self.at_once, some]
        return [
            partial(np.multiply, a, b, product),
            partial(np.dot, self.ones[:, : a.shape[0]], flat, row.reshape(1, -1)),
        ]

    def means(self, out: Array) -> list[Thunk]:
        """Steps that give, after all chunks, the sums over how many places a channel has."""
        axes = (0, 2) if self.is_short else 0
        return [
            partial(np.add.reduce, self.rows, axes, None, out),
            partial(np.divide, out, self.count, out),
        ]

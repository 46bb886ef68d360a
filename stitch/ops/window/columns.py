"""Columns: what every window of a convolution sees, gathered for a few samples at a time.

In two dimensions, rows next to each other, a column is gathered in two stages: first, for each
place along the kernel's width, whole images with their rows cut to the output's width; in these,
what one kernel element sees of an image is one dense stretch. So the many short copies are made
once per kernel column, not once per kernel element.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stitch.ops.definition import Thunk
from stitch.ops.steps import bytes_from_a_line
from stitch.ops.window.windows import Windows, window_view
from stitch.program import Array


class Columns:
    """Gathers columns of at most `at_once` samples of `x`."""

    def __init__(self, x: Array, windows: Windows, at_once: int) -> None:
        self.x, self.windows = x, windows
        self._staged = (
            len(windows.size) == 2
            and windows.strides[0] == 1
            and min(windows.kernel) > 1
            and min(*windows.size, *windows.output) > 0
        )
        if self._staged:
            self._images = self._zeros(at_once)
        else:
            self._padded, self._inside = x, x
            if windows.needs_padding:
                # What no sample reaches is padding, and stays zero.
                self._padded = np.zeros((at_once, x.shape[1], *windows.padded), x.dtype)
                places = zip(windows.begin, windows.size, strict=True)
                within = (slice(b, b + s) for b, s in places)
                self._inside = self._padded[(slice(None), slice(None), *within)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the columns of one sample."""
        return (self.x.shape[1], *self.windows.kernel, *self.windows.output)

    def steps(self, part: slice, target: Array) -> list[Thunk]:
        """Columns of these samples, into an array or view of (samples, *shape)."""
        count = part.stop - part.start
        if not self._staged:
            if self._padded is self.x:
                return [partial(np.copyto, target, window_view(self.x[part], self.windows))]
            padded = window_view(self._padded[:count], self.windows)
            return [
                partial(np.copyto, self._inside[:count], self.x[part]),
                partial(np.copyto, target, padded),
            ]
        images = self._images[:count]
        rows = slice(self.windows.begin[0], self.windows.begin[0] + self.windows.size[0])
        steps: list[Thunk] = []
        for tap in range(self.windows.kernel[1]):
            seen, places = self._along_width(tap)
            to = images[:, :, tap, rows, places]
            steps.append(partial(np.copyto, to, self.x[part, :, :, seen]))
        return [*steps, partial(np.copyto, target, self._stretches(images))]

    def _zeros(self, at_once: int) -> Array:
        """Images per kernel column; what no sample reaches is padding, and stays zero."""
        height, _ = self.windows.padded
        shape = (at_once, self.x.shape[1], self.windows.kernel[1], height, self.windows.output[1])
        memory = bytes_from_a_line(int(np.prod(shape)) * self.x.dtype.itemsize)
        memory.fill(0)
        return memory.view(self.x.dtype).reshape(shape)

    def _along_width(self, tap: int) -> tuple[slice, slice]:
        """Positions that a kernel column meets inside the image, and the outputs they are for."""
        stride, width = self.windows.strides[1], self.windows.size[1]
        offset = tap * self.windows.dilations[1] - self.windows.begin[1]
        first = max(0, -(offset // stride))
        last = min(self.windows.output[1] - 1, (width - 1 - offset) // stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        begin, end = offset + first * stride, offset + last * stride
        return slice(begin, end + 1, stride), slice(first, last + 1)

    def _stretches(self, images: Array) -> Array:
        """The images seen as columns."""
        sample, channel, column, row, place = images.strides
        return as_strided(
            images,
            (images.shape[0], *self.shape),
            (sample, channel, row * self.windows.dilations[0], column, row, place),
            writeable=False,
        )

"""Where the maximum of every window is: the first place of several, in row-major order.

A NaN is larger than any number, as it is for `np.maximum`.

Axis by axis, the last first. Along an axis, a short kernel takes a step per element. For a long one
the maxima of all stretches of 1, 2, 4 ... elements are made from each other; a window is two
stretches that overlap, so that the length of a kernel counts by its logarithm only.

Small windows that hardly overlap and need no padding are compared element by element of their
kernel, over views and in place (`Views`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from stitch.ops.definition import Thunk
from stitch.ops.steps import along, stretches, workspace
from stitch.ops.window.sliding import (
    WindowLine,
    largest_plane,
    lines_of,
    planes_at_once,
    taps_of,
    undilated,
)
from stitch.ops.window.windows import Windows
from stitch.program import Array

#: The steps of a stretch of planes take up to so many times what the longest of these takes.
TIMES = 14
#: Windows are compared by views where their kernel has at most so many elements, and they read each
#: element at most so many times.
VIEWS, READS = 16, 2.5
#: Results that are compared together stay in the caches.
_VIEWED = 1 << 16
#: What the steps of a view take.
_STEPS_NBYTES = 2048


def places_nbytes(windows: Windows, planes: int, dtype: np.dtype[Any]) -> int:
    """What `maxima` of a piece takes: values and places before, between and after an axis."""
    at_once = planes_at_once(windows, planes, TIMES)
    return at_once * largest_plane(windows) * (5 * dtype.itemsize + 50) + 100 * max(windows.output)


def pieces(windows: Windows, planes: int) -> Iterator[slice]:
    """Planes that are looked at together."""
    return stretches(planes, planes_at_once(windows, planes, TIMES))


def maxima(x: Array, windows: Windows, counts: Sequence[int], lowest: float) -> tuple[Array, Array]:
    """The maximum of every window of planes x, and its place: `counts[a]` for each step along axis
    a."""
    values, places, some_lack = x, np.zeros((1,) * x.ndim, np.int64), False
    lines = lines_of(windows)
    for axis in reversed(range(len(lines))):
        line = lines[axis]
        steps = along(np.arange(line.size) * counts[axis], axis + 1, x.ndim)
        # A window of padding alone has no place, wherever it is along this axis.
        places = np.where(places < 0, -1, places + steps) if some_lack else places + steps
        shape = (*values.shape[: axis + 1], line.output, *values.shape[axis + 2 :])
        results = np.empty(shape, x.dtype), np.empty(shape, np.int64)
        given = [np.moveaxis(np.broadcast_to(places, values.shape), axis + 1, 0)]
        given.insert(0, np.moveaxis(values, axis + 1, 0))
        into = [np.moveaxis(array, axis + 1, 0) for array in results]
        if line.is_short:
            _by_elements(line, given, into, lowest)
        else:
            for array, nothing in zip(into, (lowest, -1), strict=True):
                array[...] = nothing
            for part, read, write in undilated(line):
                _by_stretches(part, [a[read] for a in given], [a[write] for a in into])
        values, places = results
        some_lack = some_lack or not line.count_inside().all()
    return values, places


def _by_elements(
    line: WindowLine, given: Sequence[Array], results: Sequence[Array], lowest: float
) -> None:
    """A step per kernel element, over all windows that reach something there."""
    known = slice(0, 0)
    for number, (which, seen) in enumerate(taps_of(line)):
        others = [array[seen] for array in given]
        if number == 0:
            for array, other, nothing in zip(results, others, (lowest, -1), strict=True):
                array[: which.start] = nothing
                array[which.stop :] = nothing
                array[which] = other
            known = which
        else:
            _take_larger(
                [array[which] for array in results], others, known != slice(0, line.output)
            )
    if known == slice(0, 0):
        for array, nothing in zip(results, (lowest, -1), strict=True):
            array[...] = nothing


def _by_stretches(line: WindowLine, given: Sequence[Array], results: Sequence[Array]) -> None:
    """Windows without dilation along the first axis of (values, places)."""
    size, first = line.size, np.arange(line.output) * line.stride - line.begin
    length = np.minimum(first + line.kernel, size) - np.maximum(first, 0)
    level = np.frexp(np.maximum(length, 0))[1] - 1
    # Neighbouring windows that are made alike: as long, and reaching beyond the same end.
    kinds = np.stack([level, first < 0, first + line.kernel > size])
    ends = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(0)) + 1
    runs = list(pairwise([0, *ends.tolist(), line.output]))
    values, places = (array.copy(order="K") for array in given)
    for height in range(int(level.max(initial=-1)) + 1):
        stretch = 1 << height
        for start, stop in runs:
            if level[start] != height:
                continue
            begins = _stretch(line, start, stop, 0) if first[start] >= 0 else slice(0, 1)
            behind = slice(size - stretch, size - stretch + 1)
            if first[start] + line.kernel <= size:
                behind = _stretch(line, start, stop, line.kernel - stretch)
            into = [array[start:stop] for array in results]
            for target, source in zip(into, (values, places), strict=True):
                target[...] = source[begins]
            _take_larger(into, [values[behind], places[behind]])
        left = size - 2 * stretch + 1
        if left > 0:
            _take_larger(
                [values[:left], places[:left]],
                [values[stretch : stretch + left], places[stretch : stretch + left]],
            )


def _stretch(line: WindowLine, start: int, stop: int, offset: int) -> slice:
    first = start * line.stride - line.begin + offset
    return slice(first, first + (stop - start - 1) * line.stride + 1, line.stride)


def _take_larger(into: Sequence[Array], others: Sequence[Array], some_lack: bool = False) -> None:
    """Where the others, which lie behind, are larger, or nothing is known, they are taken."""
    value, other = into[0], others[0]
    larger = other > value
    if value.dtype.kind == "f":
        larger |= (other != other) & (value == value)
    if some_lack:
        larger |= into[1] < 0
    for target, source in zip(into, others, strict=True):
        np.copyto(target, source, where=larger)


class Views:
    """Steps that find the maxima of windows element by element of their kernel.

    A NaN loses against any number here: a caller that has NaN looks again with `maxima`.
    """

    def __init__(self, windows: Windows, counts: Sequence[int], planes: int) -> None:
        self.lines, self.plane = lines_of(windows), math.prod(windows.size)
        self.planes, self.at_once = planes, _planes_viewed(windows, planes)
        self.counts = counts
        self.mask = workspace((self.at_once, *windows.output), np.dtype(np.bool_))
        #: Where each window of a plane begins.
        self.begins = np.zeros(windows.output, np.int64)
        for axis, line in enumerate(self.lines):
            steps = np.arange(line.output) * (line.stride * counts[axis])
            self.begins += along(steps, axis, len(self.lines))

    def steps(self, x: Array, values: Array, places: Array) -> list[Thunk]:
        """Planes x; their maxima and places in all of x."""
        steps: list[Thunk] = []
        for part in stretches(self.planes, self.at_once):
            first = np.arange(part.start, part.stop) * self.plane
            first = first.reshape(-1, *(1,) * len(self.lines))
            steps += self._compared(x[part], first, values[part], places[part])
        return steps

    def _compared(self, x: Array, first: Array, values: Array, places: Array) -> Iterator[Thunk]:
        mask = self.mask[: len(x)]
        for number, tap in enumerate(itertools.product(*(range(e.kernel) for e in self.lines))):
            taps = list(zip(tap, self.lines, strict=True))
            seen = x[(slice(None), *(line.met(index)[1] for index, line in taps))]
            offset = sum(
                index * line.dilation * count
                for (index, line), count in zip(taps, self.counts, strict=True)
            )
            if number == 0:
                yield partial(np.copyto, values, seen)
                yield partial(np.copyto, places, first)
            else:
                yield partial(np.greater, seen, values, mask)
                yield partial(np.copyto, values, seen, where=mask)
                yield partial(np.copyto, places, first + offset, where=mask)
        yield partial(np.add, places, self.begins, places)


def are_viewed(windows: Windows) -> bool:
    """Whether `Views` takes least time: small windows, none of which reaches beyond."""
    lines, taps = lines_of(windows), math.prod(windows.kernel)
    inside = all(
        line.begin == 0
        and (line.output - 1) * line.stride + line.dilation * (line.kernel - 1) < line.size
        for line in lines
    )
    reads = taps * math.prod(windows.output)
    return inside and taps <= VIEWS and reads <= READS * math.prod(windows.size)


def views_nbytes(windows: Windows, planes: int) -> int:
    """What `Views` takes."""
    output, at_once = math.prod(windows.output), _planes_viewed(windows, planes)
    taps, pieces = math.prod(windows.kernel), -(-planes // at_once)
    return output * (at_once + 17) + taps * (8 * planes + _STEPS_NBYTES * pieces)


def _planes_viewed(windows: Windows, planes: int) -> int:
    return max(1, min(planes, _VIEWED // max(1, math.prod(windows.output))))

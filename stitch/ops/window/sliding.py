"""Sliding windows along the axes of a batch: what a ufunc makes of each, without padding anything.

Only elements that exist are read; a window without any gives the identity.

A box is one axis after the other. Along an axis, a short kernel takes one step per kernel element,
over all windows that reach an element there. A long one is cut by stretches as long as itself,
after van Herk (1992): a window is the end of a stretch and the begin of the next, so running
results from both ends of every stretch are enough, three steps an element whatever the kernel's
length. Sums are sums of what is in the window: nothing is ever subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.attributes import Attributes
from stitch.ops.definition import Thunk
from stitch.ops.inference import Shape
from stitch.ops.steps import fill_step, stretches, workspace
from stitch.ops.window.windows import Windows, pool_windows
from stitch.program import Array

#: Arrays between two axes, and running results, are at most of this many bytes (or of one plane,
#: and one line, where these are larger).
PLANES_NBYTES = 1 << 20
#: Kernels up to this length take a step per element; up to the other one, too, if windows overlap
#: so little that the steps read each element at most so many times.
SHORT, MEDIUM, OVERLAP = 32, 1024, 8


@dataclass(frozen=True, slots=True)
class WindowLine:
    """The windows along one axis; window i begins at i * stride - begin."""

    size: int
    kernel: int
    stride: int
    dilation: int
    begin: int
    output: int

    @property
    def is_identity(self) -> bool:
        """Whether every window is the element at its own place."""
        return self.kernel == self.stride == 1 and not self.begin and self.output == self.size

    @property
    def is_short(self) -> bool:
        """Whether one step per kernel element takes least."""
        reads = self.kernel * self.output
        return self.kernel <= SHORT or (self.kernel <= MEDIUM and reads <= OVERLAP * self.size)

    @property
    def left(self) -> int:
        """The first window that does not begin before the line."""
        return self.first(0)

    @property
    def right(self) -> int:
        """The first window that reaches beyond the line."""
        span = self.dilation * (self.kernel - 1) + 1
        return max(self.first(self.size - span + 1), self.left)

    @property
    def is_as_long(self) -> bool:
        """Whether there is a window for each element, padded at the ends, none wholly there; and
        what these ends are takes little."""
        few = self.dilation == 1 or 2 * (self.left + self.output - self.right) <= self.output
        whole = self.stride == 1 and self.output == self.size and 0 < self.begin < self.size
        return whole and few and self.kernel > 1

    def count_inside(self) -> Array:
        """How many kernel elements of each window there are."""
        return self._count(-self.begin, self.size)

    def count_padded(self, end: int) -> Array:
        """The same, with `begin` and `end` elements of padding."""
        return self._count(0, self.begin + self.size + end)

    def _count(self, first: int, size: int) -> Array:
        """How many kernel elements of each window lie in so many places, where window 0 begins at
        `first`."""
        begins = np.arange(self.output) * self.stride + first
        least = np.maximum(-(begins // self.dilation), 0)
        most = np.minimum((size - 1 - begins) // self.dilation, self.kernel - 1)
        return np.asarray(np.maximum(most - least + 1, 0))

    def first(self, place: int) -> int:
        """The first window that begins at a place or behind it; `output` if none does."""
        return min(max(-(-(place + self.begin) // self.stride), 0), self.output)

    def met(self, tap: int, among: slice | None = None) -> tuple[slice, slice]:
        """The windows, among some, that meet an element with this element of their kernel, and
        the places of these."""
        offset, of = tap * self.dilation, slice(0, self.output) if among is None else among
        low = min(max(self.first(-offset), of.start), of.stop)
        high = min(max(self.first(self.size - offset), low), of.stop)
        if high == low:
            return slice(low, low), slice(0, 0)
        start = low * self.stride - self.begin + offset
        last = start + (high - low - 1) * self.stride
        return slice(low, high), slice(start, last + 1, self.stride)

    def seen(self, work: Array, low: int, high: int, offset: int = 0) -> Array:
        """Of an array (outer, size, inner), what lies so far behind the begins of windows."""
        start = low * self.stride - self.begin + offset
        seen: Array = work[:, start : start + (high - low - 1) * self.stride + 1 : self.stride]
        return seen


def lines_of(windows: Windows) -> tuple[WindowLine, ...]:
    """The windows axis by axis."""
    axes = zip(
        windows.size, windows.kernel, windows.strides, windows.dilations, windows.begin,
        windows.output, strict=True,
    )  # fmt: skip
    return tuple(WindowLine(*axis) for axis in axes)


def sees_everywhere(attributes: Attributes, size: Shape) -> bool:
    """Whether each window of a pool over a spatial shape sees an element, not padding alone."""
    return all(line.count_inside().all() for line in lines_of(pool_windows(attributes, size)))


class Sliding:
    """Steps of a ufunc over the windows of planes, with room for a few planes at a time."""

    def __init__(
        self, ufunc: np.ufunc, identity: float, windows: Windows, planes: int, dtype: np.dtype[Any]
    ) -> None:
        self.ufunc, self.identity = ufunc, identity
        self.lines = lines_of(windows)
        self.at_once = planes_at_once(windows, planes, dtype.itemsize)
        self._between = [
            workspace((self.at_once, *shape), dtype) for shape in shapes_between(windows)
        ]
        self._running: tuple[Array, ...] = ()
        if not all(line.is_short for line in self.lines):
            kind, size = running_type(ufunc, dtype), running_size(windows, planes, dtype.itemsize)
            self._running = (workspace(size, kind), workspace(size, kind))

    def steps(self, source: Array, out: Array) -> list[Thunk]:
        """out[n, *i] = ufunc over the elements that window i sees of source[n], for planes n."""
        active = [axis for axis, line in enumerate(self.lines) if not line.is_identity]
        if not active:
            return [partial(np.copyto, out, source)]
        steps: list[Thunk] = []
        for part in stretches(len(out), self.at_once):
            current, last = source[part], out[part]
            targets = [*(work[: len(last)] for work in self._between), last]
            for axis, target in zip(active, targets, strict=True):
                line = self.lines[axis]
                outer = math.prod(target.shape[: axis + 1])
                inner = math.prod(target.shape[axis + 2 :])
                seen = current.reshape(outer, line.size, inner)
                steps += self._along(line, seen, target.reshape(outer, line.output, inner))
                current = target
        return steps

    def _along(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        """One axis of arrays (outer, axis, inner)."""
        if line.is_short:
            return self._by_taps(line, source, target)
        return [step for part in undilated(line) for step in self._long(*part, source, target)]

    def _by_taps(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        taps = list(taps_of(line))
        if not taps:
            return self._nothing(target, slice(0, line.output))
        if line.is_as_long and source.shape[2] == 1 and min(source.shape[:2]) > 1:
            return self._by_rows(line, source, target)
        # First what the most windows have: where all do, nothing else is to be filled.
        first = max(range(len(taps)), key=lambda i: taps[i][0].stop - taps[i][0].start)
        which, places = taps.pop(first)
        steps: list[Thunk] = [partial(np.copyto, target[:, which], source[:, places])]
        for rest in (slice(0, which.start), slice(which.stop, line.output)):
            steps += self._nothing(target, rest)
        for which, places in taps:
            seen, there = source[:, places], target[:, which]
            steps.append(partial(self.ufunc, there, seen, out=there))
        return steps

    def _by_rows(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        """As if all rows were one: one loop, not one for each row, which would take several times
        as long. Then the windows at the ends of rows, which saw the neighbouring row, again."""
        seen, results = source.reshape(-1), target.reshape(-1)
        steps: list[Thunk] = []
        for tap in range(line.kernel):
            offset = tap * line.dilation - line.begin
            before, behind = max(0, -offset), max(0, offset)
            there = results[before : results.size - behind]
            read = seen[behind : seen.size - before]
            again = partial(self.ufunc, there, read, out=there)
            steps.append(again if tap else partial(np.copyto, there, read))
        before_them = None
        for window in range(line.left):
            steps += self._window(line, source, target, window, before_them)
            before_them = window
        behind_them = None
        for window in reversed(range(line.right, line.output)):
            steps += self._window(line, source, target, window, behind_them)
            behind_them = window
        return steps

    def _window(
        self, line: WindowLine, source: Array, target: Array, window: int, known: int | None
    ) -> list[Thunk]:
        """One window of every row; from the one beside it, which is known, if that has but one
        element less."""
        rows, into = source[:, :, 0], target[:, window, 0]
        first = window - line.begin
        taps = range(first, first + line.kernel * line.dilation, line.dilation)
        places = [place for place in taps if 0 <= place < line.size]
        if known is None or line.dilation > 1:
            start, others = rows[:, places[0]], places[1:]
        else:
            start = target[:, known, 0]
            others = places[:1] if known > window else [p for p in taps[-1:] if p < line.size]
        steps: list[Thunk] = [partial(np.copyto, into, start)]
        return steps + [partial(self.ufunc, into, rows[:, p], out=into) for p in others]

    def _nothing(self, target: Array, which: slice) -> list[Thunk]:
        there = target[:, which]
        return [fill_step(there, self.identity)] if there.size else []

    def _long(
        self, line: WindowLine, of_source: slice, of_target: slice, source: Array, target: Array
    ) -> list[Thunk]:
        """Pieces of the lines, so that running results fit."""
        source, target = source[:, of_source], target[:, of_target]
        if line.size == 0:
            return self._nothing(target, slice(0, line.output))
        lines = self._running[0].size // line.size
        columns = min(source.shape[2], lines)
        rows = max(1, lines // source.shape[2])
        steps: list[Thunk] = []
        for row in stretches(source.shape[0], rows):
            for column in stretches(source.shape[2], columns):
                place = (row, slice(None), column)
                steps += self._by_stretches(line, source[place], target[place])
        return steps

    def _by_stretches(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        size, kernel = line.size, line.kernel
        before, after = (work[: source.size].reshape(source.shape) for work in self._running)
        stretch = min(kernel, size)
        full = size // stretch * stretch
        last = full if full < size else full - stretch
        steps = self._results(source, before, stretch, 1)
        steps += self._results(source, after, stretch, -1)
        # Windows that begin before the line; reach its end; reach it from the last stretch; begin
        # behind it.
        left, none = line.first(0), line.first(size)
        right = min(max(line.first(size - kernel + 1), left), none)
        tail = min(max(line.first(last), right), none)
        empty = min(line.first(1 - kernel), left)
        whole = min(max(line.first(size - kernel), empty), left)
        steps += self._nothing(target, slice(0, empty))
        steps += self._nothing(target, slice(none, line.output))
        if whole > empty:
            ends = line.seen(before, empty, whole, kernel - 1)
            steps.append(partial(np.copyto, target[:, empty:whole], ends))
        if left > whole:
            steps.append(partial(np.copyto, target[:, whole:left], after[:, :1]))
        if right > left:
            # A window that is one stretch would count twice.
            steps.append(fill_step(before[:, stretch - 1 : full : stretch], self.identity))
            ends = line.seen(before, left, right, kernel - 1)
            begins = line.seen(after, left, right)
            steps.append(partial(self.ufunc, begins, ends, out=target[:, left:right]))
        if tail > right:
            begins, ends = line.seen(after, right, tail), after[:, last : last + 1]
            steps.append(partial(self.ufunc, begins, ends, out=target[:, right:tail]))
        if none > tail:
            steps.append(partial(np.copyto, target[:, tail:none], line.seen(after, tail, none)))
        return steps

    def _results(self, source: Array, work: Array, stretch: int, way: int) -> list[Thunk]:
        """Results of each stretch up to an element, or from it on: `way` is 1 or -1."""
        outer, size, inner = source.shape
        full = size // stretch * stretch
        steps: list[Thunk] = []
        for part, length in ((slice(0, full), stretch), (slice(full, size), size - full)):
            if length:
                shape = (outer, -1, length, inner)
                seen, there = source[:, part].reshape(shape), work[:, part].reshape(shape)
                seen, there = seen[:, :, ::way], there[:, :, ::way]
                steps.append(partial(self.ufunc.accumulate, seen, 2, there.dtype, there))
        return steps


def shapes_between(windows: Windows) -> list[Shape]:
    """The shapes of a plane between the axes that change it."""
    shapes, shape = [], list(windows.size)
    for axis, line in enumerate(lines_of(windows)):
        if not line.is_identity:
            shape[axis] = line.output
            shapes.append(tuple(shape))
    return shapes[:-1]


def largest_plane(windows: Windows) -> int:
    """Elements of a plane before, between or after its axes."""
    shapes = (windows.size, *shapes_between(windows), windows.output)
    return max(1, *(math.prod(shape) for shape in shapes))


def planes_at_once(windows: Windows, planes: int, itemsize: int) -> int:
    """How many planes pass through all axes together."""
    return max(1, min(planes, PLANES_NBYTES // (largest_plane(windows) * itemsize)))


def running_size(windows: Windows, planes: int, itemsize: int) -> int:
    """Elements of running results from one end: a piece, or one line where that is longer."""
    most = planes_at_once(windows, planes, itemsize) * largest_plane(windows)
    return min(most, max(PLANES_NBYTES // itemsize, 1, *windows.size))


def sliding_nbytes(ufunc: np.ufunc, windows: Windows, planes: int, dtype: np.dtype[Any]) -> int:
    """What `Sliding` takes for itself, but for its steps."""
    at_once = planes_at_once(windows, planes, dtype.itemsize)
    between = sum(math.prod(shape) for shape in shapes_between(windows)) * dtype.itemsize
    if all(line.is_short for line in lines_of(windows)):
        return at_once * between
    running = running_size(windows, planes, dtype.itemsize) * running_type(ufunc, dtype).itemsize
    return at_once * between + 2 * running


def running_type(ufunc: np.ufunc, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Long sums of floats are float64's, rounded once."""
    return np.dtype(np.float64) if ufunc is np.add and dtype.kind == "f" else dtype


def undilated(line: WindowLine) -> Iterator[tuple[WindowLine, slice, slice]]:
    """The same windows without dilation: lines over every so manieth element, and where each reads
    and writes."""
    common = math.gcd(line.stride, line.dilation)
    period, stride = line.dilation // common, line.stride // common
    for window in range(min(period, line.output)):
        start = window * line.stride - line.begin
        rest = start % line.dilation
        size = len(range(rest, line.size, line.dilation))
        output = len(range(window, line.output, period))
        begin = (rest - start) // line.dilation
        yield (
            WindowLine(size, line.kernel, stride, 1, begin, output),
            slice(rest, None, line.dilation),
            slice(window, None, period),
        )


def taps_of(line: WindowLine) -> Iterator[tuple[slice, slice]]:
    """For each kernel element that is inside for some window: these windows, and its places."""
    reach = line.begin - (line.output - 1) * line.stride
    least = max(0, -(-reach // line.dilation))
    most = min(line.kernel - 1, (line.size - 1 + line.begin) // line.dilation)
    for tap in range(least, most + 1):
        which, places = line.met(tap)
        if which.stop > which.start:
            yield which, places

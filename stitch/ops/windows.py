"""Sliding windows of convolutions and pools: kernels, strides, dilations and padding over a spatial
shape, by the equations of ONNX's Conv and pooling operators; and reductions over windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stitch.ops.definition import Attribute, Thunk, declared
from stitch.ops.inference import Attributes, InferenceContext, Shape, int_of, ints_of, string_of
from stitch.ops.steps import fill_step, slice_range
from stitch.ops.workspaces import workspace
from stitch.program import Array

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_INTS = Attribute("ints")
WINDOW_ATTRIBUTES = declared(
    auto_pad="NOTSET", dilations=_INTS, kernel_shape=_INTS, pads=_INTS, strides=_INTS
)
CONVOLUTION_ATTRIBUTES = declared(**WINDOW_ATTRIBUTES, group=1)
#: For operators without weights.
KERNEL_SHAPE = {"kernel_shape": Attribute("ints", required=True)}
POOL_ATTRIBUTES = declared(**{**WINDOW_ATTRIBUTES, **KERNEL_SHAPE}, ceil_mode=0)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over a spatial shape, one tuple entry per axis.

    `begin` and `end` are padding; `overhang` is how far the last window reaches beyond `end`.
    """

    size: Shape
    kernel: Shape
    strides: Shape
    dilations: Shape
    begin: Shape
    end: Shape
    overhang: Shape
    output: Shape

    @property
    def padded(self) -> Shape:
        """The spatial shape with its padding, large enough for every window."""
        parts = zip(self.begin, self.size, self.end, self.overhang, strict=True)
        return tuple(map(sum, parts))

    @property
    def needs_padding(self) -> bool:
        return any(self.begin) or any(self.end) or any(self.overhang)

    def tap(self, axis: int, index: int) -> slice:
        """Return the padded positions along a spatial axis that one kernel element reads."""
        count, stride = self.output[axis], self.strides[axis]
        first = index * self.dilations[axis]
        return slice(first, first + (count - 1) * stride + 1, stride) if count else slice(0, 0)

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """Yield for each kernel element, in order, the padded positions that it reads."""
        for element in itertools.product(*map(range, self.kernel)):
            yield tuple(self.tap(axis, index) for axis, index in enumerate(element))


def _auto_pad(attributes: Attributes) -> str:
    return string_of(attributes, "auto_pad") if "auto_pad" in attributes else AUTO_PADS[0]


def check_window_attributes(context: InferenceContext, size: Shape, kernel: Shape) -> None:
    """Check that lists have the spatial rank and are in range, and either `pads` or `auto_pad`."""
    ones = (1,) * len(size)
    if context.ints_of("kernel_shape") is not None:
        context.spatial_ints("kernel_shape", ones)
    context.spatial_ints("strides", ones)
    context.spatial_ints("dilations", ones)
    context.spatial_ints("pads", ones + ones, least=0)
    auto_pad = _auto_pad(context.attributes)
    if "auto_pad" in context.attributes:
        context.require_word("auto_pad", AUTO_PADS)
    is_either = auto_pad == "NOTSET" or not any(context.ints_of("pads") or ())
    what = f"{context.op} has both pads and auto_pad: remove one"
    context.require(is_either, what, got=f"auto_pad={auto_pad}")


def windows_of(
    attributes: Attributes, size: Shape, kernel: Shape, ceil: bool = False, *,
    is_pool: bool = False,
) -> Windows:  # fmt: skip
    """Return the windows over a spatial shape for checked attributes; output sizes may be negative.

    Args:
        size: Spatial shape of the operand.
        kernel: Spatial shape of the kernel.
        ceil: Round output sizes up (`ceil_mode`).
        is_pool: A window longer than its operand, by less than a stride, is one window: ONNX's
            inference and ONNX Runtime divide integers as C does, towards 0.
    """
    rank = len(size)
    strides = ints_of(attributes, "strides") or (1,) * rank
    dilations = ints_of(attributes, "dilations") or (1,) * rank
    pads = ints_of(attributes, "pads") or (0,) * (2 * rank)
    auto_pad = _auto_pad(attributes)
    begins, ends, overhangs, outputs = [], [], [], []
    for i in range(rank):
        span = dilations[i] * (kernel[i] - 1) + 1
        begin, end, up = pads[i], pads[rank + i], False
        if auto_pad.startswith("SAME"):
            output = -(-size[i] // strides[i])
            total = max((output - 1) * strides[i] + span - size[i], 0)
            small = total // 2
            begin, end = (small, total - small) if auto_pad == "SAME_UPPER" else (
                total - small, small,
            )  # fmt: skip
        else:
            last = size[i] + begin + end - span
            up = ceil or (is_pool and last < 0 and -strides[i] < last)
            output = (-(-last // strides[i]) if up else last // strides[i]) + 1
            if ceil and (output - 1) * strides[i] >= size[i] + begin:
                output -= 1  # a window must not start in the right padding
        reached = (output - 1) * strides[i] + span
        begins.append(begin)
        ends.append(end)
        # Never more, rounded down; never less, rounded up: sizes that are named need no guard.
        overhangs.append(max(reached - begin - size[i] - end, 0) if up else 0)
        outputs.append(output)
    padding = (tuple(begins), tuple(ends), tuple(overhangs))
    return Windows(size, kernel, strides, dilations, *padding, tuple(outputs))


def pool_windows(attributes: Attributes, size: Shape) -> Windows:
    """Return the windows of a pool, whose kernel and rounding are attributes."""
    kernel = ints_of(attributes, "kernel_shape") or ()
    ceil = bool(int_of(attributes, "ceil_mode"))
    return windows_of(attributes, size, kernel, ceil, is_pool=True)


def check_pads(context: InferenceContext, kernel: Shape) -> None:
    """Check that a pool's pads are shorter than its kernel, as ONNX Runtime and PyTorch do: else
    windows would be empty, and a tiny file could ask for any number of them."""
    pads = context.ints_of("pads") or ()
    context.require(
        all(pad < length for pad, length in zip(pads, kernel * 2, strict=False)),
        f"pads of {context.op} are as long as its kernel",
        expected=f"each less than the kernel's {list(kernel)}", got=f"pads {list(pads)}",
    )  # fmt: skip


def transposed_windows(attributes: Attributes, size: Shape, kernel: Shape) -> Windows:
    """Return the windows of a ConvTranspose: `size` is its output's shape, `output` its input's."""
    rank = len(size)
    ones, zeros = (1,) * rank, (0,) * rank
    strides = ints_of(attributes, "strides") or ones
    dilations = ints_of(attributes, "dilations") or ones
    extra = ints_of(attributes, "output_padding") or zeros
    pads = ints_of(attributes, "pads") or zeros + zeros
    wanted = ints_of(attributes, "output_shape")
    auto_pad = _auto_pad(attributes)
    begins, ends, result = [], [], []
    for i in range(rank):
        full = strides[i] * (size[i] - 1) + extra[i] + dilations[i] * (kernel[i] - 1) + 1
        if wanted is None and not auto_pad.startswith("SAME"):
            begin, end = pads[i], pads[rank + i]
        else:
            total = full - (wanted[i] if wanted is not None else size[i] * strides[i])
            total = max(total, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            end = total - begin
        length = full - begin - end
        if wanted is not None:
            length = wanted[i]
        elif auto_pad.startswith("SAME"):
            length = size[i] * strides[i]
        begins.append(begin)
        # An output_shape beyond the last window is padded with zeros.
        ends.append(max(full - begin - length, 0))
        result.append(length)
    padding = (tuple(begins), tuple(ends), zeros)
    return Windows(tuple(result), kernel, strides, dilations, *padding, tuple(size))


def turned_windows(windows: Windows) -> Windows | None:
    """Return the windows of the Conv that is equivalent to a ConvTranspose with strides of 1, with
    channels exchanged and kernels reversed; None if there is no such Conv."""
    if max(windows.strides) > 1 or min(*windows.size, *windows.output) < 1:
        return None
    spans = [d * (k - 1) for d, k in zip(windows.dilations, windows.kernel, strict=True)]
    begin = tuple(span - b for span, b in zip(spans, windows.begin, strict=True))
    parts = zip(windows.size, spans, windows.output, begin, strict=True)
    end = tuple(result + span - size - b for result, span, size, b in parts)
    if min(*begin, *end) < 0:
        return None
    none = (0,) * len(spans)
    kernel, ones = windows.kernel, windows.strides
    return Windows(windows.output, kernel, ones, windows.dilations, begin, end, none, windows.size)


def window_view(padded: Array, windows: Windows) -> Array:
    """Return every window as a view: [batch, channels, *kernel, *output]."""
    spatial: Sequence[int] = padded.strides[2:]
    # Strides of axes of size 1 are unused and could overflow.
    kernel = (
        s * d if n > 1 else s
        for s, d, n in zip(spatial, windows.dilations, windows.kernel, strict=True)
    )
    output = (
        s * t if n > 1 else s
        for s, t, n in zip(spatial, windows.strides, windows.output, strict=True)
    )
    return as_strided(
        padded,
        (*padded.shape[:2], *windows.kernel, *windows.output),
        (*padded.strides[:2], *kernel, *output),
        writeable=False,
    )


# Sliding-window reductions ------------------------------------------------------------------------

#: Limit of intermediates in bytes, unless one plane is larger.
PLANES_NBYTES = 1 << 20
#: Kernels of up to SHORT elements take a step per element; up to MEDIUM, if the steps read each
#: input element at most OVERLAP times.
SHORT, MEDIUM, OVERLAP = 32, 1024, 8


@dataclass(frozen=True, slots=True)
class WindowLine:
    """The windows along one axis: window i begins at position i * stride - begin."""

    size: int
    kernel: int
    stride: int
    dilation: int
    begin: int
    output: int

    @property
    def is_identity(self) -> bool:
        """Whether every window is the element at its index."""
        return self.kernel == self.stride == 1 and not self.begin and self.output == self.size

    @property
    def is_short(self) -> bool:
        """Whether one step per kernel element is fastest."""
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
    def is_same_length(self) -> bool:
        """Whether there is a window for each element, with padding at both ends, few windows reach
        the padding, and none is in it wholly."""
        few = self.dilation == 1 or 2 * (self.left + self.output - self.right) <= self.output
        whole = self.stride == 1 and self.output == self.size and 0 < self.begin < self.size
        return whole and few and self.kernel > 1

    def count_inside(self) -> Array:
        """Return for each window how many of its elements are inside the line."""
        return self._count(-self.begin, self.size)

    def count_padded(self, end: int) -> Array:
        """Return for each window how many of its elements are inside the line or its padding."""
        return self._count(0, self.begin + self.size + end)

    def _count(self, first: int, size: int) -> Array:
        """Return for each window how many elements are in `range(size)`; window 0 is at `first`."""
        begins = np.arange(self.output) * self.stride + first
        least = np.maximum(-(begins // self.dilation), 0)
        most = np.minimum((size - 1 - begins) // self.dilation, self.kernel - 1)
        return np.asarray(np.maximum(most - least + 1, 0))

    def first(self, position: int) -> int:
        """Return the first window that begins at a position or later; `output` if there is none."""
        return min(max(-(-(position + self.begin) // self.stride), 0), self.output)

    def met(self, tap: int, among: slice | None = None) -> tuple[slice, slice]:
        """Return the windows, of those `among`, whose kernel element `tap` is inside the line, and
        the positions that it reads."""
        offset, of = tap * self.dilation, slice(0, self.output) if among is None else among
        low = min(max(self.first(-offset), of.start), of.stop)
        high = min(max(self.first(self.size - offset), low), of.stop)
        if high == low:
            return slice(low, low), slice(0, 0)
        start = low * self.stride - self.begin + offset
        last = start + (high - low - 1) * self.stride
        return slice(low, high), slice(start, last + 1, self.stride)

    @property
    def taps(self) -> range:
        """The kernel elements that may be inside the line for some window."""
        reach = self.begin - (self.output - 1) * self.stride
        least = max(0, -(-reach // self.dilation))
        return range(least, min(self.kernel, (self.size - 1 + self.begin) // self.dilation + 1))

    def inside(self, window: int) -> slice:
        """Return the positions inside the line that a window reads."""
        first = window * self.stride - self.begin
        least = max(0, -(first // self.dilation))
        most = min(self.kernel - 1, (self.size - 1 - first) // self.dilation)
        if most < least:
            return slice(0, 0)
        start = first + least * self.dilation
        return slice(start, first + most * self.dilation + 1, self.dilation)


def lines_of(windows: Windows) -> tuple[WindowLine, ...]:
    """Return the windows of each axis."""
    axes = zip(
        windows.size, windows.kernel, windows.strides, windows.dilations, windows.begin,
        windows.output, strict=True,
    )  # fmt: skip
    return tuple(WindowLine(*axis) for axis in axes)


def sees_everywhere(attributes: Attributes, size: Shape) -> bool:
    """Return whether no window of a pool over a spatial shape is in the padding wholly."""
    return all(line.count_inside().all() for line in lines_of(pool_windows(attributes, size)))


class Sliding:
    """Reduction of the windows of planes by a ufunc, axis by axis, a few planes at a time.

    Long windows are reduced by a loop over kernel elements or over windows, whichever are fewer.
    """

    def __init__(
        self, ufunc: np.ufunc, identity: float, windows: Windows, planes: int, dtype: np.dtype[Any]
    ) -> None:
        self.ufunc, self.identity = ufunc, identity
        self.lines = lines_of(windows)
        self.at_once = planes_at_once(windows, planes, dtype.itemsize)
        self._between = [
            workspace((self.at_once, *shape), dtype) for shape in shapes_between(windows)
        ]
        #: Results of long windows: sums of floats in float64, which are rounded once.
        self._total: Array | None = None
        if is_summed_wide(ufunc, windows, dtype):
            size = self.at_once * largest_plane(windows)
            self._total = workspace(size, np.dtype(np.float64))

    def steps(self, source: Array, out: Array) -> list[Thunk]:
        """Return steps for out[n, *i] = ufunc over window i of plane source[n]."""
        active = [axis for axis, line in enumerate(self.lines) if not line.is_identity]
        if not active:
            return [partial(np.copyto, out, source)]
        steps: list[Thunk] = []
        for part in slice_range(len(out), self.at_once):
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
        """Reduce one axis of arrays [outer, axis, inner]."""
        if line.is_short:
            return self._by_taps(line, source, target)
        return [partial(self._by_loop, line, source, target)]

    def _by_taps(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        taps = list(taps_of(line))
        if not taps:
            return self._nothing(target, slice(0, line.output))
        if line.is_same_length and source.shape[2] == 1 and min(source.shape[:2]) > 1:
            return self._by_rows(line, source, target)
        # First the kernel element that most windows have: often no window is left to fill.
        first = max(range(len(taps)), key=lambda i: taps[i][0].stop - taps[i][0].start)
        which, positions = taps.pop(first)
        steps: list[Thunk] = [partial(np.copyto, target[:, which], source[:, positions])]
        for rest in (slice(0, which.start), slice(which.stop, line.output)):
            steps += self._nothing(target, rest)
        for which, positions in taps:
            seen, there = source[:, positions], target[:, which]
            steps.append(partial(self.ufunc, there, seen, out=there))
        return steps

    def _by_rows(self, line: WindowLine, source: Array, target: Array) -> list[Thunk]:
        """Reduce all rows as one long row, several times as fast as row by row; then compute the
        windows at the ends of rows, which read the neighbouring row, again."""
        seen, results = source.reshape(-1), target.reshape(-1)
        steps: list[Thunk] = []
        for tap in range(line.kernel):
            offset = tap * line.dilation - line.begin
            before, behind = max(0, -offset), max(0, offset)
            there = results[before : results.size - behind]
            read = seen[behind : seen.size - before]
            again = partial(self.ufunc, there, read, out=there)
            steps.append(again if tap else partial(np.copyto, there, read))
        for windows in (range(line.left), range(line.right, line.output)[::-1]):
            done = None
            for window in windows:
                steps += self._window(line, source, target, window, done)
                done = window
        return steps

    def _window(
        self, line: WindowLine, source: Array, target: Array, window: int, done: int | None
    ) -> list[Thunk]:
        """Compute one window of every row, from its neighbour if that is `done` and has one element
        less."""
        rows, into = source[:, :, 0], target[:, window, 0]
        first = window - line.begin
        taps = range(first, first + line.kernel * line.dilation, line.dilation)
        positions = [position for position in taps if 0 <= position < line.size]
        if done is None or line.dilation > 1:
            start, others = rows[:, positions[0]], positions[1:]
        else:
            start = target[:, done, 0]
            others = positions[:1] if done > window else [p for p in taps[-1:] if p < line.size]
        steps: list[Thunk] = [partial(np.copyto, into, start)]
        return steps + [partial(self.ufunc, into, rows[:, p], out=into) for p in others]

    def _nothing(self, target: Array, which: slice) -> list[Thunk]:
        there = target[:, which]
        return [fill_step(there, self.identity)] if there.size else []

    def _by_loop(self, line: WindowLine, source: Array, target: Array) -> None:
        """Reduce windows of any length."""
        total = target
        if self._total is not None:
            total = self._total[: target.size].reshape(target.shape)
        total.fill(self.identity)
        if len(line.taps) <= line.output:
            for which, positions in taps_of(line):
                there = total[:, which]
                self.ufunc(there, source[:, positions], out=there)
        else:
            for window in range(line.output):
                seen = source[:, line.inside(window)]
                if seen.size:
                    self.ufunc.reduce(seen, 1, total.dtype, total[:, window])
        if total is not target:
            np.copyto(target, total, "unsafe")


def shapes_between(windows: Windows) -> list[Shape]:
    """Return the shapes of a plane between the axes that change it."""
    shapes, shape = [], list(windows.size)
    for axis, line in enumerate(lines_of(windows)):
        if not line.is_identity:
            shape[axis] = line.output
            shapes.append(tuple(shape))
    return shapes[:-1]


def largest_plane(windows: Windows) -> int:
    """Return the most elements of a plane before, between or after the reduction of its axes."""
    shapes = (windows.size, *shapes_between(windows), windows.output)
    return max(1, *(math.prod(shape) for shape in shapes))


def planes_at_once(windows: Windows, planes: int, itemsize: int) -> int:
    """Return how many planes are reduced together."""
    return max(1, min(planes, PLANES_NBYTES // (largest_plane(windows) * itemsize)))


def is_summed_wide(ufunc: np.ufunc, windows: Windows, dtype: np.dtype[Any]) -> bool:
    """Return whether `Sliding` sums long windows of floats in float64."""
    is_short = all(line.is_short for line in lines_of(windows))
    return ufunc is np.add and dtype == np.float32 and not is_short


def taps_of(line: WindowLine) -> Iterator[tuple[slice, slice]]:
    """Yield for each kernel element that is inside for some window these windows and positions."""
    for tap in line.taps:
        which, positions = line.met(tap)
        if which.stop > which.start:
            yield which, positions

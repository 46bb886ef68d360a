"""Sliding windows: how kernels, strides, dilations and paddings lay over a spatial shape.

Shared by convolutions and pools. Source: the padding and output-shape equations of ONNX's Conv
and pooling operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stitch.ops.batching import BatchingContext, in_first_axis
from stitch.ops.definition import Attribute, Thunk, declared
from stitch.ops.inference import Attributes, InferenceContext, Shape, int_of, ints_of, string_of
from stitch.ops.steps import fill_step, stretches, workspace
from stitch.program import Array

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_INTS = Attribute("ints")
WINDOW_ATTRIBUTES = declared(
    auto_pad="NOTSET", dilations=_INTS, kernel_shape=_INTS, pads=_INTS, strides=_INTS
)
CONVOLUTION_ATTRIBUTES = declared(**WINDOW_ATTRIBUTES, group=1)
#: Where there are no weights whose shape says it.
KERNEL_SHAPE = {"kernel_shape": Attribute("ints", required=True)}
POOL_ATTRIBUTES = declared(**{**WINDOW_ATTRIBUTES, **KERNEL_SHAPE}, ceil_mode=0)


@dataclass(frozen=True, slots=True)
class Windows:
    """One tuple entry per spatial axis; `overhang` is what the last window reaches beyond `end`."""

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
        """The padded positions along a spatial axis that one kernel element meets."""
        count, stride = self.output[axis], self.strides[axis]
        first = index * self.dilations[axis]
        return slice(first, first + (count - 1) * stride + 1, stride) if count else slice(0, 0)

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """For each kernel element, in order, the padded positions that it meets."""
        for place in itertools.product(*map(range, self.kernel)):
            yield tuple(self.tap(axis, index) for axis, index in enumerate(place))


def _auto_pad(attributes: Attributes) -> str:
    return string_of(attributes, "auto_pad") if "auto_pad" in attributes else AUTO_PADS[0]


def check_window_attributes(context: InferenceContext, size: Shape, kernel: Shape) -> None:
    """Lists as long as the spatial rank, in range, and either `pads` or `auto_pad`."""
    ones = (1,) * len(size)
    if context.ints_of("kernel_shape") is not None:
        context.spatial_ints("kernel_shape", ones)
    context.spatial_ints("strides", ones)
    context.spatial_ints("dilations", ones)
    context.spatial_ints("pads", ones + ones, least=0)
    auto_pad = _auto_pad(context.attributes)
    if auto_pad not in AUTO_PADS:
        raise context.fail("auto_pad has no such mode", expected=", ".join(AUTO_PADS), got=auto_pad)
    if auto_pad != "NOTSET" and any(context.ints_of("pads") or ()):
        raise context.fail("pads and auto_pad exclude each other", got=f"auto_pad={auto_pad}")


def windows_of(attributes: Attributes, size: Shape, kernel: Shape, ceil: bool = False) -> Windows:
    """The windows over a spatial shape, for checked attributes; an output may come out negative."""
    rank = len(size)
    strides = ints_of(attributes, "strides") or (1,) * rank
    dilations = ints_of(attributes, "dilations") or (1,) * rank
    pads = ints_of(attributes, "pads") or (0,) * (2 * rank)
    auto_pad = _auto_pad(attributes)
    begins, ends, overhangs, outputs = [], [], [], []
    for i in range(rank):
        span = dilations[i] * (kernel[i] - 1) + 1
        begin, end = pads[i], pads[rank + i]
        if auto_pad.startswith("SAME"):
            output = -(-size[i] // strides[i])
            total = max((output - 1) * strides[i] + span - size[i], 0)
            small = total // 2
            begin, end = (small, total - small) if auto_pad == "SAME_UPPER" else (
                total - small, small,
            )  # fmt: skip
        else:
            room = size[i] + begin + end - span
            output = (-(-room // strides[i]) if ceil else room // strides[i]) + 1
            if ceil and (output - 1) * strides[i] >= size[i] + begin:
                output -= 1  # a window must not start in the right padding
        reached = (output - 1) * strides[i] + span
        begins.append(begin)
        ends.append(end)
        overhangs.append(max(0, reached - begin - size[i] - end))
        outputs.append(output)
    padding = (tuple(begins), tuple(ends), tuple(overhangs))
    return Windows(size, kernel, strides, dilations, *padding, tuple(outputs))


def pool_windows(attributes: Attributes, size: Shape) -> Windows:
    """The windows of a pool, whose kernel and rounding are attributes too."""
    kernel = ints_of(attributes, "kernel_shape") or ()
    return windows_of(attributes, size, kernel, bool(int_of(attributes, "ceil_mode")))


def check_pads(context: InferenceContext, kernel: Shape) -> None:
    """Refuse pads of a pool that are as long as its kernel, as ONNX Runtime and PyTorch do: windows
    would pool nothing, and few bytes of a file would ask for any number of them."""
    pads = context.ints_of("pads") or ()
    if any(pad >= length for pad, length in zip(pads, kernel * 2, strict=False)):
        raise context.fail(
            f"the pads of {context.op} are as long as its kernel",
            expected=f"each less than the kernel's {list(kernel)}",
            got=f"pads {list(pads)}",
        )


def transposed_windows(attributes: Attributes, size: Shape, kernel: Shape) -> Windows:
    """The windows that a ConvTranspose spreads over; `size` is the output, `output` the input."""
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
        # Where the wanted shape is larger than what the windows reach, the end stays zero.
        ends.append(max(full - begin - length, 0))
        result.append(length)
    padding = (tuple(begins), tuple(ends), zeros)
    return Windows(tuple(result), kernel, strides, dilations, *padding, tuple(size))


def turned_windows(windows: Windows) -> Windows | None:
    """The windows of the convolution that a ConvTranspose with strides of 1 is, by weights whose
    channels are exchanged and whose kernels are reversed; None where it is none."""
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
    """Every window as a view: (batch, channels, *kernel, *output)."""
    spatial: Sequence[int] = padded.strides[2:]
    # What is met once only has no next one, however far that would be.
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


# Batching (examples become samples, or groups if the weights vary) --------------------------------

#: Of operands that all have samples in front, or of one.
by_sample = in_first_axis()
_with_weights = in_first_axis(1, 2)


def _batch_conv(c: BatchingContext, bias: Any, weights_axis: int) -> Any:
    """Convolve with weights that vary: the channels of each example form one group or more.

    `weights_axis` is where filters are; an image that is shared needs no groups for that.
    """
    group = c.int_of("group")
    if not c.varies(0) and group == 1:
        (result,) = c.again(c.operands[0], c.folded(1, weights_axis), bias)
    else:
        (result,) = c.again(c.folded(0, 1), c.folded(1), bias, group=group * c.batch_size)
    return c.split(result, 1)


def _conv(c: BatchingContext, weights_axis: int) -> Sequence[Any] | None:
    if c.varies(1):
        return (_batch_conv(c, c.folded(2), weights_axis),)
    if not c.varies(2):
        return _with_weights(c)
    data_type = c.type_of(0).data_type
    image = c.folded(0) if c.varies(0) else c.operands[0]
    (result,) = c.again(c.wide(image), c.wide(c.operands[1]))
    if c.varies(0):
        result = c.split(result)
    bias = c.shaped(c.operands[2], (c.batch_size, 1, *c.shape(2), *(1,) * (c.rank() - 2)))
    return (c.in_type(c.apply("Add", result, c.wide(bias)), data_type),)


def conv(c: BatchingContext) -> Sequence[Any] | None:
    return _conv(c, 0)


def conv_transpose(c: BatchingContext) -> Sequence[Any] | None:
    """Its weights have input channels first, filters second."""
    return _conv(c, 1)


def conv_weight_gradient(c: BatchingContext) -> Sequence[Any]:
    """Fold the batch into groups: no sum crosses examples."""
    group = c.int_of("group") * c.batch_size
    (result,) = c.again(c.folded(0, 1), c.folded(1, 1), group=group)
    return (c.split(result),)


def max_pool(c: BatchingContext) -> Sequence[Any]:
    """Places are those in the flat operand, or -1 where there is none."""
    results = [c.split(result) for result in c.again(c.folded(0))]
    if len(results) == 1:
        return results
    before = c.example_indices(c.rank(), math.prod(c.shape()))
    none = c.apply("Less", results[1], 0)
    own = c.apply("Sub", results[1], before)
    return results[0], c.apply("Where", none, results[1], own)


def col2im(c: BatchingContext) -> Sequence[Any]:
    return (c.split(c.with_first(c.folded(0))[0]),)


def max_unpool(c: BatchingContext) -> Sequence[Any]:
    """Places that are operands count in the shape that the pool was given."""
    kernel = c.ints_of("kernel_shape") or ()
    strides = c.ints_of("strides") or (1,) * len(kernel)
    pads = c.ints_of("pads") or (0,) * (2 * len(kernel))
    size = [
        (s - 1) * strides[i] - pads[i] - pads[len(kernel) + i] + kernel[i]
        for i, s in enumerate(c.shape()[2:])
    ]
    count = math.prod((*c.shape()[:2], *size))
    # A position beyond one example must not fall into the next.
    places, nowhere = c.broadcast(1), c.constant(np.array(-1))
    inside = c.apply("And", c.apply("Less", places, count), c.apply("GreaterOrEqual", places, 0))
    own = c.apply("Add", places, c.example_indices(c.rank(), count))
    places = c.apply("Where", inside, own, nowhere)
    shape = c.ints_at(2)
    wanted = [] if shape is None else [[shape[0] * c.batch_size, *shape[1:]]]
    return (c.split(c.again(c.folded(0), c.merged(places), *wanted)[0]),)


# Sliding-window reductions ------------------------------------------------------------------------

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

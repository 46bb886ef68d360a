"""Sliding windows: how kernels, strides, dilations and paddings lay over a spatial shape.

Shared by convolutions and pools. Source: the padding and output-shape equations of ONNX's Conv
and pooling operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numpy.lib.stride_tricks import as_strided

from stitch.ops.attributes import Attributes, int_of, ints_of, string_of
from stitch.ops.definition import Attribute, declared
from stitch.ops.inference import InferenceContext, Shape
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

"""PyTorch's convolutions, transposed ones, and the gradients of weights, which oneDNN computes.

Comes in: shapes and attributes, or tensors over operands and results. Goes out: how ATen is told
where windows lie, with the work that it has (None: it cannot be told), and steps. Must not know:
prices, programs, who chooses.

oneDNN keeps channels in blocks as wide as a vector: it arranges what comes in, and fills up blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stitch.ops import Thunk, transposed_windows, windows_of

Shape = tuple[int, ...]
_ATEN = torch.ops.aten
CONVOLUTIONS = frozenset({("", "Conv"), ("", "ConvTranspose"), ("stitch", "ConvWeightGradient")})
#: Channels of a block.
BLOCK = 16
#: Images of so few channels are read as they are.
FEW_CHANNELS = 3
#: As many samples are handled at a time as have images of this many bytes (at least one): what is
#: arranged lies in memory that the system is asked for, and given back, call by call, where there
#: is more of it. A gradient of 64 samples of 64x16x16 took 15 ms whole, 10 in pieces of 4 MiB; one
#: of 64 of 16x14x14, 2.3 MiB with its results, 2.0 ms whole, 1.3 in two pieces.
PIECE_NBYTES = 1 << 21
#: The most axes of places that ATen's convolutions have.
MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class WindowsOfAten:
    """Where windows lie, in ATen's words; `filled`: how many times as much full blocks compute."""

    strides: Shape
    padding: Shape
    dilations: Shape
    extra: Shape
    groups: int
    filled: float


def laid(
    op: str, operands: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """How a convolution's windows lie; None where ATen has no words for it."""
    x, other = operands[:2]
    if not 1 <= len(x) - 2 <= MOST_AXES or 0 in (*x, *other, *result):
        return None
    if op == "ConvTranspose":
        return _spread(x, other[2:], result, attributes)
    if op == "Conv":
        return _seen(x, other[2:], result, attributes)
    return _seen(x, result[2:], other, attributes)


def _seen(
    x: Shape, kernel: Shape, seen: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """Of an image in which windows are seen, or were."""
    windows = windows_of(attributes, x[2:], kernel)
    if windows.begin != windows.end or windows.output != seen[2:]:
        return None
    groups, filled = int(attributes.get("group", 1)), 1.0
    if groups == 1:
        filled = _filled(seen[1]) * (1.0 if x[1] <= FEW_CHANNELS else _filled(x[1]))
    extra = (0,) * len(kernel)
    return WindowsOfAten(windows.strides, windows.begin, windows.dilations, extra, groups, filled)


def _spread(
    x: Shape, kernel: Shape, result: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """Of an image that windows are spread over; what they do not reach is at its end."""
    windows = transposed_windows(attributes, x[2:], kernel)
    strides, dilations = windows.strides, windows.dilations
    extra = tuple(
        size - (places - 1) * stride + 2 * begin - dilation * (length - 1) - 1
        for size, places, stride, begin, dilation, length in zip(
            result[2:], x[2:], strides, windows.begin, dilations, kernel, strict=True
        )
    )
    most = map(max, strides, dilations)
    if not all(0 <= more < bound for more, bound in zip(extra, most, strict=True)):
        return None
    groups = int(attributes.get("group", 1))
    filled = _filled(x[1]) * _filled(result[1]) if groups == 1 else 1.0
    return WindowsOfAten(strides, windows.begin, dilations, extra, groups, filled)


def _filled(channels: int) -> float:
    return -(-channels // BLOCK) * BLOCK / channels


def convolution(
    op: str, x: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    """The steps of one, some samples at a time; None where ATen cannot be told how windows lie."""
    first, second, place = *x[:2], results[0]
    how = laid(op, [tuple(first.shape), tuple(second.shape)], tuple(place.shape), attributes)
    if how is None:
        return None
    places = how.strides, how.padding, how.dilations
    if op == "ConvWeightGradient":
        at_once = _at_once(first, second)
        # Of the weights only the shape is looked at: their gradient's place has it.
        rest = place, None, *places, False, how.extra, how.groups, [False, True, False]
        pairs = zip(first.split(at_once), second.split(at_once), strict=True)
        return [
            partial(
                _add_onto if index else _write_into, place, _weight_gradient, seen, image, *rest
            )
            for index, (image, seen) in enumerate(pairs)
        ]
    at_once, bias, is_transposed = _at_once(first, place), (*x, None)[2], op == "ConvTranspose"
    kernel = second, bias, *places, is_transposed, how.extra, how.groups
    pairs = zip(first.split(at_once), place.split(at_once), strict=True)
    return [partial(_write_into, made, _ATEN.convolution, image, *kernel) for image, made in pairs]


def _at_once(*images: Any) -> int:
    """Samples of a piece: about as many in each."""
    samples, nbytes = len(images[0]), sum(int(image.nbytes) for image in images)
    pieces = -(-nbytes // PIECE_NBYTES)
    return -(-samples // pieces)


def _weight_gradient(*operands: Any) -> Any:
    return _ATEN.convolution_backward(*operands)[1]


def _write_into(place: Any, function: Callable[..., Any], *operands: Any) -> None:
    """The result of a function that has no form which writes into a place."""
    place.copy_(function(*operands))


def _add_onto(place: Any, function: Callable[..., Any], *operands: Any) -> None:
    place.add_(function(*operands))

"""Stitch's own operators of backward passes, written in ONNX's.

Comes in: an operation and the writer of its model. Goes out: its expansion, which is also what the
operator means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stitch.ops.gelu_gradient import CUBE, HEIGHT, RATE
from stitch.ops.windows import windows_of
from stitch.program import AttributeValue, Operation
from stitch.runtime.executors.onnx_writer import FormWriter, value_name

Attributes = Mapping[str, AttributeValue]
#: Elements of a block: with its intermediate results it stays in a cache of a megabyte.
_MOST_PER_BLOCK = 1 << 15


def _ints(writer: FormWriter, *numbers: int) -> str:
    return writer.constant(np.array(numbers, np.int64))


def conv_weight_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Pad, a slice per kernel element, one product per sample and group, and their sum."""
    image, seen = (writer.type_of(v).shape for v in operation.inputs)
    made = writer.type_of(operation.outputs[0]).shape
    windows = windows_of(attributes, image[2:], made[2:])
    rank, group = len(windows.kernel), image[1] // made[1]
    data = writer.operand(operation.inputs[0])
    if windows.needs_padding:
        ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
        data = writer.node("Pad", [data, _ints(writer, 0, 0, *windows.begin, 0, 0, *ends)])
    axes, strides = _ints(writer, *range(2, rank + 2)), _ints(writer, *windows.strides)
    taps = []
    for tap in np.ndindex(*windows.kernel):
        starts = [int(t) * d for t, d in zip(tap, windows.dilations, strict=True)]
        ends = [
            start + (places - 1) * stride + 1
            for start, places, stride in zip(starts, seen[2:], windows.strides, strict=True)
        ]
        bounds = [_ints(writer, *starts), _ints(writer, *ends), axes, strides]
        taps.append(writer.node("Slice", [data, *bounds]))
    places, count = math.prod(seen[2:]), len(taps)
    lead = [image[0], group, image[1] // group]
    # [N, group, channels, taps, places], places last, then exchanged with all before.
    apart = _ints(writer, *lead, 1, places)
    parts = [writer.node("Reshape", [tap, apart]) for tap in taps]
    joined = parts[0] if count == 1 else writer.node("Concat", parts, axis=3)
    flat = writer.node("Reshape", [joined, _ints(writer, *lead[:2], lead[2] * count, places)])
    turned = writer.node("Transpose", [flat], perm=[0, 1, 3, 2])
    rows = _ints(writer, seen[0], group, seen[1] // group, places)
    gradient = writer.node("Reshape", [writer.operand(operation.inputs[1]), rows])
    products = writer.node("MatMul", [gradient, turned])
    total = writer.node("ReduceSum", [products, _ints(writer, 0)], keepdims=0)
    shape = _ints(writer, *made)
    writer.node("Reshape", [total, shape], value_name(operation.outputs[0]))
    return True


def max_pool_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """The pool's own indices say where each gradient goes."""
    shape = writer.type_of(operation.inputs[1]).shape
    kind = writer.type_of(operation.outputs[0]).data_type
    gradient, x = (writer.operand(v) for v in operation.inputs[:2])
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
    indices = writer.second("MaxPool", [x], **written)
    every = _ints(writer, -1)
    places, given = (writer.node("Reshape", [v, every]) for v in (indices, gradient))
    zero = writer.constant(np.zeros((), kind.compute_dtype))
    table = writer.node("Expand", [zero, _ints(writer, math.prod(shape))])
    made = writer.node("ScatterElements", [table, places, given], axis=0, reduction="add")
    writer.node("Reshape", [made, _ints(writer, *shape)], value_name(operation.outputs[0]))
    return True


def gelu_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """The slope of x share(x) is share(x) + x share'(x); over blocks where memory would be slow."""
    write = _tanh_product if attributes["approximate"] == "tanh" else _exact_product
    gradient, x = (writer.operand(v) for v in operation.inputs)
    kind, out = writer.type_of(operation.outputs[0]), value_name(operation.outputs[0])
    dtype = kind.data_type.compute_dtype
    count = _block_count(math.prod(kind.shape))
    if count == 1:
        write(writer, gradient, x, dtype, out)
        return True
    cut = _ints(writer, count, -1)
    blocks = [writer.node("Reshape", [v, cut]) for v in (gradient, x)]
    made = writer.blockwise(
        blocks, (math.prod(kind.shape) // count,), dtype,
        lambda rows, result: write(writer, rows[0], rows[1], dtype, result),
    )  # fmt: skip
    writer.node("Reshape", [made, _ints(writer, *kind.shape)], out)
    return True


def _block_count(size: int) -> int:
    """Into how many equal blocks a chain of passes is cut; 1 where that would not pay.

    Over a million float32 a pass takes 300 us and over blocks 150, and each block takes 10 us more:
    with ten passes 3.7 ms against 2.1 for blocks of 2^15 and 2^16, and 2.5 for blocks of 2^13.
    """
    if size < 2 * _MOST_PER_BLOCK:
        return 1
    least = -(-size // _MOST_PER_BLOCK)
    return next((n for n in range(least, 4 * least + 1) if size % n == 0), 1)


def _exact_product(
    writer: FormWriter, gradient: str, x: str, dtype: np.dtype[Any], out: str
) -> None:
    """g ((1 + erf(x / sqrt 2)) / 2 + x exp(ln HEIGHT - x^2 / 2))."""
    inner = writer.node("Mul", [x, _number(writer, math.sqrt(0.5), dtype)])
    share = _half(writer, writer.node("Erf", [inner]), dtype)
    square = writer.node("Mul", [inner, inner])
    # The difference turns the sign and brings the height in, for one pass in place of two.
    exponent = writer.node("Sub", [_number(writer, math.log(HEIGHT), dtype), square])
    rest = writer.node("Mul", [writer.node("Exp", [exponent]), x])
    writer.node("Mul", [writer.node("Add", [share, rest]), gradient], out)


def _tanh_product(
    writer: FormWriter, gradient: str, x: str, dtype: np.dtype[Any], out: str
) -> None:
    """g ((1 + t) / 2 + (1 - t^2) inner' x / 2): t = tanh(inner)."""

    def line(slope: float, offset: float) -> str:
        scaled = writer.node("Mul", [square, _number(writer, slope, dtype)])
        return writer.node("Add", [scaled, _number(writer, offset, dtype)])

    square = writer.node("Mul", [x, x])
    inner = writer.node("Mul", [line(CUBE * RATE, RATE), x])
    tangent = writer.node("Tanh", [inner])
    share = _half(writer, tangent, dtype)
    flat = writer.node("Sub", [_number(writer, 1.0, dtype), writer.node("Mul", [tangent, tangent])])
    steep = writer.node("Mul", [flat, line(1.5 * CUBE * RATE, 0.5 * RATE)])
    slope = writer.node("Add", [share, writer.node("Mul", [steep, x])])
    writer.node("Mul", [slope, gradient], out)


def _half(writer: FormWriter, value: str, dtype: np.dtype[Any]) -> str:
    """(1 + value) / 2 of a value in [-1, 1]: a HardSigmoid is one pass, and clips nothing there."""
    if dtype == np.float32:
        return writer.node("HardSigmoid", [value], alpha=0.5, beta=0.5)
    half = _number(writer, 0.5, dtype)
    return writer.node("Add", [writer.node("Mul", [value, half]), half])


def _number(writer: FormWriter, value: float, dtype: np.dtype[Any]) -> str:
    return writer.constant(np.array(value, dtype))

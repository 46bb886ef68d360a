"""Stitch's own operators of backward passes, written in ONNX's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.errors import CompileError
from stitch.ops import GELU_CUBE, GELU_HEIGHT, GELU_RATE, float_of, int_of, windows_of
from stitch.program import ABSENT, Operation, ValueType
from stitch.runtime.executors.element_runs import chunk_count
from stitch.runtime.executors.onnx import window_expansion
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter, value_name

#: The most kernel elements that are written out.
MOST_TAPS = 1024


def conv_weight_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Pad, a slice per kernel element, one product per sample and group, and their sum."""
    image, seen = (writer.type_of(v).shape for v in operation.inputs)
    result = writer.type_of(operation.outputs[0]).shape
    windows = windows_of(attributes, image[2:], result[2:])
    if math.prod(windows.kernel) > MOST_TAPS:
        raise CompileError(f"more than {MOST_TAPS} kernel elements, of which each is a node")
    rank, group = len(windows.kernel), image[1] // result[1]
    data = writer.operand(operation.inputs[0])
    if windows.needs_padding:
        ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
        data = writer.node("Pad", [data, writer.ints(0, 0, *windows.begin, 0, 0, *ends)])
    axes, strides = writer.ints(*range(2, rank + 2)), writer.ints(*windows.strides)
    taps = []
    for tap in np.ndindex(*windows.kernel):
        starts = [int(t) * d for t, d in zip(tap, windows.dilations, strict=True)]
        ends = [
            start + (places - 1) * stride + 1
            for start, places, stride in zip(starts, seen[2:], windows.strides, strict=True)
        ]
        bounds = [writer.ints(*starts), writer.ints(*ends), axes, strides]
        taps.append(writer.node("Slice", [data, *bounds]))
    places, count = math.prod(seen[2:]), len(taps)
    lead = [image[0], group, image[1] // group]
    # [N, group, channels, taps, places], places last, then exchanged with all before.
    apart = writer.ints(*lead, 1, places)
    parts = [writer.node("Reshape", [tap, apart]) for tap in taps]
    joined = parts[0] if count == 1 else writer.node("Concat", parts, axis=3)
    flat = writer.node("Reshape", [joined, writer.ints(*lead[:2], lead[2] * count, places)])
    turned = writer.node("Transpose", [flat], perm=[0, 1, 3, 2])
    rows = writer.ints(seen[0], group, seen[1] // group, places)
    gradient = writer.node("Reshape", [writer.operand(operation.inputs[1]), rows])
    products = writer.node("MatMul", [gradient, turned])
    total = writer.node("ReduceSum", [products, writer.ints(0)], keepdims=0)
    return writer.give(operation, "Reshape", [total, writer.ints(*result)])


def max_pool_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """The pool's own indices say where each gradient goes."""
    shape = writer.type_of(operation.inputs[1]).shape
    kind = writer.type_of(operation.outputs[0]).data_type
    gradient, x = (writer.operand(v) for v in operation.inputs[:2])
    window_expansion.check_kernel(writer.type_of(operation.inputs[1]), attributes)
    if not window_expansion.all_see_something(attributes, shape[2:]):
        raise CompileError("a window of padding alone has no place of its maximum")
    laid = window_expansion.laid_out(writer, operation, attributes)
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in laid.items()}
    indices = writer.second("MaxPool", [x], **written)
    every = writer.ints(-1)
    places, given = (writer.node("Reshape", [v, every]) for v in (indices, gradient))
    zero = writer.constant(np.zeros((), kind.compute_dtype))
    table = writer.node("Expand", [zero, writer.ints(math.prod(shape))])
    scattered = writer.node("ScatterElements", [table, places, given], axis=0, reduction="add")
    return writer.give(operation, "Reshape", [scattered, writer.ints(*shape)])


def gelu_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """The slope of x share(x) is share(x) + x share'(x); over chunks where memory would be slow."""
    product = _tanh_product if attributes["approximate"] == "tanh" else _exact_product
    result = operation.outputs[0]
    kind = writer.type_of(result)
    count = chunk_count(math.prod(kind.shape))
    if count == 1:
        gradient, x = map(writer.operand, operation.inputs)
        product(writer, gradient, x, kind, value_name(result))
        return True

    def write(rows: Sequence[str]) -> Sequence[str]:
        return [product(writer, rows[0], rows[1], kind)]

    writer.over_chunks(operation.inputs, [result], count, write)
    return True


def _exact_product(
    writer: FormWriter, gradient: str, x: str, kind: ValueType, out: str | None = None
) -> str:
    """g ((1 + erf(x / sqrt 2)) / 2 + x exp(ln GELU_HEIGHT - x^2 / 2))."""
    inner = writer.node("Mul", [x, _number(writer, math.sqrt(0.5), kind)])
    share = _half(writer, writer.node("Erf", [inner]), kind)
    square = writer.node("Mul", [inner, inner])
    # The difference turns the sign and brings the height in, for one pass in place of two.
    exponent = writer.node("Sub", [_number(writer, math.log(GELU_HEIGHT), kind), square])
    rest = writer.node("Mul", [writer.node("Exp", [exponent]), x])
    return writer.node("Mul", [writer.node("Add", [share, rest]), gradient], out)


def _tanh_product(
    writer: FormWriter, gradient: str, x: str, kind: ValueType, out: str | None = None
) -> str:
    """g ((1 + t) / 2 + (1 - t^2) inner' x / 2): t = tanh(inner)."""

    def line(slope: float, offset: float) -> str:
        scaled = writer.node("Mul", [square, _number(writer, slope, kind)])
        return writer.node("Add", [scaled, _number(writer, offset, kind)])

    square = writer.node("Mul", [x, x])
    inner = writer.node("Mul", [line(GELU_CUBE * GELU_RATE, GELU_RATE), x])
    tangent = writer.node("Tanh", [inner])
    share = _half(writer, tangent, kind)
    flat = writer.node("Sub", [_number(writer, 1.0, kind), writer.node("Mul", [tangent, tangent])])
    steep = writer.node("Mul", [flat, line(1.5 * GELU_CUBE * GELU_RATE, 0.5 * GELU_RATE)])
    slope = writer.node("Add", [share, writer.node("Mul", [steep, x])])
    return writer.node("Mul", [slope, gradient], out)


def _half(writer: FormWriter, value: str, kind: ValueType) -> str:
    """(1 + value) / 2."""
    half = _number(writer, 0.5, kind)
    return writer.node("Add", [writer.node("Mul", [value, half]), half])


def _number(writer: FormWriter, value: float, kind: ValueType) -> str:
    return writer.scalar(value, kind.data_type.compute_dtype.type)


def layer_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """dx = (h - mean(h) - c mean(h c) / deviation^2) / deviation with c = x - mean, h = dy scale.

    Sums over rows and over columns are products with a vector.
    """
    kind, weights = (writer.type_of(operation.inputs[i]) for i in (1, 4))
    width = math.prod(weights.shape)

    def shaped(index: int, *shape: int) -> str:
        operand = writer.operand(operation.inputs[index])
        return writer.node("Reshape", [operand, writer.ints(*shape)])

    def given(output: int, name: str) -> None:
        value = operation.outputs[output]
        if value != ABSENT:
            shape = writer.ints(*writer.type_of(value).shape)
            writer.node("Reshape", [name, shape], value_name(value))

    gradient, x = (shaped(i, -1, width) for i in (0, 1))
    mean, inverse = (shaped(i, -1, 1) for i in (2, 3))
    centred = writer.node("Sub", [x, mean])
    product = writer.node("Mul", [gradient, centred])
    row = writer.node("Reshape", [inverse, writer.ints(1, -1)])
    share = writer.node("Mul", [shaped(4, width, 1), _number(writer, 1.0 / width, kind)])
    square = writer.node("Mul", [inverse, inverse])
    slant = writer.node("Mul", [writer.node("MatMul", [product, share]), square])
    inner = writer.node("Sub", [
        writer.node("Mul", [gradient, shaped(4, 1, width)]),
        writer.node("Mul", [centred, slant]),
    ])  # fmt: skip
    inner = writer.node("Sub", [inner, writer.node("MatMul", [gradient, share])])
    given(0, writer.node("Mul", [inner, inverse]))
    outputs = (*operation.outputs, ABSENT, ABSENT)
    if outputs[1] != ABSENT:
        given(1, writer.node("MatMul", [row, product]))
    if outputs[2] != ABSENT:
        given(2, writer.node("ReduceSum", [gradient, writer.ints(0)], keepdims=0))
    return True


def batch_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """dx = scale (dy - mean(dy) - c mean(dy c) / deviation^2) / deviation with c = x - mean, means
    over samples and places."""
    kind = writer.type_of(operation.inputs[1])
    (channels,) = writer.type_of(operation.inputs[2]).shape
    gradient, x = (
        writer.node("Reshape", [writer.operand(v), writer.ints(kind.shape[0], channels, -1)])
        for v in operation.inputs[:2]
    )
    wide, axes = writer.ints(1, channels, 1), writer.ints(0, 2)
    scale = writer.node("Reshape", [writer.operand(operation.inputs[2]), wide])

    def mean_of(name: str) -> str:
        return writer.node("ReduceMean", [name, axes], keepdims=1)

    def given(output: int, name: str) -> None:
        value = operation.outputs[output]
        if value != ABSENT:
            shape = writer.ints(*writer.type_of(value).shape)
            writer.node("Reshape", [name, shape], value_name(value))

    if len(operation.inputs) > 3:
        mean, variance = (
            writer.node("Reshape", [writer.operand(v), wide]) for v in operation.inputs[3:]
        )
        centred = writer.node("Sub", [x, mean])
    else:
        centred = writer.node("Sub", [x, mean_of(x)])
        variance = mean_of(writer.node("Mul", [centred, centred]))
    epsilon = _number(writer, float_of(attributes, "epsilon"), kind)
    deviation = writer.node("Sqrt", [writer.node("Add", [variance, epsilon])])
    inverse = writer.node("Reciprocal", [deviation])
    slope = mean_of(gradient)
    slant = writer.node("Mul", [mean_of(writer.node("Mul", [gradient, centred])), inverse])
    factor = writer.node("Mul", [inverse, scale])
    along = writer.node("Mul", [writer.node("Mul", [slant, inverse]), factor])
    inner = writer.node("Add", [
        writer.node("Mul", [centred, along]), writer.node("Mul", [slope, factor]),
    ])  # fmt: skip
    given(0, writer.node("Sub", [writer.node("Mul", [gradient, factor]), inner]))
    count = _number(writer, math.prod(kind.shape) / channels, kind)
    for output, total in zip(range(1, len(operation.outputs)), (slant, slope), strict=False):
        given(output, writer.node("Mul", [total, count]))
    return True


def softmax_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """y (dy - sum(dy y))."""
    gradient, y = map(writer.operand, operation.inputs)
    axis = writer.ints(int_of(attributes, "axis"))
    total = writer.node("ReduceSum", [writer.node("Mul", [gradient, y]), axis], keepdims=1)
    inner = writer.node("Sub", [gradient, total])
    return writer.give(operation, "Mul", [inner, y])

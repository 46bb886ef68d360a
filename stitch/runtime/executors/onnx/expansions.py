"""Write convolutions, pools and Stitch's gradient operators with nodes that ONNX Runtime has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stitch.errors import CompileError
from stitch.ops import (
    GELU_CUBE,
    GELU_HEIGHT,
    GELU_RATE,
    computed_nbytes,
    float_of,
    int_of,
    pool_windows,
    recurrent_activations,
    string_of,
    transposed_windows,
    windows_of,
)
from stitch.program import ABSENT, DataType, Operation, Program, ValueType
from stitch.runtime.executors.onnx.model_writer import (
    Attributes,
    ModelWriter,
    as_lists,
    value_name,
)
from stitch.runtime.executors.prices import chunk_count

# Windows

#: A MaxPool is written plane by plane for images above this size (a second-level cache), ...
PLANES_NBYTES = 1 << 21
#: ... with windows and strides up to these.
PLANES_KERNEL, PLANES_STRIDE = 3, 2
#: Windows up to this length may be longer than twice their image.
LONG_KERNEL = 1024


def pool(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write a pool with explicit pads: for `auto_pad` ONNX Runtime (1.32) ignores dilations, and
    crops if strides are longer than windows."""
    check_kernel(writer.type_of(operation.inputs[0]), attributes)
    size = writer.type_of(operation.inputs[0]).shape[2:]
    if operation.op == "MaxPool" and not covers_elements(attributes, size):
        raise CompileError("ONNX Runtime's MaxPool of padding alone is the lowest number, not -inf")
    explicit = with_explicit_pads(writer, operation, attributes)
    if _is_faster_by_planes(writer, operation, explicit):
        return _write_by_planes(writer, operation, explicit)
    if explicit is not attributes:
        writer.plain(operation, explicit)
    return explicit is not attributes


def _is_faster_by_planes(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Whether a MaxPool is faster plane by plane.

    ONNX Runtime converts the image to its blocked layout and back, two more passes through memory
    for a large image (8x64x56x56 by 2x2: 848 us, 447 by planes). After convolutions by constants
    the image is in that layout already.
    """
    image = writer.type_of(operation.inputs[0])
    kernel, strides = attributes["kernel_shape"], attributes.get("strides") or (1, 1)
    assert isinstance(kernel, tuple) and isinstance(strides, tuple)
    return (
        operation.op == "MaxPool"
        and len(operation.outputs) == 1
        and len(kernel) == 2
        and computed_nbytes(image) >= PLANES_NBYTES
        and max(map(int, kernel)) <= PLANES_KERNEL
        and max(map(int, strides)) <= PLANES_STRIDE
        and not _has_blocked_convolutions(writer.program)
    )


def _has_blocked_convolutions(program: Program) -> bool:
    """Whether ONNX Runtime itself computes convolutions in the blocked layout."""
    fixed = program.fixed_values()
    return any(o.op == "Conv" and o.inputs[1] in fixed for o in program.operations)


def _write_by_planes(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write each channel as an image, which fills no block of channels."""
    image, value = writer.type_of(operation.inputs[0]), operation.outputs[0]
    count = math.prod(image.shape[:2])
    planes = writer.node(
        "Reshape", [writer.operand(operation.inputs[0]), writer.ints(count, 1, *image.shape[2:])]
    )
    name = writer.output_name_as(value, (count, 1, *writer.type_of(value).shape[2:]))
    writer.restore_shape(value, writer.node("MaxPool", [planes], name, **as_lists(attributes)))
    return True


def with_explicit_pads(
    writer: ModelWriter, operation: Operation, attributes: Attributes, weights: int = 1
) -> Attributes:
    """Return the attributes of a pool or convolution with `pads` instead of `auto_pad`.

    Args:
        weights: The operand whose shape gives the kernel if no attribute does.
    """
    if not str(attributes.get("auto_pad", "")).startswith("SAME"):
        return attributes
    image = operation.inputs[operation.op == "MaxPoolGradient"]
    size = writer.type_of(image).shape[2:]
    kernel = attributes.get("kernel_shape") or writer.type_of(operation.inputs[weights]).shape[2:]
    assert isinstance(kernel, tuple)
    windows = windows_of(attributes, size, tuple(map(int, kernel)))
    pads = (*windows.begin, *windows.end)
    return {**attributes, "auto_pad": "NOTSET", "pads": pads}


def check_kernel(image: ValueType, attributes: Attributes) -> None:
    """Refuse windows far longer than the image: ONNX Runtime visits each of their elements."""
    kernel = attributes["kernel_shape"]
    assert isinstance(kernel, tuple)
    for length, size in zip(map(int, kernel), image.shape[2:], strict=True):
        if length > max(LONG_KERNEL, 2 * size):
            raise CompileError(f"a window of {length} elements over an image of {size}")


def covers_elements(attributes: Attributes, size: tuple[int, ...]) -> bool:
    """Whether each window of a pool covers at least one element that is not padding."""
    windows = pool_windows(attributes, size)
    for i, length in enumerate(windows.size):
        first = np.arange(windows.output[i]) * windows.strides[i] - windows.begin[i]
        # The first element of each window inside or after the image.
        tap = np.maximum(-(first // windows.dilations[i]), 0)
        is_inside = (tap < windows.kernel[i]) & (first + tap * windows.dilations[i] < length)
        if not is_inside.all():
            return False
    return True


def convolution(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write a convolution with explicit pads: ONNX Runtime refuses `auto_pad` with dilations."""
    if operation.op == "ConvInteger" and len(operation.inputs) > 3:
        point = operation.inputs[3]
        if point != ABSENT and math.prod(writer.type_of(point).shape) > 1:
            raise CompileError("ONNX Runtime takes one zero point for all weights")
    weights = 3 if operation.op == "QLinearConv" else 1
    explicit = with_explicit_pads(writer, operation, attributes, weights)
    if explicit is not attributes:
        writer.plain(operation, explicit)
    return explicit is not attributes


def transposed_convolution(
    writer: ModelWriter, operation: Operation, attributes: Attributes
) -> bool:
    """Write with explicit pads instead of `auto_pad` and `output_shape`, which ONNX Runtime
    computes differently if strides or dilations leave gaps."""
    kernel = writer.type_of(operation.inputs[1]).shape[2:]
    size = writer.type_of(operation.inputs[0]).shape[2:]
    windows = transposed_windows(attributes, size, kernel)
    rank = len(kernel)
    extra = attributes.get("output_padding") or (0,) * rank
    assert isinstance(extra, tuple)
    if any(int(extra[i]) >= windows.strides[i] for i in range(rank)):
        raise CompileError("ONNX Runtime's ConvTranspose takes output_padding below the strides")
    is_same = str(attributes.get("auto_pad", "")).startswith("SAME")
    if not is_same and "output_shape" not in attributes:
        return False
    reached = [
        windows.strides[i] * (size[i] - 1) + int(extra[i])
        + windows.dilations[i] * (kernel[i] - 1) + 1 - windows.begin[i] - windows.end[i]
        for i in range(rank)
    ]  # fmt: skip
    if reached != list(windows.size):
        raise CompileError(
            f"its windows reach {reached} elements, output_shape asks for {list(windows.size)}"
        )
    pads = (*windows.begin, *windows.end)
    others = {k: v for k, v in attributes.items() if k != "output_shape"}
    writer.plain(operation, {**others, "auto_pad": "NOTSET", "pads": pads})
    return True


def window_of_rows(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Gather rows by index; a negative index becomes one out of range, so that Gather fails."""
    data, base, strides = map(writer.operand, operation.inputs)
    count, rank = (writer.type_of(v).shape[0] for v in operation.inputs[::2])
    lengths = writer.type_of(operation.outputs[0]).shape[:rank]
    zero, end = writer.scalar(0, np.int64), writer.scalar(count, np.int64)
    # Clipped indices stay out of range, and their sums cannot overflow.
    rows = writer.node("Clip", [base, writer.scalar(-1, np.int64), end])
    steps = writer.node("Clip", [strides, writer.scalar(-count, np.int64), end])
    for axis, length in enumerate(lengths):
        places = np.arange(length, dtype=np.int64)
        along = writer.constant(places.reshape(-1, *(1,) * (rank - 1 - axis)))
        step = writer.node("Gather", [steps, writer.scalar(axis, np.int64)])
        rows = writer.node("Add", [rows, writer.node("Mul", [step, along])])
    inside = writer.node("Where", [writer.node("Less", [rows, zero]), end, rows])
    return writer.give(operation, "Gather", [data, inside], axis=0)


# Gradients

#: Kernel elements at most: each is a node.
MAX_TAPS = 1024


def conv_weight_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Pad, slice per kernel element, multiply per sample and group, and sum over the samples."""
    image, seen = (writer.type_of(v).shape for v in operation.inputs)
    result = writer.type_of(operation.outputs[0]).shape
    windows = windows_of(attributes, image[2:], result[2:])
    if math.prod(windows.kernel) > MAX_TAPS:
        raise CompileError(f"its kernel has more than {MAX_TAPS} elements, each of which is a node")
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
    # [N, group, channels, taps, positions], then positions first in the matrix.
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


def max_pool_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Scatter gradients to the indices that MaxPool returns."""
    shape = writer.type_of(operation.inputs[1]).shape
    kind = writer.type_of(operation.outputs[0]).data_type
    gradient, x = (writer.operand(v) for v in operation.inputs[:2])
    check_kernel(writer.type_of(operation.inputs[1]), attributes)
    if not covers_elements(attributes, shape[2:]):
        raise CompileError("a window covers padding only, so its maximum has no index")
    explicit = with_explicit_pads(writer, operation, attributes)
    indices = writer.second_output("MaxPool", [x], **as_lists(explicit))
    every = writer.ints(-1)
    places, given = (writer.node("Reshape", [v, every]) for v in (indices, gradient))
    zero = writer.constant(np.zeros((), kind.compute_dtype))
    table = writer.node("Expand", [zero, writer.ints(math.prod(shape))])
    scattered = writer.node("ScatterElements", [table, places, given], axis=0, reduction="add")
    return writer.give(operation, "Reshape", [scattered, writer.ints(*shape)])


def gelu_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """The slope of x share(x) is share(x) + x share'(x); in chunks for large tensors."""
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
    writer: ModelWriter, gradient: str, x: str, kind: ValueType, out: str | None = None
) -> str:
    """g ((1 + erf(x / sqrt 2)) / 2 + x exp(ln GELU_HEIGHT - x^2 / 2))."""
    inner = writer.node("Mul", [x, _number(writer, math.sqrt(0.5), kind)])
    share = _half(writer, writer.node("Erf", [inner]), kind)
    square = writer.node("Mul", [inner, inner])
    # One subtraction negates the exponent and adds the logarithm of the height.
    exponent = writer.node("Sub", [_number(writer, math.log(GELU_HEIGHT), kind), square])
    rest = writer.node("Mul", [writer.node("Exp", [exponent]), x])
    return writer.node("Mul", [writer.node("Add", [share, rest]), gradient], out)


def _tanh_product(
    writer: ModelWriter, gradient: str, x: str, kind: ValueType, out: str | None = None
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


def _half(writer: ModelWriter, value: str, kind: ValueType) -> str:
    """(1 + value) / 2."""
    half = _number(writer, 0.5, kind)
    return writer.node("Add", [writer.node("Mul", [value, half]), half])


def _number(writer: ModelWriter, value: float, kind: ValueType) -> str:
    return writer.scalar(value, kind.data_type.compute_dtype.type)


def layer_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """dx = (h - mean(h) - c mean(h c) / deviation^2) / deviation with c = x - mean, h = dy scale.

    Sums over rows and over columns are products with a vector.
    """
    kind, weights = (writer.type_of(operation.inputs[i]) for i in (1, 4))
    width = math.prod(weights.shape)

    def shaped(index: int, *shape: int) -> str:
        operand = writer.operand(operation.inputs[index])
        return writer.node("Reshape", [operand, writer.ints(*shape)])

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
    result, scale, shift = (*operation.outputs, ABSENT, ABSENT)[:3]
    _reshaped(writer, result, writer.node("Mul", [inner, inverse]))
    if scale != ABSENT:
        _reshaped(writer, scale, writer.node("MatMul", [row, product]))
    if shift != ABSENT:
        total = writer.node("ReduceSum", [gradient, writer.ints(0)], keepdims=0)
        _reshaped(writer, shift, total)
    return True


def _reshaped(writer: ModelWriter, value: int, name: str) -> None:
    """Write a result computed in another shape, unless it is absent."""
    if value != ABSENT:
        shape = writer.ints(*writer.type_of(value).shape)
        writer.node("Reshape", [name, shape], value_name(value))


def batch_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
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
    result, *sums = operation.outputs
    _reshaped(writer, result, writer.node("Sub", [writer.node("Mul", [gradient, factor]), inner]))
    count = _number(writer, math.prod(kind.shape) / channels, kind)
    for value, total in zip(sums, (slant, slope), strict=False):
        _reshaped(writer, value, writer.node("Mul", [total, count]))
    return True


def softmax_gradient(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """y (dy - sum(dy y))."""
    gradient, y = map(writer.operand, operation.inputs)
    axis = writer.ints(int_of(attributes, "axis"))
    total = writer.node("ReduceSum", [writer.node("Mul", [gradient, y]), axis], keepdims=1)
    inner = writer.node("Sub", [gradient, total])
    return writer.give(operation, "Mul", [inner, y])


# Recurrent layers

#: By operator, the activations that ONNX Runtime's kernels compute correctly.
RECURRENT: Mapping[str, tuple[str, ...]] = {
    "RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")
}  # fmt: skip


def recurrent(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Refuse what ONNX Runtime's RNN, GRU and LSTM (1.32) lack or compute differently from ONNX."""
    if writer.type_of(operation.inputs[0]).data_type is DataType.FLOAT64:
        raise CompileError(f"ONNX Runtime has no {operation.op} of float64")
    for name in ("clip", "input_forget", "layout"):
        if attributes.get(name):
            raise CompileError(f"ONNX Runtime's {operation.op} differs with {name!r}")
    directions = 2 if string_of(attributes, "direction") == "bidirectional" else 1
    for functions in recurrent_activations(operation.op, attributes, directions):
        if tuple(name for name, _, _ in functions) != RECURRENT[operation.op]:
            raise CompileError(f"ONNX Runtime's {operation.op} differs for other activations")
    return False

"""Write operators that ONNX Runtime lacks, or computes differently, with its primitive nodes.

Covers windows of convolutions and pools, Stitch's gradient operators, and recurrent layers. ONNX
Runtime's RNN, GRU and LSTM (1.32) have no kernel for float64 or batches in front, apply `clip` to
some gates only, use other defaults for the parameters of activations, and crash on zero steps; they
are used as they are only for default activations of float32 without a clip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from stitch.errors import CompileError
from stitch.ops import (
    GELU_CUBE,
    GELU_HEIGHT,
    GELU_RATE,
    computed_nbytes,
    float_of,
    int_of,
    onnx_code,
    pool_windows,
    recurrent_activations,
    string_of,
    transposed_windows,
    windows_of,
)
from stitch.program import ABSENT, DataType, Operation, Program, ValueType
from stitch.runtime.executors.element_runs import chunk_count
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.model_writer import Attributes, FormWriter, value_name

# Windows

#: From images of so many bytes on, more than second-level caches hold, ...
PLANES_NBYTES = 1 << 21
#: ... and by windows up to so wide, up to so many places apart, planes take less time than blocks.
PLANES_KERNEL, PLANES_STRIDE = 3, 2
#: Windows up to so long may be longer than twice their image.
LONG_KERNEL = 1024


def pool(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A pool with the pads that `auto_pad` means: ONNX Runtime (1.32) forgets dilations in them,
    and takes pads below 0 where strides are longer than windows."""
    check_kernel(writer.type_of(operation.inputs[0]), attributes)
    size = writer.type_of(operation.inputs[0]).shape[2:]
    if operation.op == "MaxPool" and not all_see_something(attributes, size):
        raise CompileError("of a window of padding alone it gives the least number, not -inf")
    laid = laid_out(writer, operation, attributes)
    if _is_of_planes(writer, operation, laid):
        return _by_planes(writer, operation, laid)
    if laid is not attributes:
        writer.plain(operation, laid)
    return laid is not attributes


def _is_of_planes(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Whether a MaxPool takes less time plane by plane.

    ONNX Runtime puts any image of whole blocks of channels into blocks for it, and out of them
    afterwards. In blocks it is fast, but a long image has to go through memory twice more. (us, as
    it is and by planes, out of memory: 64x16x28x28 by 2x2 408, 260; 8x64x56x56 848, 447, by 3x3 in
    steps of 2 716, 573, of 3 701, 788; but 64x32x14x14 by 2x2 156, 202.) Behind convolutions by
    constants, images are in blocks.
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
        and not _has_blocks(writer.program)
    )


def _has_blocks(program: Program) -> bool:
    """Whether there are convolutions that ONNX Runtime puts into blocks by itself."""
    fixed = program.fixed_values()
    return any(o.op == "Conv" and o.inputs[1] in fixed for o in program.operations)


def _by_planes(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """One channel fills no block."""
    image, value = writer.type_of(operation.inputs[0]), operation.outputs[0]
    count = math.prod(image.shape[:2])
    planes = writer.node(
        "Reshape", [writer.operand(operation.inputs[0]), writer.ints(count, 1, *image.shape[2:])]
    )
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
    name = writer.given_as(value, (count, 1, *writer.type_of(value).shape[2:]))
    writer.shaped_back(value, writer.node("MaxPool", [planes], name, **written))
    return True


def laid_out(
    writer: FormWriter, operation: Operation, attributes: Attributes, weights: int = 1
) -> Attributes:
    """The attributes of a pool or a convolution, with pads in place of `auto_pad`; `weights` is the
    operand whose shape says the kernel where no attribute does."""
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
    """Refuse windows far longer than the image: it looks at each of their elements."""
    kernel = attributes["kernel_shape"]
    assert isinstance(kernel, tuple)
    for length, size in zip(map(int, kernel), image.shape[2:], strict=True):
        if length > max(LONG_KERNEL, 2 * size):
            raise CompileError(f"a window of {length} elements over an image of {size}")


def all_see_something(attributes: Attributes, size: tuple[int, ...]) -> bool:
    """Whether each window of a pool has an element that is no padding."""
    windows = pool_windows(attributes, size)
    for i, length in enumerate(windows.size):
        first = np.arange(windows.output[i]) * windows.strides[i] - windows.begin[i]
        # The first element of each window that does not lie before the image.
        tap = np.maximum(-(first // windows.dilations[i]), 0)
        is_inside = (tap < windows.kernel[i]) & (first + tap * windows.dilations[i] < length)
        if not is_inside.all():
            return False
    return True


def convolution(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A convolution with the pads that `auto_pad` means: it stops where windows are dilated."""
    if operation.op == "ConvInteger" and math.prod(_shape_of(writer, operation, 3)) > 1:
        raise CompileError("it takes one zero point for all weights")
    laid = laid_out(writer, operation, attributes, 3 if operation.op == "QLinearConv" else 1)
    if laid is not attributes:
        writer.plain(operation, laid)
    return laid is not attributes


def _shape_of(writer: FormWriter, operation: Operation, index: int) -> tuple[int, ...]:
    value = operation.inputs[index] if index < len(operation.inputs) else ABSENT
    return () if value == ABSENT else writer.type_of(value).shape


def transposed_convolution(
    writer: FormWriter, operation: Operation, attributes: Attributes
) -> bool:
    """A ConvTranspose with pads in place of `auto_pad` and `output_shape`, which it counts for
    itself where strides or dilations leave gaps; refuses results longer than windows reach."""
    is_same = str(attributes.get("auto_pad", "")).startswith("SAME")
    if not is_same and "output_shape" not in attributes:
        return False
    kernel = writer.type_of(operation.inputs[1]).shape[2:]
    size = writer.type_of(operation.inputs[0]).shape[2:]
    windows = transposed_windows(attributes, size, kernel)
    rank = len(kernel)
    extra = attributes.get("output_padding") or (0,) * rank
    assert isinstance(extra, tuple)
    reached = [
        windows.strides[i] * (size[i] - 1) + int(extra[i])
        + windows.dilations[i] * (kernel[i] - 1) + 1 - windows.begin[i] - windows.end[i]
        for i in range(rank)
    ]  # fmt: skip
    if reached != list(windows.size):
        raise CompileError("it makes no result that is longer than its windows reach")
    pads = (*windows.begin, *windows.end)
    laid = {k: v for k, v in attributes.items() if k != "output_shape"}
    writer.plain(operation, {**laid, "auto_pad": "NOTSET", "pads": pads})
    return True


def window_of_rows(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Rows by number, the outermost axis first; a number below 0, which would count from the end,
    becomes one that is refused."""
    data, base, strides = map(writer.operand, operation.inputs)
    count, rank = (writer.type_of(v).shape[0] for v in operation.inputs[::2])
    lengths = writer.type_of(operation.outputs[0]).shape[:rank]
    zero, end = writer.scalar(0, np.int64), writer.scalar(count, np.int64)
    # Far outside is outside; of numbers that are cut no sum is too large for its type.
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
    check_kernel(writer.type_of(operation.inputs[1]), attributes)
    if not all_see_something(attributes, shape[2:]):
        raise CompileError("a window of padding alone has no place of its maximum")
    laid = laid_out(writer, operation, attributes)
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


# Recurrent layers

#: By operator: gates in a row of weights, states.
FORMS: Mapping[str, tuple[int, int]] = {"RNN": (1, 1), "GRU": (3, 1), "LSTM": (4, 2)}
#: The activations that its kernels compute as ONNX says.
USUAL: Mapping[str, tuple[str, ...]] = {
    "RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")
}  # fmt: skip


def recurrent(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write a layer step by step; False where ONNX Runtime's own kernel is right."""
    kind, layer = writer.type_of(operation.inputs[0]), _Layer(writer, operation, attributes)
    names = [tuple(name for name, _, _ in functions) for functions in layer.functions]
    is_usual = all(found == USUAL[operation.op] for found in names)
    told = any(attributes.get(name) for name in ("clip", "input_forget", "layout"))
    changed = told or 0 in kind.shape
    if is_usual and not changed and kind.data_type is not DataType.FLOAT64:
        return False
    layer.write()
    return True


class _Layer:
    """One layer that is written: names of operands, types, the nodes of a step."""

    def __init__(self, writer: FormWriter, operation: Operation, attributes: Attributes) -> None:
        self.writer, self.operation, self.attributes = writer, operation, attributes
        self.gates, self.states = FORMS[operation.op]
        self.by_batch = bool(int_of(attributes, "layout"))
        kind = writer.type_of(operation.inputs[0])
        self.dtype = kind.data_type.compute_dtype.type
        self.code = onnx_code(compute_type(kind))
        self.hidden = writer.type_of(operation.inputs[2]).shape[2]
        self.steps, self.batch = kind.shape[1::-1] if self.by_batch else kind.shape[:2]
        direction = string_of(attributes, "direction")
        self.backward = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]
        self.functions = recurrent_activations(operation.op, attributes, len(self.backward))

    def optional(self, index: int) -> str:
        """The name of an operand, empty where there is none."""
        inputs = self.operation.inputs
        return self.writer.operand(inputs[index]) if index < len(inputs) else ""

    def one(self, name: str, d: int, axis: int = 0) -> str:
        """The part of an operand that belongs to a direction."""
        at = self.writer.scalar(d, np.int64)
        return self.writer.node("Gather", [name, at], axis=axis) if name else ""

    def write(self) -> None:
        """Add all directions, and join their results."""
        found = [self._direction(d, backward) for d, backward in enumerate(self.backward)]
        results = [*self.operation.outputs, ABSENT, ABSENT]
        # Y has directions behind its steps, or behind batch and steps; states before the batch, or
        # behind it.
        for index, axis in enumerate((2 if self.by_batch else 1, *[int(self.by_batch)] * 2)):
            value = results[index]
            if value == ABSENT:
                continue
            axes = self.writer.ints(axis)
            parts = [self.writer.node("Unsqueeze", [f[index], axes]) for f in found]
            self.writer.node("Concat", parts, value_name(value), axis=axis)

    def _direction(self, d: int, backward: int) -> list[str]:
        """The names of Y and of the last states of one direction."""
        node, rows = self.writer.node, self.gates * self.hidden
        states = []
        for index in range(self.states):
            given = self.one(self.optional(5 + index), d, int(self.by_batch))
            if not given:
                zeros = np.zeros((self.batch, self.hidden), self.dtype)
                given = self.writer.constant(zeros)
            states.append(given)
        if not self.steps:
            whole = (self.batch, 0) if self.by_batch else (0, self.batch)
            nothing = self.writer.constant(np.empty((*whole, self.hidden), self.dtype))
            return [nothing, *states]
        x = self.optional(0)
        if self.by_batch:
            x = node("Transpose", [x], perm=[1, 0, 2])
        w, r = (node("Transpose", [self.one(self.optional(i), d)], perm=[1, 0]) for i in (1, 2))
        share, bias = node("MatMul", [x, w]), self.one(self.optional(3), d)
        inner = ""
        if bias:
            halves = [self.writer.ints(*span) for span in ((0,), (rows,), (2 * rows,))]
            outer, inner = (node("Slice", [bias, a, b]) for a, b in itertools.pairwise(halves))
            share = node("Add", [share, outer])
        peepholes = self._parts(self.one(self.optional(7), d), 3, 0) if self.states == 2 else []
        return self._scan(share, states, (r, inner, peepholes), d, backward)

    def _parts(self, name: str, count: int, axis: int) -> list[str]:
        """An operand in so many parts of the hidden size."""
        if not name:
            return []
        ends = [self.writer.ints(i * self.hidden) for i in range(count + 1)]
        at = self.writer.ints(axis)
        return [self.writer.node("Slice", [name, a, b, at]) for a, b in itertools.pairwise(ends)]

    def _scan(
        self, share: str, states: list[str], weights: tuple[str, str, list[str]], d: int, back: int
    ) -> list[str]:
        """The steps of one direction, and Y in its order of axes."""
        writer, shape = self.writer, [self.batch, self.hidden]
        lengths = self.optional(4)
        scanned, rows = [share], [writer.fresh()]
        before, after = [writer.fresh() for _ in states], []
        slots = [self._slot(name, shape) for name in before]
        slots.append(self._slot(rows[0], [self.batch, self.gates * self.hidden]))
        if lengths:
            scanned.append(writer.constant(np.arange(self.steps, dtype=np.int32)))
            rows.append(writer.fresh())
            slots.append(helper.make_tensor_value_info(rows[1], onnx_code(DataType.INT32), []))
        outer, writer.nodes = writer.nodes, []
        after = self._step(rows[0], before, weights, self.functions[d])
        y = after[0]
        if lengths:
            column = writer.node("Unsqueeze", [lengths, writer.ints(1)])
            alive = writer.node("Less", [rows[1], column])
            nothing = writer.scalar(0, self.dtype)
            after = [
                writer.node("Where", [alive, new, old])
                for new, old in zip(after, before, strict=True)
            ]
            y = writer.node("Where", [alive, y, nothing])
        results = [writer.node("Identity", [name]) for name in (*after, y)]
        nodes, writer.nodes = writer.nodes, outer
        graph = helper.make_graph(
            nodes, "step", slots, [self._slot(name, shape) for name in results]
        )
        names = [writer.fresh() for _ in results]
        writer.nodes.append(helper.make_node(
            "Scan", [*states, *scanned], names, body=graph, num_scan_inputs=len(scanned),
            scan_input_directions=[back] * len(scanned), scan_output_directions=[back],
        ))  # fmt: skip
        whole = names[-1]
        if self.by_batch:
            whole = writer.node("Transpose", [whole], perm=[1, 0, 2])
        return [whole, *names[:-1]]

    def _slot(self, name: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, self.code, shape)

    def _step(
        self, share: str, states: list[str], weights: tuple[str, str, list[str]],
        functions: Sequence[tuple[str, float, float]],
    ) -> list[str]:  # fmt: skip
        """The states after one step."""
        node, (r, inner, peepholes) = self.writer.node, weights
        f = [self._function(*function) for function in functions]
        h = states[0]

        def add(*names: str) -> str:
            first, *others = [name for name in names if name]
            for other in others:
                first = node("Add", [first, other])
            return first

        if self.operation.op == "GRU":
            return [self._gru(share, h, r, inner, f)]
        gates = add(share, node("MatMul", [h, r]), inner)
        if self.operation.op == "RNN":
            return [f[0](gates)]
        c = states[1]
        i, o, forget, cell = self._parts(gates, 4, 1)
        i_peep, o_peep, f_peep = peepholes or ("", "", "")
        i = f[0](add(i, node("Mul", [i_peep, c]) if i_peep else ""))
        if int_of(self.attributes, "input_forget"):
            forget = node("Sub", [self.writer.scalar(1, self.dtype), i])
        else:
            forget = f[0](add(forget, node("Mul", [f_peep, c]) if f_peep else ""))
        c = add(node("Mul", [forget, c]), node("Mul", [i, f[1](cell)]))
        o = f[0](add(o, node("Mul", [o_peep, c]) if o_peep else ""))
        return [node("Mul", [o, f[2](c)]), c]

    def _gru(
        self, share: str, h: str, r: str, inner: str, f: Sequence[Callable[[str], str]]
    ) -> str:
        node = self.writer.node
        shares, parts = self._parts(share, 3, 1), self._parts(r, 3, 1)
        biases = self._parts(inner, 3, 0) or ["", "", ""]

        def gate(index: int, state: str) -> str:
            product = node("MatMul", [state, parts[index]])
            return node("Add", [product, biases[index]]) if biases[index] else product

        z, reset = (f[0](node("Add", [shares[i], gate(i, h)])) for i in (0, 1))
        if int_of(self.attributes, "linear_before_reset"):
            hidden = node("Mul", [reset, gate(2, h)])
        else:
            hidden = gate(2, node("Mul", [reset, h]))
        new = f[1](node("Add", [shares[2], hidden]))
        kept = node("Sub", [self.writer.scalar(1, self.dtype), z])
        return node("Add", [node("Mul", [kept, new]), node("Mul", [z, h])])

    def _function(self, name: str, alpha: float, beta: float) -> Callable[[str], str]:
        """An activation, of what is bounded by `clip`, as nodes."""
        writer, clip = self.writer, self.attributes.get("clip")

        def call(x: str) -> str:
            if isinstance(clip, float) and clip > 0:
                bounds = (writer.scalar(limit, self.dtype) for limit in (-clip, clip))
                x = writer.node("Clip", [x, *bounds])
            a, b = (writer.scalar(number, self.dtype) for number in (alpha, beta))
            if name == "affine":
                return writer.node("Add", [writer.node("Mul", [x, a]), b])
            if name == "scaledtanh":
                return writer.node("Mul", [writer.node("Tanh", [writer.node("Mul", [x, b])]), a])
            op, parameters = _OPERATORS[name]
            given = {"alpha": alpha, "beta": beta}
            return writer.node(op, [x], None, **{key: given[key] for key in parameters})

        return call


_OPERATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("Relu", ()), "tanh": ("Tanh", ()), "sigmoid": ("Sigmoid", ()),
    "softsign": ("Softsign", ()), "softplus": ("Softplus", ()),
    "leakyrelu": ("LeakyRelu", ("alpha",)), "thresholdedrelu": ("ThresholdedRelu", ("alpha",)),
    "hardsigmoid": ("HardSigmoid", ("alpha", "beta")), "elu": ("Elu", ("alpha",)),
}  # fmt: skip

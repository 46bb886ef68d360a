"""Operators that ONNX Runtime computes otherwise than Stitch does, written in other operators.

Raises `CompileError` where ONNX Runtime would be wrong and nothing helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stitch.errors import CompileError
from stitch.ops import (
    GELU_CUBE,
    GELU_RATE,
    evaluate,
    float_of,
    int_of,
    known_by_type,
    lookup,
    onnx_code,
)
from stitch.program import ABSENT, Array, DataType, Operation
from stitch.runtime.executors.host import computable, compute_type
from stitch.runtime.executors.onnx import (
    expansions,
    integer_rewrites,
)
from stitch.runtime.executors.onnx.model_writer import Attributes, FormWriter, value_name

Rewrite = Callable[[FormWriter, Operation, Attributes], bool]

#: The largest result that a session holds from the start; the places of results come beside it.
KNOWN_NBYTES = 1 << 28
#: Sums of products: over nothing they are 0.
PRODUCTS = frozenset({"Conv", "Einsum", "Gemm", "MatMul", "MatMulInteger"})
#: Gradients whose sums over nothing are 0, whatever the scale is.
GRADIENT_SUMS = frozenset({"BatchNormalizationGradient", "LayerNormalizationGradient"})
#: Operators that it computes right where one operand is empty, and another is not.
READS_NOTHING = frozenset({
    "Concat", "GRU", "LSTM", "RNN", "ScatterElements", "ScatterND", "TensorScatter", "Window",
})  # fmt: skip


def _cast(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Narrow types round and come back; float to integer saturates, and NaN becomes 0."""
    source, value = operation.inputs[0], operation.outputs[0]
    given, wanted = writer.type_of(source).data_type, writer.type_of(value).data_type
    data, out = writer.operand(source), value_name(value)
    if wanted.dtype != wanted.compute_dtype:
        writer.cast(writer.cast(data, wanted), DataType.FLOAT32, out)
    elif given.is_floating and wanted.dtype.kind in "iu":
        _saturating(writer, data, given.compute_dtype.type, wanted, out)
    else:
        writer.cast(data, wanted, out)
    return True


def _saturating(
    writer: FormWriter, data: str, floating: type[np.floating], wanted: DataType, out: str
) -> None:
    limits = np.iinfo(wanted.dtype)
    # The largest number of the floating type below the first that is too large.
    most = np.nextafter(floating(float(limits.max) + 1), floating(0))
    if float(limits.max) < float(most):
        most = floating(limits.max)
    number = writer.node("Where", [writer.node("IsNaN", [data]), writer.scalar(0, floating), data])
    bounds = [writer.scalar(limits.min, floating), writer.scalar(most, floating)]
    whole = writer.cast(writer.node("Clip", [number, *bounds]), wanted)
    above = writer.node("Greater", [number, bounds[1]])
    largest = writer.scalar(limits.max, wanted.dtype.type)
    _chosen(writer, wanted, above, [largest, whole], out)


def _clip(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """A bound that is not there is infinite; ONNX Runtime takes the largest finite number."""
    kind = writer.type_of(operation.inputs[0]).data_type
    if kind is DataType.INT64:
        return integer_rewrites.clip(writer, operation)
    bounds = [*operation.inputs[1:], ABSENT, ABSENT][:2]
    if not kind.is_floating or ABSENT not in bounds:
        return False
    number = kind.compute_dtype.type
    named = [
        writer.scalar(limit, number) if bound == ABSENT else writer.operand(bound)
        for bound, limit in zip(bounds, (-np.inf, np.inf), strict=True)
    ]
    data = writer.operand(operation.inputs[0])
    return writer.give(operation, "Clip", [data, *named])


def _resize(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Refuses what its kernels compute otherwise, or stop at when they run.

    Where scales make a length that is not whole, the specification divides by the length before
    rounding, ONNX Runtime (1.32) by the one after. It interpolates in a few arrangements of axes.
    """
    before, after = (writer.type_of(v).shape for v in (operation.inputs[0], operation.outputs[0]))
    coordinates, mode = attributes["coordinate_transformation_mode"], attributes["mode"]
    if coordinates == "tf_crop_and_resize":
        raise CompileError("it reads other places at the borders of a cropped image")
    scales = writer.known(operation.inputs[2]) if len(operation.inputs) > 2 else None
    if scales is not None and scales.size:
        axes = attributes.get("axes") or range(len(before))
        assert isinstance(axes, range | tuple)
        if (mode == "cubic" or attributes["antialias"]) and before == after and (scales != 1).any():
            raise CompileError("it copies an image whose size stays")
        lengths = np.array([before[int(axis)] for axis in axes]) * scales
        is_whole = np.equal(np.mod(lengths, 1), 0).all()
        if coordinates in ("align_corners", "pytorch_half_pixel") and not is_whole:
            raise CompileError("it places corners by the length that is rounded")
    elif attributes["keep_aspect_ratio_policy"] != "stretch":
        raise CompileError("it rounds lengths otherwise where the aspect ratio is kept")
    if mode == "nearest":
        return False
    rank = len(before)
    planes = 3 if mode == "linear" and rank in (3, 5) and not attributes["antialias"] else 2
    changed = [a for a, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
    if (rank not in (2, 4) and planes == 2) or min(changed, default=rank) < rank - planes:
        raise CompileError("it interpolates along the last axes only, of images and volumes")
    return False


def _swish(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """There is no kernel for it, but one for what its nodes are fused to."""
    x = scaled = writer.operand(operation.inputs[0])
    if attributes["alpha"] != 1.0:
        number = writer.type_of(operation.inputs[0]).data_type.compute_dtype.type
        scaled = writer.node("Mul", [x, writer.scalar(attributes["alpha"], number)])
    gate = writer.node("Sigmoid", [scaled])
    return writer.give(operation, "Mul", [x, gate])


#: Types among which there is no kernel that chooses, and one that holds all of their values.
_CHOSEN_AS = {
    DataType.BOOL: DataType.UINT8, DataType.INT16: DataType.INT32, DataType.UINT16: DataType.INT32,
    DataType.UINT64: DataType.INT64,
}  # fmt: skip


def _where(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """In another type, where there is no kernel that chooses among values of theirs."""
    kind = writer.type_of(operation.outputs[0]).data_type
    if kind not in _CHOSEN_AS:
        return False
    condition, *choices = (writer.operand(v) for v in operation.inputs)
    _chosen(writer, kind, condition, choices, value_name(operation.outputs[0]))
    return True


def _chosen(
    writer: FormWriter, kind: DataType, condition: str, choices: Sequence[str], out: str
) -> None:
    """A Where of values of a type, written to `out`."""
    other = _CHOSEN_AS.get(kind)
    if other is None:
        writer.node("Where", [condition, *choices], out)
    else:
        wide = [writer.cast(choice, other) for choice in choices]
        writer.cast(writer.node("Where", [condition, *wide]), kind, out)


def _dropout(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """The data as it is, the only thing that Stitch has it do; it stops at some ratios else."""
    data = writer.operand(operation.inputs[0])
    writer.node("Identity", [data], value_name(operation.outputs[0]))
    for value in operation.outputs[1:]:
        if value != ABSENT:
            whole = writer.ints(*writer.type_of(value).shape)
            writer.node("Expand", [writer.constant(np.array(True)), whole], value_name(value))
    return True


def _batch(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """In training its kernel (1.31) overwrites the running statistics that it is given, whoever
    reads them later, and a caller's bytes too: it is given copies, of no momentum nothing."""
    if not attributes.get("training_mode"):
        return False
    copies: list[str] = []
    for value in operation.inputs[3:]:
        zeros = _zeros(writer, operation, value)
        keeps = float_of(attributes, "momentum") != 0
        copies.append(writer.node("Add", [writer.operand(value), zeros]) if keeps else zeros)
    writer.plain(operation, attributes)
    writer.nodes[-1].input[3:] = copies
    return True


def _zeros(writer: FormWriter, operation: Operation, value: int) -> str:
    """Zeros that no optimiser knows before, or takes for others: they are overwritten. Nothing is
    beyond infinity, and shrunk by another number each is another node; a constant would be shrunk
    once, and kept."""
    x = operation.inputs[0]
    shape, name = writer.type_of(x).shape, writer.operand(value)
    if writer.known(value) is not None and 0 not in shape:
        ends = (1, *shape[1:2], *(1 for _ in shape[2:]))
        some = [writer.operand(x), writer.ints(*(0 for _ in shape)), writer.ints(*ends)]
        flat = writer.node("Reshape", [writer.node("Slice", some), writer.ints(-1)])
        name = writer.cast(flat, compute_type(writer.type_of(value)))
    return writer.node("Shrink", [name], lambd=math.inf, bias=float(len(writer.nodes)))


def _mean_variance(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Its kernel has no epsilon: where all numbers are one, it gives NaN."""
    number = writer.type_of(operation.inputs[0]).data_type.compute_dtype.type
    axes = writer.constant(np.array(attributes["axes"], np.int64))
    x = writer.operand(operation.inputs[0])
    apart = writer.node("Sub", [x, writer.node("ReduceMean", [x, axes])])
    variance = writer.node("ReduceMean", [writer.node("Mul", [apart, apart]), axes])
    spread = writer.node("Add", [writer.node("Sqrt", [variance]), writer.scalar(1e-9, number)])
    return writer.give(operation, "Div", [apart, spread])


def _layer(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """In steps where its statistics are of float64, for which there is no kernel."""
    if attributes["stash_type"] != onnx_code(DataType.FLOAT64):
        return False
    rank = len(writer.type_of(operation.inputs[0]).shape)
    axes = writer.ints(*range(int_of(attributes, "axis") % rank, rank))
    x, scale, *shift = (writer.operand(v) for v in operation.inputs if v != ABSENT)
    results = [*operation.outputs, ABSENT, ABSENT][:3]
    out, mean, inverse = (None if v == ABSENT else value_name(v) for v in results)
    apart = writer.node("Sub", [x, writer.node("ReduceMean", [x, axes], mean)])
    variance = writer.node("ReduceMean", [writer.node("Mul", [apart, apart]), axes])
    epsilon = writer.scalar(attributes["epsilon"], np.float64)
    deviation = writer.node("Sqrt", [writer.node("Add", [variance, epsilon])])
    normal = writer.node("Mul", [apart, writer.node("Reciprocal", [deviation], inverse)])
    result = writer.node("Mul", [normal, scale], None if shift else out)
    if shift:
        writer.node("Add", [result, *shift], out)
    return True


def _gemm(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A wide A'B over many rows is the transpose of B'A: its packing favours the longer side first.

    Rows, columns of A and B: microseconds of A'B, and of B'A with the transpose, on one thread:
    2048, 128, 512: 2378, 1981; 2048, 128, 384: 1687, 1481; 2048, 32, 512: 945, 722;
    2048, 256, 512: 4349, 4077; 4096, 64, 256: 1275, 1190; 2048, 128, 2048: 9803, 8495; but
    256, 128, 512: 249, 258; 64, 512, 784: 349, 591; 1024, 512, 2048: 18488, 19889;
    2048, 10, 512: 460, 545.
    """
    first, second = (writer.type_of(v) for v in operation.inputs[:2])
    (rows, ours), theirs = first.shape, second.shape[1]
    plain = len(operation.inputs) == 2 and attributes["transA"] and not attributes["transB"]
    if not plain or rows < 1024 or not 32 <= ours <= 256 or theirs < 2 * ours:
        return False
    left, right = (writer.operand(v) for v in operation.inputs)
    # Without a third operand, ONNX Runtime would fuse the transpose and turn the product back.
    zero = writer.scalar(0, first.data_type.compute_dtype.type)
    turned = writer.node("Gemm", [right, left, zero], alpha=attributes["alpha"], transA=1)
    return writer.give(operation, "Transpose", [turned], perm=[1, 0])


def _scaled_bias(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A product over nothing is its bias, or zeros."""
    kind, out = writer.type_of(operation.outputs[0]), value_name(operation.outputs[0])
    dtype = kind.data_type.compute_dtype
    source = writer.scalar(0, dtype.type)
    if operation.op == "Gemm" and len(operation.inputs) == 3 and operation.inputs[2] != ABSENT:
        beta = writer.constant(np.array(attributes["beta"]).astype(dtype))
        source = writer.node("Mul", [writer.operand(operation.inputs[2]), beta])
    if operation.op == "Conv" and len(operation.inputs) == 3 and operation.inputs[2] != ABSENT:
        bias = writer.operand(operation.inputs[2])
        source = writer.node("Reshape", [bias, writer.ints(-1, *(1 for _ in kind.shape[2:]))])
    writer.node("Expand", [source, writer.ints(*kind.shape)], out)
    return True


def has_empty_results(writer: FormWriter, operation: Operation) -> bool:
    """Whether no result of an operation has elements."""
    return all(0 in writer.type_of(v).shape for v in operation.outputs if v != ABSENT)


def write_empty(writer: FormWriter, operation: Operation) -> None:
    """Write results without elements."""
    for value in (v for v in operation.outputs if v != ABSENT):
        kind = writer.type_of(value)
        nothing = np.empty(kind.shape, kind.data_type.compute_dtype)
        writer.node("Identity", [writer.constant(nothing)], value_name(value))


def written_over_nothing(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write an operation with an operand or a result without elements, where it can be.

    ONNX Runtime (1.32) ends the process over some of them (recurrent layers, pools, Einsum), and
    refuses or computes others otherwise. So it gets results without elements, and those that follow
    from nothing, as constants; operations that read something beside nothing only where
    `READS_NOTHING` names them.

    Returns: whether the operation was written. Raises: `CompileError` where it cannot be.
    """
    if operation.op == "Expect":
        return False
    read = [v for v in operation.inputs if v != ABSENT and writer.known(v) is None]
    empty = [v for v in read if 0 in writer.type_of(v).shape]
    is_empty = has_empty_results(writer, operation)
    definition = lookup(operation.op, operation.domain)
    reads_something = len(read) > len(empty)
    ends = operation.op in expansions.FORMS
    if is_empty and (ends or not (definition.checks and reads_something)):
        write_empty(writer, operation)
        return True
    if is_empty or not empty:
        return False
    if not reads_something or operation.op in GRADIENT_SUMS:
        return _known_result(writer, operation, attributes)
    if operation.op in PRODUCTS:
        return _scaled_bias(writer, operation, attributes)
    if operation.op not in READS_NOTHING:
        raise CompileError("an operand has no elements, which it does not take everywhere")
    return False


def _one_hot(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Indices of a floating type are cut to whole numbers; ONNX Runtime does so from 1.32 on."""
    if not writer.type_of(operation.inputs[0]).data_type.is_floating:
        return False
    indices, *others = (writer.operand(v) for v in operation.inputs)
    whole = writer.cast(indices, DataType.INT64)
    return writer.give(operation, "OneHot", [whole, *others], axis=attributes["axis"])


def _squeeze(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """An empty list of axes is none of them; ONNX Runtime (1.31) takes all of size 1."""
    axes = operation.inputs[1] if len(operation.inputs) > 1 else ABSENT
    if axes == ABSENT or writer.type_of(axes).shape != (0,):
        return False
    return writer.give(operation, "Identity", [writer.operand(operation.inputs[0])])


def _known_result(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Results that types and constants decide are computed here, once."""
    first = writer.type_of(operation.inputs[0])
    asked = known_by_type(operation, first)
    if asked is not None:
        results: Sequence[Array] = [asked]
    else:
        kinds = [writer.type_of(value) for value in operation.outputs if value != ABSENT]
        if any(kind.nbytes > KNOWN_NBYTES for kind in kinds):
            raise CompileError("a result that would be held beside its place, and is too large")
        operands: list[Array | None] = []
        for value in operation.inputs:
            if value == ABSENT:
                operands.append(None)
                continue
            kind, data = writer.type_of(value), writer.known(value)
            operands.append(np.zeros(kind.shape, kind.data_type.dtype) if data is None else data)
        results = evaluate(
            operation.op, operands, domain=operation.domain, attributes=attributes,
            outputs=len(operation.outputs),
        )  # fmt: skip
    for value, data in zip(operation.outputs, results, strict=True):
        if value == ABSENT:
            continue
        kind = writer.type_of(value)
        held = writer.constant(computable(data, kind))
        writer.cast(held, compute_type(kind), value_name(value))
    return True


def _expect(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """The data as it is: the executor checks inputs before the model runs."""
    data, given, wanted = operation.inputs
    if given not in {s.value for s in writer.program.inputs} or writer.known(wanted) is None:
        raise CompileError("only inputs are compared, and only with constants")
    return writer.give(operation, "Identity", [writer.operand(data)])


def _less_exact(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Its transforms lose more digits than ONNX's tests allow."""
    raise CompileError("its transform is less exact than ONNX's tests allow")


def _columns(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Refuses images of other than two dimensions: it puts their columns elsewhere (1.32)."""
    if len(writer.type_of(operation.outputs[0]).shape) != 4:
        raise CompileError("it puts columns at the wrong places of what is no plane")
    return False


def _max_unpool(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Refuses an output shape: it spreads the indices over another corner than ONNX's example."""
    if len(operation.inputs) > 2 and operation.inputs[2] != ABSENT:
        raise CompileError("it places values otherwise where an output shape is given")
    return False


def _quantize(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """One scale for all has no blocks, which it stops at. Refuses a precision of the division: its
    kernel divides in the type of the scale."""
    if attributes.get("precision"):
        raise CompileError("it does not divide in the precision that is asked for")
    if not attributes["block_size"] or math.prod(writer.type_of(operation.inputs[1]).shape) != 1:
        return False
    if len(writer.type_of(operation.inputs[1]).shape) > 1:
        return False
    writer.plain(operation, {**attributes, "block_size": 0})
    return True


def _zero_points(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Refuses zero points by column of several matrices: its kernel wants them for each matrix."""
    factor, point = (1, 3) if operation.op == "MatMulInteger" else (3, 5)
    value = operation.inputs[point] if len(operation.inputs) > point else ABSENT
    if value == ABSENT or math.prod(writer.type_of(value).shape) == 1:
        return False
    if len(writer.type_of(operation.inputs[factor]).shape) > 2:
        raise CompileError("it takes zero points by column for one matrix only")
    return False


def _gelu(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """By tanh in float64 from its formula: in its own the constants are of float32."""
    kind = writer.type_of(operation.inputs[0]).data_type
    if kind is not DataType.FLOAT64 or attributes["approximate"] != "tanh":
        return False
    x = writer.operand(operation.inputs[0])

    def number(value: float) -> str:
        return writer.scalar(value, np.float64)

    square = writer.node("Mul", [x, x])
    slope = writer.node("Mul", [square, number(GELU_CUBE * GELU_RATE)])
    inner = writer.node("Mul", [writer.node("Add", [slope, number(GELU_RATE)]), x])
    above = writer.node("Add", [writer.node("Tanh", [inner]), number(1.0)])
    return writer.give(operation, "Mul", [above, writer.node("Mul", [x, number(0.5)])])


def _group(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Of float64 in float64, as Stitch computes it, whatever it is to be stashed in."""
    if writer.type_of(operation.inputs[0]).data_type is not DataType.FLOAT64:
        return False
    writer.plain(operation, {**attributes, "stash_type": onnx_code(DataType.FLOAT64)})
    return True


def _grid_sample(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Refuses cubic places in other than two dimensions, for which there is no kernel."""
    if attributes["mode"] == "cubic" and len(writer.type_of(operation.inputs[0]).shape) != 4:
        raise CompileError("it samples by cubics in two dimensions only")
    return False


def _local_response(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """An image of other than two dimensions as one line: its kernel takes two. A window wider than
    all channels as one that reaches them all: it makes room for what lies beyond."""
    kind, size = writer.type_of(operation.inputs[0]), int_of(attributes, "size")
    widest = 2 * kind.shape[1] + 1
    if size > widest:
        alpha = float_of(attributes, "alpha") * widest / size
        attributes = {**attributes, "size": widest, "alpha": alpha}
    if len(kind.shape) == 4:
        writer.plain(operation, attributes)
        return True
    flat = writer.ints(*kind.shape[:2], math.prod(kind.shape[2:]), 1)
    lines = writer.node("Reshape", [writer.operand(operation.inputs[0]), flat])
    normal = writer.node("LRN", [lines], None, **attributes)
    return writer.give(operation, "Reshape", [normal, writer.ints(*kind.shape)])


def _mel_weights(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Computed here: it stops where the upper edge is half of the sample rate."""
    if any(writer.known(value) is None for value in operation.inputs):
        raise CompileError("it stops at an upper edge of half of the sample rate")
    return _known_result(writer, operation, attributes)


def _pad(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Cropped first: it stops where nothing is left, or pads of the whole are taken of a part."""
    pads = writer.known(operation.inputs[1])
    if pads is None or attributes["mode"] == "constant" or (pads >= 0).all():
        return False
    value = operation.inputs[0]
    shape = writer.type_of(value).shape
    axes = writer.known(operation.inputs[3]) if len(operation.inputs) > 3 else None
    named = range(len(shape)) if axes is None else [int(a) % len(shape) for a in axes]
    begins, ends = pads.reshape(2, -1)
    last = [shape[a] + min(int(end), 0) for a, end in zip(named, ends, strict=True)]
    first = writer.constant(np.maximum(-begins, 0))
    listed = writer.ints(*named)
    inner = writer.node("Slice", [writer.operand(value), first, writer.ints(*last), listed])
    left = writer.constant(np.maximum(pads, 0))
    return writer.give(operation, "Pad", [inner, left, "", listed], mode=attributes["mode"])


def _split(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """By lengths: it stops where there are more parts than elements."""
    if "num_outputs" not in attributes:
        return False
    axis = int_of(attributes, "axis")
    lengths = [writer.type_of(v).shape[axis] for v in operation.outputs]
    writer.plain(operation, {"axis": axis})
    writer.nodes[-1].input[1:] = [writer.ints(*lengths)]
    return True


def _n_grams(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Skips that no row is long enough for are not asked for: it counts them all."""
    (length,) = writer.type_of(operation.inputs[0]).shape[-1:] or (1,)
    skips = min(int_of(attributes, "max_skip_count"), length)
    writer.plain(operation, {**attributes, "max_skip_count": skips})
    return True


REWRITES: Mapping[tuple[str, str], Rewrite] = {
    ("", "BatchNormalization"): _batch,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast,
    ("", "Clip"): _clip,
    **{
        ("", name): _known_result
        for name in ("ConstantOfShape", "EyeLike", "Range", "Shape", "Size")
    },
    ("", "Col2Im"): _columns,
    ("", "DFT"): _less_exact,
    ("", "DequantizeLinear"): _quantize,
    ("", "Div"): integer_rewrites.divide,
    ("", "Dropout"): _dropout,
    ("", "Einsum"): integer_rewrites.einsum,
    ("", "Gelu"): _gelu,
    ("", "Gemm"): _gemm,
    ("", "GridSample"): _grid_sample,
    ("", "GroupNormalization"): _group,
    ("", "LRN"): _local_response,
    ("", "LayerNormalization"): _layer,
    ("", "Max"): integer_rewrites.extreme,
    **{("", name): expansions.convolution for name in ("Conv", "ConvInteger", "QLinearConv")},
    ("", "ConvTranspose"): expansions.transposed_convolution,
    **{("", f"{name}Pool"): expansions.pool for name in ("Average", "Lp", "Max")},
    ("", "MatMulInteger"): _zero_points,
    ("", "MaxUnpool"): _max_unpool,
    ("", "MeanVarianceNormalization"): _mean_variance,
    ("", "MelWeightMatrix"): _mel_weights,
    ("", "Min"): integer_rewrites.extreme,
    ("", "Mod"): integer_rewrites.modulo,
    ("", "OneHot"): _one_hot,
    ("", "Pad"): _pad,
    ("", "Pow"): integer_rewrites.power,
    ("", "QLinearMatMul"): _zero_points,
    ("", "QuantizeLinear"): _quantize,
    **{
        ("", f"Reduce{name}"): integer_rewrites.rounded_reduction
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "SumSquare")
    },
    ("", "ReduceMax"): integer_rewrites.reduced_extreme,
    ("", "ReduceMin"): integer_rewrites.reduced_extreme,
    ("", "ReduceSum"): integer_rewrites.summed,
    **{("", name): expansions.recurrent for name in expansions.FORMS},
    ("", "Resize"): _resize,
    ("", "STFT"): _less_exact,
    ("", "Sign"): integer_rewrites.sign,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Swish"): _swish,
    ("", "TfIdfVectorizer"): _n_grams,
    ("", "Where"): _where,
    ("stitch", "BatchNormalizationGradient"): expansions.batch_gradient,
    ("stitch", "ConvWeightGradient"): expansions.conv_weight_gradient,
    ("stitch", "Expect"): _expect,
    ("stitch", "GeluGradient"): expansions.gelu_gradient,
    ("stitch", "LayerNormalizationGradient"): expansions.layer_gradient,
    ("stitch", "MaxPoolGradient"): expansions.max_pool_gradient,
    ("stitch", "SoftmaxGradient"): expansions.softmax_gradient,
    ("stitch", "Window"): expansions.window_of_rows,
}

"""Operators that ONNX Runtime computes otherwise than Stitch does, written in other operators.

Comes in: an operation and the writer of its model. Goes out: whether it was rewritten; if not, it
is written as it is. Raises `CompileError` where ONNX Runtime would be wrong and nothing helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stitch.errors import CompileError
from stitch.ops import evaluate, float_of, int_of, known_by_type, onnx_code
from stitch.program import ABSENT, Array, DataType, Operation
from stitch.runtime.executors.host import computable, compute_type
from stitch.runtime.executors.onnx import gradient_expansions, integer_rewrites, window_expansion
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter, value_name

Rewrite = Callable[[FormWriter, Operation, Attributes], bool]

#: The largest result that a session holds from the start; the places of results come beside it.
KNOWN_NBYTES = 1 << 28


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
    writer.node("Where", [above, writer.scalar(limits.max, wanted.dtype.type), whole], out)


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
    """Refuses aligned corners with lengths that scales do not make whole.

    There the specification divides by the length before rounding, ONNX Runtime by the one after.
    """
    scales = operation.inputs[2] if len(operation.inputs) > 2 else ABSENT
    data = writer.known(scales)
    if attributes.get("coordinate_transformation_mode") != "align_corners" or data is None:
        return False
    lengths = np.array(writer.type_of(operation.inputs[0]).shape)
    if data.size == lengths.size and not np.equal(np.mod(lengths * data, 1), 0).all():
        raise CompileError(
            "it aligns corners otherwise where scales make a length that is not whole"
        )
    return False


def _swish(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """There is no kernel for it, but one for what its nodes are fused to."""
    x = scaled = writer.operand(operation.inputs[0])
    if attributes["alpha"] != 1.0:
        number = writer.type_of(operation.inputs[0]).data_type.compute_dtype.type
        scaled = writer.node("Mul", [x, writer.scalar(attributes["alpha"], number)])
    gate = writer.node("Sigmoid", [scaled])
    return writer.give(operation, "Mul", [x, gate])


def _where(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """There is no kernel that chooses among booleans: bytes are chosen instead."""
    if writer.type_of(operation.outputs[0]).data_type is not DataType.BOOL:
        return False
    condition, *choices = (writer.operand(v) for v in operation.inputs)
    in_bytes = [writer.cast(choice, DataType.UINT8) for choice in choices]
    chosen = writer.node("Where", [condition, *in_bytes])
    writer.cast(chosen, DataType.BOOL, value_name(operation.outputs[0]))
    return True


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
    if _is_over_nothing(writer, operation):
        return _scaled_bias(writer, operation, attributes)
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


def _is_over_nothing(writer: FormWriter, operation: Operation) -> bool:
    """Whether an operand is empty: ONNX Runtime (1.31) then writes no result, or refuses it."""
    return any(0 in writer.type_of(v).shape for v in operation.inputs[:2])


def _scaled_bias(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A product over nothing is its bias, or zeros."""
    kind, out = writer.type_of(operation.outputs[0]), value_name(operation.outputs[0])
    dtype = kind.data_type.compute_dtype
    shape = writer.ints(*kind.shape)
    source = writer.scalar(0, dtype.type)
    if len(operation.inputs) == 3 and operation.inputs[2] != ABSENT:
        beta = writer.constant(np.array(attributes["beta"]).astype(dtype))
        source = writer.node("Mul", [writer.operand(operation.inputs[2]), beta])
    writer.node("Expand", [source, shape], out)
    return True


def _product(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A product over nothing is zeros."""
    is_over_nothing = _is_over_nothing(writer, operation)
    return is_over_nothing and _scaled_bias(writer, operation, attributes)


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
        kinds = [writer.type_of(value) for value in operation.outputs]
        if any(kind.nbytes > KNOWN_NBYTES for kind in kinds):
            raise CompileError("a result that would be held beside its place, and is too large")
        operands: list[Array | None] = []
        for value in operation.inputs:
            kind, data = writer.type_of(value), writer.known(value)
            operands.append(np.zeros(kind.shape, kind.data_type.dtype) if data is None else data)
        results = evaluate(operation.op, operands, attributes=attributes)
    for value, data in zip(operation.outputs, results, strict=True):
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


def _max_unpool(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Refuses an output shape: it spreads the indices over another corner than ONNX's example."""
    if len(operation.inputs) > 2 and operation.inputs[2] != ABSENT:
        raise CompileError("it places values otherwise where an output shape is given")
    return False


def _quantize(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Refuses a precision of the division: its kernel divides in the type of the scale."""
    if attributes["precision"]:
        raise CompileError("it does not divide in the precision that is asked for")
    return False


REWRITES: Mapping[tuple[str, str], Rewrite] = {
    ("", "BatchNormalization"): _batch,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast,
    ("", "Clip"): _clip,
    **{
        ("", name): _known_result
        for name in ("ConstantOfShape", "EyeLike", "Range", "Shape", "Size")
    },
    ("", "DFT"): _less_exact,
    ("", "Div"): integer_rewrites.divide,
    ("", "Dropout"): _dropout,
    ("", "Einsum"): integer_rewrites.einsum,
    ("", "Gemm"): _gemm,
    ("", "LayerNormalization"): _layer,
    ("", "MatMul"): _product,
    ("", "Max"): integer_rewrites.extreme,
    **{("", f"{name}Pool"): window_expansion.pool for name in ("Average", "Lp", "Max")},
    ("", "MaxUnpool"): _max_unpool,
    ("", "MeanVarianceNormalization"): _mean_variance,
    ("", "Min"): integer_rewrites.extreme,
    ("", "Mod"): integer_rewrites.modulo,
    ("", "OneHot"): _one_hot,
    ("", "Pow"): integer_rewrites.power,
    ("", "QuantizeLinear"): _quantize,
    **{
        ("", f"Reduce{name}"): integer_rewrites.rounded_reduction
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "SumSquare")
    },
    ("", "ReduceMax"): integer_rewrites.reduced_extreme,
    ("", "ReduceMin"): integer_rewrites.reduced_extreme,
    ("", "ReduceSum"): integer_rewrites.summed,
    ("", "Resize"): _resize,
    ("", "STFT"): _less_exact,
    ("", "Sign"): integer_rewrites.sign,
    ("", "Squeeze"): _squeeze,
    ("", "Swish"): _swish,
    ("", "Where"): _where,
    ("stitch", "BatchNormalizationGradient"): gradient_expansions.batch_gradient,
    ("stitch", "ConvWeightGradient"): gradient_expansions.conv_weight_gradient,
    ("stitch", "Expect"): _expect,
    ("stitch", "GeluGradient"): gradient_expansions.gelu_gradient,
    ("stitch", "LayerNormalizationGradient"): gradient_expansions.layer_gradient,
    ("stitch", "MaxPoolGradient"): gradient_expansions.max_pool_gradient,
    ("stitch", "SoftmaxGradient"): gradient_expansions.softmax_gradient,
    ("stitch", "Window"): window_expansion.window_of_rows,
}

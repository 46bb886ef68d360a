"""A table of ONNX nodes: one for every schema of every operator whose schema changed.

Each row says in which opsets it can be written; `RUNS` has it once for each schema among these. The
numbers are drawn with the seed of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, defs, helper

from stitch.frontend.onnx.protos import NEWEST_OPSET
from stitch.program import Array
from tests.support.onnx.models import BOOL, FLOAT, INT64, info, model
from tests.support.run_seed import SEED

node = helper.make_node
#: ONNX Runtime reads models from this opset on.
OLDEST = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One node, and the opsets that it can be written in; what is `Fixed` are initializers."""

    op: str
    operands: tuple[Any, ...]
    first: int
    last: int
    results: int
    attributes: dict[str, Any] = field(default_factory=dict)

    def name(self, opset: int) -> str:
        """The name of one run of it."""
        said = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not hasattr(v, "node"))
        shapes = "x".join(str(np.shape(one)) for one in self.operands[:1])
        return f"{self.op}-{opset}-{shapes}-{said}"[:90].replace(" ", "")


class Fixed:
    """An operand that the model holds."""

    def __init__(self, *values: Any, dtype: Any = np.int64) -> None:
        self.array = np.array(values, dtype)


def schemas(op: str) -> dict[int, int]:
    """By opset that ONNX Runtime reads: the version of an operator's schema in it."""
    found = {}
    for opset in range(OLDEST, NEWEST_OPSET + 1):
        try:
            schema = defs.get_schema(op, opset)
        except defs.SchemaError:
            continue
        if not schema.deprecated:
            found[opset] = schema.since_version
    return found


def opsets_of(case: Case) -> list[int]:
    """One opset for every schema that a case can be written in."""
    chosen: dict[int, int] = {}
    for opset, version in schemas(case.op).items():
        if case.first <= opset <= case.last:
            chosen.setdefault(version, opset)
    return list(chosen.values())


def built(case: Case, opset: int, *, behind_a_convolution: bool = False) -> tuple[Any, list[Array]]:
    """The model of a case, and what to give it."""
    names, inputs, arrays, weights = [], [], [], {}
    for index, operand in enumerate(case.operands):
        name = f"x{index}" if operand is not None else ""
        names.append(name)
        if isinstance(operand, Fixed):
            weights[name] = operand.array
        elif operand is not None:
            array = np.asarray(operand)
            code = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(info(name, array.shape, code))
            arrays.append(array)
    outputs = [f"y{i}" for i in range(case.results)]
    nodes = []
    if behind_a_convolution:
        channels = arrays[0].shape[1]
        weights["k"] = drawn(channels, channels, 1, 1)
        nodes, names[0] = [node("Conv", ["x0", "k"], ["h"], kernel_shape=[1, 1])], "h"
    nodes.append(node(case.op, names, outputs, **case.attributes))
    return model(nodes, inputs, outputs, weights, opset=opset), arrays


_RNG = np.random.default_rng(SEED)


def drawn(*shape: int, low: float = -3, high: float = 3) -> Array:
    """Float32 numbers."""
    return _RNG.uniform(low, high, shape).astype(np.float32)


def whole(*shape: int, low: int = -4, high: int = 5, dtype: Any = np.int64) -> Array:
    """Whole numbers."""
    return _RNG.integers(low, high, shape).astype(dtype)


def flags(*shape: int) -> Array:
    """Truth values."""
    return _RNG.random(shape) < 0.5


def case(
    op: str, *operands: Any, first: Any = 1, last: Any = NEWEST_OPSET, results: Any = 1, **how: Any
) -> Case:
    return Case(op, operands, first, last, results, how)


def names_of(listed: str) -> list[str]:
    return listed.split()


def elementwise() -> Iterator[Case]:
    """Operators that gained types, and those that broadcast."""
    for op in names_of(
        "Abs Ceil Elu Erf Exp Floor HardSigmoid HardSwish Identity LeakyRelu Mish Neg Relu Round "
        "Selu Shape Sigmoid Sign Size Softplus Softsign Sin Cos Tan Sinh Cosh Atan Asinh Tanh "
        "ThresholdedRelu IsNaN Reciprocal"
    ):
        yield case(op, drawn(2, 3, 4))
    for op in ("Acos", "Asin", "Atanh"):
        yield case(op, drawn(2, 3, low=-0.9, high=0.9))
    for op in ("Sqrt", "Log", "Acosh"):
        yield case(op, drawn(2, 3, low=1.1))
    special = np.array([np.inf, -np.inf, np.nan, 0, 2], np.float32)
    yield case("IsInf", special)
    yield case("IsInf", special, detect_negative=0)
    for op in ("Abs", "Neg", "Sign"):
        yield case(op, whole(2, 3))
    for op in ("Add", "Sub", "Mul", "Div", "Pow", "Greater", "Less", "GreaterOrEqual",
               "LessOrEqual"):  # fmt: skip
        yield case(op, drawn(2, 3, 4, low=0.5), drawn(3, 1, low=0.5))
        yield case(op, drawn(4, low=0.5), drawn(2, 1, 4, low=0.5))
    yield case("Add", whole(2, 3), whole(3))
    yield case("Pow", drawn(2, 3), whole(3, low=0), first=12)
    yield case("Equal", whole(3, 4, high=-2), whole(1, 4, high=-2))
    yield case("Equal", np.round(drawn(3, 4)), np.round(drawn(1, 4)), first=11)
    for op in ("Max", "Min", "Mean", "Sum"):
        yield case(op, drawn(2, 3), drawn(2, 3), drawn(2, 3))
        yield case(op, drawn(2, 3), drawn(3), drawn(2, 1), first=8)
        yield case(op, drawn(2, 3))
    for op in ("Max", "Min"):
        yield case(op, whole(2, 3), whole(3), first=12)
    yield case("Mod", whole(2, 3), whole(3, low=1))
    yield case("Mod", drawn(2, 3), drawn(3, low=1), fmod=1)
    yield case("PRelu", drawn(2, 3, 4), drawn(3, 1))
    yield case("PRelu", drawn(2, 3, 4), drawn(4))
    yield case("Where", flags(2, 3), drawn(3), drawn(2, 1))
    bounded = np.append(drawn(4), np.array([np.inf, -np.inf], np.float32))
    for how in ({}, {"min": -1.5}, {"max": 0.5}, {"min": -1.0, "max": 1.0}):
        yield case("Clip", bounded, last=10, **how)
    for low, high in ((-1, 1), (None, 0.5), (-0.25, None), (None, None)):
        scalars = [None if v is None else np.array(v, np.float32) for v in (low, high)]
        yield case("Clip", drawn(6), *scalars, first=11)
    yield case("Clip", whole(6), np.array(-2), np.array(3), first=12)
    yield case("Celu", drawn(3, 4), alpha=1.5)
    yield case("Einsum", drawn(2, 3), drawn(3, 4), equation="ij,jk->ik")
    yield case("BitShift", whole(4, low=0, dtype=np.uint8), whole(4, low=0, dtype=np.uint8),
               direction="LEFT")  # fmt: skip
    yield case("Shrink", drawn(3, 4), lambd=1.0, bias=0.5)


def casts() -> Iterator[Case]:
    """Casts, and quantization."""
    yield case("Cast", drawn(2, 3), to=INT64)
    yield case("Cast", drawn(2, 3), to=BOOL)
    yield case("Cast", drawn(2, 3), to=TensorProto.FLOAT16)
    yield case("Cast", whole(2, 3), to=FLOAT)
    yield case("CastLike", drawn(2, 3), whole(1), first=15)
    x, scale, zero = drawn(2, 3, 4), np.array(0.03, np.float32), np.array(120, np.uint8)
    yield case("QuantizeLinear", x, scale, zero)
    yield case("QuantizeLinear", x, scale)
    per = [drawn(3, low=0.01, high=0.1), whole(3, low=100, high=140, dtype=np.uint8)]
    yield case("QuantizeLinear", x, *per, first=13)
    yield case("QuantizeLinear", x, drawn(4, low=0.01, high=0.1), first=13, axis=-1)
    q = whole(2, 3, 4, low=0, high=256, dtype=np.uint8)
    yield case("DequantizeLinear", q, scale, zero)
    yield case("DequantizeLinear", q, scale)
    yield case("DequantizeLinear", q, *per, first=13, axis=1)
    yield case("DynamicQuantizeLinear", x, results=3)
    a, b = whole(2, 3, low=0, dtype=np.uint8), whole(3, 4, low=0, dtype=np.uint8)
    one = [np.array(0.5, np.float32), np.array(1, np.uint8)]
    yield case("QLinearMatMul", a, *one, b, *one, *one)
    yield case("MatMulInteger", a, b, one[1], one[1])
    yield case("ConvInteger", q[None, :, :, :], whole(5, 2, 2, 2, low=0, dtype=np.uint8), one[1])
    yield case("QLinearConv", q[None], *one, whole(5, 2, 2, 2, low=0, dtype=np.uint8), *one, *one)


def matrices() -> Iterator[Case]:
    """Products, convolutions and recurrent layers."""
    yield case("MatMul", drawn(2, 3, 4), drawn(4, 5))
    yield case("MatMul", whole(2, 3), whole(3, 2), first=9)
    for c in ((2, 5), (5,), (2, 1), ()):
        yield case("Gemm", drawn(2, 3), drawn(3, 5), drawn(*c), alpha=0.5, beta=2.0)
    yield case("Gemm", drawn(3, 2), drawn(5, 3), first=11, transA=1, transB=1)
    x = drawn(1, 2, 7, 6)
    for how in ({"pads": [1, 0, 2, 1]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"},
                {"strides": [2, 2], "auto_pad": "VALID"}, {"dilations": [2, 1]}):  # fmt: skip
        yield case("Conv", x, drawn(3, 2, 2, 2), drawn(3), kernel_shape=[2, 2], **how)
    for how in ({"strides": [2, 2], "output_padding": [1, 0]},
                {"strides": [2, 2], "output_shape": [14, 13]}, {"dilations": [1, 2]},
                {"output_shape": [14, 13], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
                {"output_shape": [14, 13], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
                {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
                {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
                {"pads": [1, 0, 1, 1]}):  # fmt: skip
        yield case("ConvTranspose", x, drawn(2, 3, 3, 3), kernel_shape=[3, 3], **how)
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        seq = drawn(4, 2, 3)
        for direction, ways in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            w, r = drawn(ways, gates * 5, 3, low=-1, high=1), drawn(ways, gates * 5, 5, high=1)
            b = drawn(ways, 2 * gates * 5, low=-1, high=1)
            for bias in ((), (b,)):
                yield case(op, seq, w, r, *bias, results=3 if op == "LSTM" else 2, hidden_size=5,
                           direction=direction)  # fmt: skip
            if op == "GRU":
                yield case(op, seq, w, r, b, results=2, hidden_size=5, linear_before_reset=1,
                           direction=direction)  # fmt: skip
    yield case("Det", drawn(2, 3, 3))
    yield case("DeformConv", drawn(1, 2, 5, 5), drawn(3, 2, 3, 3), drawn(1, 18, 3, 3), first=19)


def normalizations() -> Iterator[Case]:
    """Softmax and its siblings, and what normalizes."""
    for op in ("Softmax", "LogSoftmax", "Hardmax"):
        for shape in ((2, 3), (2, 3, 4), (2, 1, 3, 2)):
            yield case(op, drawn(*shape))
            for axis in range(-len(shape), len(shape)):
                yield case(op, drawn(*shape), first=OLDEST if axis >= 0 else 11, axis=axis)
        yield case(op, drawn(3), axis=0)
    x, four = drawn(2, 3, 4, 5), [drawn(3), drawn(3), drawn(3), drawn(3, low=0.5)]
    yield case("BatchNormalization", x, *four)
    yield case("BatchNormalization", x, *four, epsilon=0.1, momentum=0.5)
    yield case("BatchNormalization", x[:, :, 0, 0], *four)
    yield case("BatchNormalization", x, *four, last=8, spatial=1)
    each = [drawn(3, 4, 5) for _ in range(3)] + [drawn(3, 4, 5, low=0.5)]
    yield case("BatchNormalization", x, *each, last=8, spatial=0)
    yield case("InstanceNormalization", x, drawn(3), drawn(3))
    yield case("LRN", drawn(1, 6, 2, 2), size=3)
    yield case("LRN", drawn(1, 6, 2, 2), size=5, alpha=0.1, beta=0.5, bias=2.0)
    yield case("LpNormalization", x)
    yield case("LpNormalization", x, p=1, axis=1)
    yield case("MeanVarianceNormalization", x)
    yield case("MeanVarianceNormalization", x, axes=[0, 2])
    yield case("Dropout", x)
    yield case("Dropout", x, last=11, ratio=0.3)
    yield case("Dropout", x, np.array(0.3, np.float32), first=12)
    yield case("Dropout", x, results=2)
    label = whole(2, low=0, high=3)
    yield case("SoftmaxCrossEntropyLoss", drawn(2, 3), label)
    yield case("SoftmaxCrossEntropyLoss", drawn(2, 3), label, drawn(3, low=0.5), reduction="sum")
    for how in ({}, {"reduction": "none"}, {"ignore_index": 1}):
        yield case("NegativeLogLikelihoodLoss", drawn(2, 3), label, **how)


def pools() -> Iterator[Case]:
    """Pools: what they count, and where they end."""
    x = drawn(1, 2, 7, 6)
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {}), (1, {"strides": [2, 2]}), (1, {"strides": [2, 3], "pads": [1, 1, 1, 0]}),
        (1, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        (1, {"auto_pad": "SAME_LOWER"}), (1, {"auto_pad": "VALID", "strides": [2, 2]}),
        (10, {"ceil_mode": 1, "strides": [2, 2]}),
        (10, {"ceil_mode": 1, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        (10, {"ceil_mode": 1, "strides": [3, 3], "pads": [1, 0, 1, 0]}),
    ]  # fmt: skip
    for first, how in ways:
        yield case("MaxPool", x, first=first, kernel_shape=[2, 2], **how)
        for counted in (0, 1):
            yield case("AveragePool", x, first=first, kernel_shape=[2, 2],
                       count_include_pad=counted, **how)  # fmt: skip
            yield case("AveragePool", x, first=first, kernel_shape=[3, 2],
                       count_include_pad=counted, **how)  # fmt: skip
        yield case("LpPool", x, first=18 if first > 1 else 1, kernel_shape=[2, 2], **how)
    yield case("LpPool", x, kernel_shape=[3, 3], p=1)
    yield case("AveragePool", x, first=19, kernel_shape=[2, 2], dilations=[2, 1])
    yield case("MaxPool", x, first=10, kernel_shape=[2, 2], dilations=[2, 1])
    yield case("MaxPool", x, first=8, results=2, kernel_shape=[2, 2], strides=[2, 2])
    yield case("MaxPool", x, first=8, results=2, kernel_shape=[2, 2], storage_order=1)
    yield case("MaxPool", whole(1, 1, 4, 4, dtype=np.int8), first=12, kernel_shape=[2, 2])
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield case(op, x)
    places = np.array([[[[5, 7], [13, 15]]]])
    yield case("MaxUnpool", drawn(1, 1, 2, 2), places, kernel_shape=[2, 2], strides=[2, 2])
    rois = np.array([[0, 0, 4, 4], [1, 2, 5, 6]], np.float32)
    for how in ({}, {"sampling_ratio": 2}, {"mode": "max"}, {"spatial_scale": 0.5}):
        # ONNX Runtime lacks that of opset 22.
        yield case("RoiAlign", x, rois, np.zeros(2, np.int64), last=21, output_height=2,
                   output_width=3, **how)  # fmt: skip
    yield case("GridSample", x, drawn(1, 3, 4, 2, low=-1, high=1), first=16, last=19)
    for mode in ("bilinear", "nearest", "bicubic"):
        yield case("GridSample", x, drawn(1, 3, 4, 2, low=-1, high=1), first=16, last=19,
                   mode=mode)  # fmt: skip
    for mode in ("linear", "nearest", "cubic"):
        yield case("GridSample", x, drawn(1, 3, 4, 2, low=-1, high=1), first=20, mode=mode)


def resizes() -> Iterator[Case]:
    """Upsample, Resize of opset 10, and the later ones."""
    x = drawn(1, 2, 4, 5)
    growing = ([1, 1, 2, 2], [1, 1, 3, 1], [1, 1, 1.5, 2.5], [1, 1, 1.3, 1.1], [1, 1, 1, 1])
    shrinking = ([1, 1, 0.5, 0.5], [1, 1, 0.6, 2], [1, 1, 1.7, 0.45], [1, 1, 0.7, 0.9])
    for mode in ("nearest", "linear"):
        for scales in growing:
            yield case("Upsample", x, last=8, mode=mode, scales=[float(s) for s in scales])
            yield case("Upsample", x, Fixed(*scales, dtype=np.float32), first=9, mode=mode)
        for scales in (*growing, *shrinking):
            yield case("Resize", x, Fixed(*scales, dtype=np.float32), last=10, mode=mode)
    yield case("Upsample", x, last=8, scales=[1.0, 2.0, 1.0, 2.0])
    yield case("Upsample", drawn(3, 4), last=8, mode="linear", scales=[2.0, 3.0])
    yield case("Resize", drawn(6), Fixed(0.4, dtype=np.float32), last=10)
    none = Fixed(dtype=np.float32)
    for scales in (*growing[:4], *shrinking):
        fixed = Fixed(*scales, dtype=np.float32)
        yield case("Resize", x, none, fixed, first=11)
        for mode in ("linear", "cubic"):
            for way in ("half_pixel", "pytorch_half_pixel", "asymmetric"):
                yield case("Resize", x, none, fixed, first=11, mode=mode,
                           coordinate_transformation_mode=way)  # fmt: skip
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
            yield case("Resize", x, none, fixed, first=11, nearest_mode=rounding,
                       coordinate_transformation_mode="asymmetric")  # fmt: skip
        yield case("Resize", x, none, fixed, first=11, last=17, nearest_mode="floor",
                   coordinate_transformation_mode="tf_half_pixel_for_nn")  # fmt: skip
    for mode in ("nearest", "linear", "cubic"):
        # ONNX Runtime takes lengths as they are before they are cut to whole ones.
        yield case("Resize", x, none, Fixed(1, 1, 2, 3, dtype=np.float32), first=11, mode=mode,
                   coordinate_transformation_mode="align_corners")  # fmt: skip
    sizes = Fixed(1, 2, 7, 3)
    yield case("Resize", x, none, none, sizes, first=11, last=17, mode="linear")
    yield case("Resize", x, None, None, sizes, first=13, mode="linear")
    yield case("Resize", x, None, None, sizes, first=13, mode="cubic", cubic_coeff_a=-0.5,
               exclude_outside=1)  # fmt: skip


def movements() -> Iterator[Case]:
    """What moves, picks and joins, and the settings that became operands."""
    x = drawn(2, 3, 4)
    yield case("Concat", x, drawn(2, 1, 4), axis=1)
    yield case("Concat", x, drawn(2, 3, 2), first=11, axis=-1)
    for axis in (0, 1, 2, 3):
        yield case("Flatten", x, axis=axis)
    yield case("Flatten", x, first=11, axis=-1)
    yield case("Transpose", x)
    yield case("Transpose", x, perm=[2, 0, 1])
    yield case("Reshape", x, Fixed(0, -1))
    yield case("Reshape", x, Fixed(4, 6))
    yield case("Expand", drawn(3, 1), Fixed(2, 3, 4))
    yield case("Tile", x, Fixed(1, 2, 3))
    for how in ({"axes": [1]}, {}, {"axes": [1, 3]}):
        yield case("Squeeze", drawn(2, 1, 3, 1), last=12, **how)
    yield case("Squeeze", drawn(2, 1, 3, 1), last=12, first=11, axes=[-1])
    yield case("Squeeze", drawn(2, 1, 3, 1), Fixed(1), first=13)
    yield case("Unsqueeze", x, last=12, axes=[0, 2])
    yield case("Unsqueeze", x, last=12, first=11, axes=[-1])
    yield case("Unsqueeze", x, Fixed(1), first=13)
    for how in ({"starts": [1], "ends": [2]}, {"starts": [0, -3], "ends": [1, 100], "axes": [0, 2]},
                {"starts": [0, 1, 1], "ends": [2, -1, 3]}):  # fmt: skip
        yield case("Slice", x, last=9, **how)
    yield case("Slice", x, Fixed(3, 0), Fixed(-9, 2), Fixed(2, 0), Fixed(-2, 1), first=10)
    yield case("Slice", x, Fixed(1), Fixed(9), first=10)
    yield case("Split", drawn(4, 2), last=12, results=2)
    yield case("Split", drawn(4, 5), last=12, results=3, axis=1, split=[1, 3, 1])
    yield case("Split", drawn(4, 6), last=12, first=11, results=3, axis=-1)
    yield case("Split", drawn(4, 2), first=13, last=17, results=2)
    yield case("Split", drawn(4, 5), Fixed(1, 4), first=13, results=2, axis=1)
    for mode in ("constant", "reflect", "edge"):
        yield case("Pad", drawn(3, 4), last=10, mode=mode, pads=[1, 0, 2, 1])
        yield case("Pad", drawn(3, 4), Fixed(1, 0, 2, 1), first=11, mode=mode)
    yield case("Pad", drawn(3, 4), last=10, value=1.5, pads=[0, -1, 1, 2])
    yield case("Pad", drawn(3, 4), Fixed(0, -1, 1, 2), np.array(1.5, np.float32), first=11)
    yield case("Gather", x, whole(2, 2, low=0, high=3), axis=1)
    yield case("Gather", x, whole(2, low=-4, high=0), first=11, axis=-1)
    yield case("GatherElements", x, whole(2, 3, 2, low=-4, high=4), axis=2)
    yield case("GatherND", x, whole(3, 2, low=0, high=2))
    yield case("GatherND", x, whole(2, 1, low=0, high=3), first=12, batch_dims=1)
    places, taken = np.array([[2, 0, 1], [0, 1, 2]]), drawn(2, 3)
    yield case("Scatter", drawn(3, 3), places, taken)
    yield case("Scatter", drawn(2, 4), places, taken, axis=1)
    yield case("ScatterElements", drawn(2, 4), places, taken, axis=1)
    yield case("ScatterElements", drawn(2, 4), places - 4, taken, axis=-1)
    yield case("ScatterND", drawn(4, 3), np.array([[1], [3]]), taken)
    for reduction in ("add", "mul"):
        yield case("ScatterElements", drawn(2, 4), places * 0, taken, first=16, axis=1,
                   reduction=reduction)  # fmt: skip
        yield case("ScatterND", drawn(4, 3), np.array([[1], [1]]), taken, first=16,
                   reduction=reduction)  # fmt: skip
    yield case("TopK", x, last=9, results=2, k=2)
    yield case("TopK", x, last=9, results=2, k=1, axis=1)
    yield case("TopK", x, Fixed(2), first=10, results=2)
    yield case("TopK", x, Fixed(2), first=11, results=2, axis=0, largest=0)
    for op in ("ArgMax", "ArgMin"):
        yield case(op, x)
        yield case(op, x, axis=2, keepdims=0)
        yield case(op, np.round(x / 3), first=12, axis=-1, select_last_index=1)
    depth, values = Fixed(4), Fixed(0, 1, dtype=np.float32)
    depth.array = depth.array.reshape(())
    yield case("OneHot", whole(2, 3, low=0, high=6), depth, values)
    yield case("OneHot", whole(2, 3, low=-6, high=6), depth, values, axis=1)
    yield case("DepthToSpace", drawn(1, 8, 2, 3), blocksize=2)
    for mode in ("DCR", "CRD"):
        yield case("DepthToSpace", drawn(1, 8, 2, 3), first=11, blocksize=2, mode=mode)
    yield case("SpaceToDepth", drawn(1, 2, 4, 6), blocksize=2)
    yield case("EyeLike", drawn(3, 4), k=1)
    shape = Fixed(2, 3)
    yield case("ConstantOfShape", shape)
    yield case("ConstantOfShape", shape, value=helper.make_tensor("v", INT64, [1], [7]))
    yield case("CumSum", x, np.array(1), exclusive=1)
    yield case("CumSum", x, np.array(-1), reverse=1)
    yield case("ReverseSequence", drawn(4, 3), np.array([1, 4, 2]))
    yield case("Range", *(np.array(v, np.float32) for v in (1, 9, 3)))
    yield case("Shape", x, first=15, start=1, end=-1)
    yield case("DFT", drawn(1, 4, 1), first=17, last=19, axis=1)
    yield case("DFT", drawn(1, 4, 3, 2), first=17, last=19, axis=2, inverse=1)
    yield case("DFT", drawn(1, 4, 3, 1), first=17, last=19)
    yield case("DFT", drawn(1, 4, 3, 1), None, np.array(1), first=20)


def reductions() -> Iterator[Case]:
    """Reductions: their axes became an operand."""
    positive = drawn(2, 3, 4, low=0.5)
    names = names_of("L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare Sum")
    for op in (f"Reduce{name}" for name in names):
        change = 13 if op == "ReduceSum" else 18
        yield case(op, positive)
        yield case(op, positive, last=change - 1, axes=[1])
        yield case(op, positive, last=change - 1, axes=[0, 2], keepdims=0)
        yield case(op, positive, first=11, last=change - 1, axes=[-1])
        yield case(op, positive, Fixed(-1, 0), first=change, keepdims=0)
    yield case("ReduceMax", flags(2, 3), first=20)
    yield case("ReduceMin", whole(2, 3, dtype=np.int8), first=12)


CASES = [
    one
    for group in (elementwise, casts, matrices, normalizations, pools, resizes, movements,
                  reductions)
    for one in group()
]  # fmt: skip
assert all(opsets_of(one) for one in CASES), "a row that no opset has"
RUNS = [(one, opset) for one in CASES for opset in opsets_of(one)]

"""ONNX models of older opsets: every change of an operator's meaning, as ONNX Runtime reads it.

The table below has a node of every operator whose schema changed, with the opsets in which that
node can be written; it runs once for each schema among these. What the table lacks is found by
asking `onnx.defs`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper

from stitch import ops
from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.frontend.onnx.calls import is_upgraded
from stitch.frontend.onnx.protos import NEWEST_OPSET
from stitch.program import Array
from tests.support.onnx.models import (
    BOOL,
    FLOAT,
    INT64,
    info,
    model,
    ours,
    runtime,
)
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
    yield case("GroupNormalization", drawn(2, 4, 3), drawn(2), drawn(2), first=18, last=20,
               num_groups=2)  # fmt: skip
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
RUNS = [(one, opset) for one in CASES for opset in opsets_of(one)]
#: Schemas without a row, and why.
ELSEWHERE = {("RoiAlign", 22): "ONNX Runtime 1.32 lacks it; opset 16 says the same"}


def is_quick(run: tuple[Case, int]) -> bool:
    """A fixed part of the table, the same on every run."""
    return run[1] < 13 and zlib.crc32(run[0].name(run[1]).encode()) % 3 == 0


def rows(runs: Iterable[tuple[Case, int]]) -> pytest.MarkDecorator:
    named = [pytest.param(*run, id=run[0].name(run[1])) for run in runs]
    return pytest.mark.parametrize(("one", "opset"), named)


def check(one: Case, opset: int, *, behind_a_convolution: bool = False) -> None:
    assert_as_runtime(*built(one, opset, behind_a_convolution=behind_a_convolution))


def assert_as_runtime(proto: onnx.ModelProto, arrays: Sequence[Array]) -> None:
    """Stitch and ONNX Runtime agree, narrow types within a step or two."""
    for mine, other in zip(ours(proto, arrays), runtime(proto, arrays), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        tolerance = 2e-3 if other.dtype.itemsize == 2 else 2e-5
        np.testing.assert_allclose(
            mine.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance
        )


@rows(filter(is_quick, RUNS))
def test_a_node_of_an_old_opset_is_what_onnx_runtime_makes_of_it(one: Case, opset: int) -> None:
    check(one, opset)


@pytest.mark.campaign("old_onnx")
@rows(itertools.filterfalse(is_quick, RUNS))
def test_every_node_of_an_old_opset_is_what_onnx_runtime_makes_of_it(one: Case, opset: int) -> None:
    check(one, opset)


def takes_what_a_convolution_gives(one: Case) -> bool:
    first = one.operands[0]
    return isinstance(first, np.ndarray) and first.ndim == 4 and first.dtype == np.float32


CONVOLVED = [run for run in RUNS if run[1] < 13 and takes_what_a_convolution_gives(run[0])]


@rows(run for run in CONVOLVED if run[0].op in ("Upsample", "Resize") and is_quick(run))
def test_what_comes_behind_a_convolution_is_right_too(one: Case, opset: int) -> None:
    check(one, opset, behind_a_convolution=True)


@pytest.mark.campaign("old_onnx")
@rows(CONVOLVED)
def test_all_that_comes_behind_a_convolution_is_right_too(one: Case, opset: int) -> None:
    check(one, opset, behind_a_convolution=True)


def test_the_table_has_every_schema_of_every_operator_that_stitch_has() -> None:
    """Derived from `onnx.defs`: what newly changes in ONNX fails here until it has a row."""
    covered = {(one.op, schemas(one.op)[opset]) for one, opset in RUNS}
    wanted = set()
    for op in sorted({schema.name for schema in defs.get_all_schemas() if not schema.domain}):
        if op in {d.name for d in ops.operators() if not d.domain} or is_upgraded(op):
            versions = set(schemas(op).values())
            wanted |= {(op, version) for version in versions if len(versions) > 1}
    assert sorted(wanted - covered - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() & covered) == [], "these have rows now"


A, B = drawn(2, 3, 4), drawn(2, 3, 4, low=0.5)
#: Nodes that ONNX Runtime is too young for: operator, opset, operands, attributes, result.
ANCIENT: list[tuple[str, int, list[Any], dict[str, Any], Any]] = [
    ("Add", 6, [A, B[0, :, 0]], {"broadcast": 1, "axis": 1}, A + B[0, :, 0][:, None]),
    ("Sub", 6, [A, B[:, 0, 0]], {"broadcast": 1, "axis": 0}, A - B[:, 0, 0][:, None, None]),
    ("Mul", 6, [A, B[0]], {"broadcast": 1}, A * B[0]),
    ("Div", 6, [A, B[0, :, 0]], {"broadcast": 1, "axis": -2}, A / B[0, :, 0][:, None]),
    ("Pow", 6, [B, A[0, 0, 0]], {"broadcast": 1}, B ** A[0, 0, 0]),
    ("Add", 1, [A, B], {"consumed_inputs": [0, 0]}, A + B),
    ("Greater", 6, [A, B[0, :2, 0]], {"broadcast": 1, "axis": 0}, B[0, :2, 0][:, None, None] < A),
    ("And", 6, [A > 0, B[0] > 1], {"broadcast": 1, "axis": 1}, (A > 0) & (B[0] > 1)),
    ("Relu", 5, [A], {"consumed_inputs": [0]}, np.maximum(A, 0)),
    ("Clip", 5, [A], {"min": -1.0}, np.maximum(A, -1)),
    ("Concat", 3, [A, B], {}, np.concatenate([A, B], 1)),
    ("Cast", 5, [A], {"to": "INT32"}, A.astype(np.int32)),
    ("Reshape", 4, [A], {"shape": [4, 6]}, A.reshape(4, 6)),
    ("Pad", 1, [A[0]], {"paddings": [1, 0, 0, 2], "value": 0.5},
     np.pad(A[0], ((1, 0), (0, 2)), constant_values=0.5)),
    ("Upsample", 6, [A[None]], {"height_scale": 2.0, "width_scale": 3.0},
     A[None].repeat(2, 2).repeat(3, 3)),
    ("Selu", 5, [A], {}, 1.0507 * np.where(A > 0, A, 1.6732 * np.expm1(A))),
    ("Dropout", 6, [A], {"is_test": 1, "ratio": 0.9}, A),
    ("PRelu", 6, [A, B[0, :, 0]], {}, np.where(A > 0, A, A * B[0, :, 0][:, None])),
    ("BatchNormalization", 6, [A, *B[:, :, 0], B[0, :, 1], B[1, :, 1]], {"is_test": 1},
     (A - B[0, :, 1][:, None]) / np.sqrt(B[1, :, 1] + 1e-5)[:, None] * B[0, :, 0][:, None]
     + B[1, :, 0][:, None]),
    ("Gemm", 6, [A[0], B[0].T, B[1, :, 0]], {"broadcast": 1}, A[0] @ B[0].T + B[1, :, 0]),
    ("Sum", 6, [A, B], {}, A + B),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "operands", "attributes", "wanted"), ANCIENT,
    ids=[f"{op}-{opset}-{i}" for i, (op, opset, *_) in enumerate(ANCIENT)],
)  # fmt: skip
def test_operators_before_opset_7_do_what_their_text_says(
    op: str, opset: int, operands: list[Any], attributes: dict[str, Any], wanted: Array
) -> None:
    (found,) = ours(*built(Case(op, tuple(operands), 1, 6, 1, attributes), opset))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[str, int, list[Any], int, dict[str, Any], str]] = [
    ("Tile", 5, [A, Fixed(2), Fixed(1)], 1, {}, "Tile is not supported as of opset 5"),
    ("GRU", 2, [A, A, A], 2, {"hidden_size": 1}, "GRU is not supported as of opset 2"),
    ("Split", 1, [A], 2, {"axis": 0}, "Split is not supported as of opset 1"),
    ("Dropout", 6, [A], 1, {}, "Dropout in training mode"),
    ("BatchNormalization", 6, [A, *[B[0, :, 0]] * 4], 1, {}, "in training mode"),
    ("BatchNormalization", 9, [A, *[B[0, :, 0]] * 4], 5, {}, "in training mode"),
    ("BatchNormalization", 8, [A, *[B[0, :, 0]] * 4], 1, {"spatial": 0}, "spatial of 0"),
    ("LpPool", 1, [A], 1, {"p": 1.5, "kernel_shape": [2]}, "power that is not whole"),
    ("LSTM", 6, [A, A, A], 3, {"hidden_size": 1}, "first result of LSTM is not supported"),
    ("Add", 6, [A, B[0]], 1, {}, "differ in shape, and its attribute 'broadcast' is 0"),
    ("Add", 6, [B[0], A], 1, {"broadcast": 1, "axis": 0}, "'axis' of Add does not fit"),
    ("Add", 6, [A, B], 1, {"broadcast": 1, "axis": "no"}, "'axis' of Add does not fit"),
    ("Cast", 5, [A], 1, {"to": "WORD"}, "'to' of Cast does not fit"),
    ("Softmax", 12, [A], 1, {"axis": 3}, "'axis' of Softmax does not fit"),
    ("Upsample", 8, [A], 1, {"scales": [1.0, 0.5, 1.0]}, "scales of Upsample are at least 1"),
    ("Upsample", 8, [A], 1, {"scales": [1.0, 2.0, 1.0], "mode": "cubic"}, "'mode' of Upsample"),
    ("Upsample", 8, [A], 1, {}, "Resize"),
    ("Slice", 9, [A], 1, {"starts": "x", "ends": [1]}, "'starts' of Slice does not fit"),
    ("TopK", 9, [A], 2, {"k": 0.5}, "'k' of TopK does not fit"),
    ("Resize", 17, [A, None, Fixed(1, 2, 2, dtype=np.float32)], 1,
     {"mode": "linear", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}, "but for mode"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "operands", "results", "attributes", "words"), REFUSED,
    ids=[f"{op}-{opset}-{i}" for i, (op, opset, *_) in enumerate(REFUSED)],
)  # fmt: skip
def test_what_has_no_proved_equivalent_is_refused_by_name(
    op: str, opset: int, operands: list[Any], results: int, attributes: dict[str, Any], words: str
) -> None:
    proto, arrays = built(Case(op, tuple(operands), 1, 26, results, attributes), opset)
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(proto, arrays)


def test_a_scan_with_a_batch_axis_is_refused() -> None:
    body = helper.make_graph(
        [node("Add", ["s", "e"], ["t"]), node("Identity", ["t"], ["o"])], "round",
        [info("s", [2]), info("e", [2])], [info("t", [2]), info("o", [2])],
    )  # fmt: skip
    scan = node("Scan", ["", "x", "x"], ["y", "z"], body=body, num_scan_inputs=1)
    with pytest.raises(CompileError, match="Scan is not supported before opset 9"):
        from_onnx(model([scan], [info("x", [1, 3, 2])], ["y", "z"], opset=8))


def old_body(opset: int) -> list[Any]:
    """Nodes whose meaning changed after their opset, from `a` to `b`."""
    axes = {"axes": [0]}
    return [
        node("Unsqueeze", ["a"], ["u"], **axes),
        node("Softmax", ["u"], ["s"]),
        node("Squeeze", ["s"], ["t"], **axes),
        node("Clip", ["t"], ["b"], max=0.1) if opset < 11 else node("Neg", ["t"], ["b"]),
    ]


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12])
def test_old_operators_in_functions_are_read_as_of_what_the_function_imports(opset: int) -> None:
    old = helper.make_function(
        "mine", "Old", ["a"], ["b"], old_body(opset), [helper.make_opsetid("", opset)]
    )
    nodes = [node("Old", ["x"], ["o"], domain="mine"), node("Softmax", ["o"], ["y"])]
    proto = model(nodes, [info("x", [3, 4])], ["y"], opset=17, functions=[old],
                  domains={"mine": 1})  # fmt: skip
    x = drawn(3, 4)
    (inner,) = runtime(model(old_body(opset), [info("a", [3, 4])], ["b"], opset=opset), [x])
    raised = np.exp(inner - inner.max(-1, keepdims=True))
    (found,) = ours(proto, [x])
    np.testing.assert_allclose(found, raised / raised.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12])
def test_old_operators_in_bodies_are_read_as_of_the_model(opset: int) -> None:
    scan_body = helper.make_graph(
        [*old_body(opset), node("Identity", ["b"], ["o"])], "round", [info("a", [3, 4])],
        [info("b", [3, 4]), info("o", [3, 4])],
    )  # fmt: skip
    loop_inputs = [info("i", [], INT64), info("c", [], BOOL), info("a", [3, 4])]
    loop_body = helper.make_graph(
        [*old_body(opset), node("Identity", ["c"], ["d"])], "rounds", loop_inputs,
        [info("d", [], BOOL), info("b", [3, 4])],
    )  # fmt: skip
    branch = helper.make_graph(
        [node("Identity", ["l"], ["a"]), *old_body(opset)], "branch", [], [info("b", [3, 4])]
    )
    nodes = [
        node("Loop", ["m", "", "x"], ["l"], body=loop_body),
        node("If", ["yes"], ["f"], then_branch=branch, else_branch=branch),
    ]
    results = ["f"]
    if opset >= 9:
        scan_body.input.append(info("e", [1]))
        nodes.append(node("Scan", ["x", "e"], ["y", "z"], body=scan_body, num_scan_inputs=1))
        results += ["y", "z"]
    inputs = [info("x", [3, 4]), info("e", [2, 1]), info("yes", [], BOOL)]
    proto = model(nodes, inputs, results, {"m": np.array(2)}, opset=opset)
    assert_as_runtime(proto, [drawn(3, 4), drawn(2, 1), np.array(True)])


def test_an_old_opset_beside_other_domains_is_read_by_itself() -> None:
    nodes = [
        node("Softmax", ["x"], ["s"]),
        node("Gelu", ["s"], ["g"], domain="com.microsoft"),
        node("Scaler", ["g"], ["y"], domain="ai.onnx.ml", offset=[0.1], scale=[2.0]),
    ]
    others = {"com.microsoft": 1, "ai.onnx.ml": 1}
    proto = model(nodes, [info("x", [2, 3, 2])], ["y"], opset=9, domains=others)
    assert_as_runtime(proto, [drawn(2, 3, 2)])


def test_a_model_that_imports_no_opset_is_of_the_first() -> None:
    proto = model([node("Add", ["x", "w"], ["y"], broadcast=1, axis=0)],
                  [info("x", [2, 3]), info("w", [2])], ["y"])  # fmt: skip
    del proto.opset_import[:]
    proto.ir_version = 2
    x, w = drawn(2, 3), drawn(2)
    np.testing.assert_allclose(ours(proto, [x, w])[0], x + w[:, None], rtol=1e-6)


def test_settings_that_are_inputs_decide_shapes_as_before() -> None:
    nodes = [
        node("Unsqueeze", ["n"], ["u"], axes=[0]),
        node("Concat", ["u", "two"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    inputs = [info("x", [6]), info("n", [], INT64)]
    proto = model(nodes, inputs, ["y"], {"two": np.array([2])}, opset=9)
    assert_as_runtime(proto, [drawn(6), np.array(3)])


def test_scales_that_are_an_input_are_fixed_by_their_example() -> None:
    inputs = [info("x", [1, 1, 4, 4]), info("s", [4])]
    scales = np.array([1, 1, 0.6, 2], np.float32)
    for op, opset, given in (("Resize", 10, scales), ("Upsample", 9, np.ceil(scales))):
        proto = model([node(op, ["x", "s"], ["y"])], inputs, ["y"], opset=opset)
        assert_as_runtime(proto, [drawn(1, 1, 4, 4), given])


#: Networks of opset 9 in the onnx package, as their exporters wrote them: masks that nothing reads,
#: inputs for weights.
NETWORKS = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
QUICK_NETWORK = "light_squeezenet"


def check_network(path: Path) -> None:
    proto = onnx.load(path)
    known = {tensor.name for tensor in proto.graph.initializer}
    (slot,) = [one for one in proto.graph.input if one.name not in known]
    shape = [dim.dim_value for dim in slot.type.tensor_type.shape.dim]
    last = proto.graph.node[-1]
    if last.op_type == "Softmax":
        # All weights are equal and scores are of 1e9: their last digits would decide.
        proto.graph.output[0].name = last.input[0]
        proto.graph.node.remove(last)
    assert_as_runtime(proto, [drawn(*shape).astype(np.float32)])


def test_a_network_of_opset_9_is_what_onnx_runtime_makes_of_it() -> None:
    (path,) = [path for path in NETWORKS if path.stem == QUICK_NETWORK]
    check_network(path)


@pytest.mark.campaign("old_onnx")
@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_every_network_of_opset_9_is_what_onnx_runtime_makes_of_it(path: Path) -> None:
    check_network(path)

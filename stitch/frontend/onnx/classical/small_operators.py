"""Small operators of classical machine learning (`ai.onnx.ml`), in ONNX's own words.

Comes in: a node. Goes out: what plain operations make of its operands. Must not know: scopes,
files.
"""

from __future__ import annotations

import math

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.classical.scores import rows
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import DataType


def feature_extractor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The chosen columns; a vector is one row."""
    data, columns = call.required(0), call.required(1)
    if len(data.shape) < 2:
        data = builder.op("Reshape", data, [1, -1])
    chosen = builder.op("Reshape", columns, [-1])
    return builder.op("Gather", data, chosen, axis=-1)


def binarizer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """1 where a number is above the threshold, else 0, in its own type."""
    data, threshold = call.required(0), call.attributes.get("threshold", 0.0)
    if not isinstance(threshold, float):
        raise call.malformed("the threshold of Binarizer is one number")
    kind = data.data_type
    op, limit = "Greater", threshold
    if not kind.is_floating:
        least, most = kind.limits
        # Whole numbers are above a number where they are above what it rounds down to.
        whole = math.floor(threshold) if math.isfinite(threshold) else most + 1
        everything = threshold == -math.inf or whole < least
        op, limit = ("GreaterOrEqual", least) if everything else ("Greater", min(whole, most))
    above = builder.op(op, data, np.asarray(limit).astype(kind.dtype))
    return builder.op("Cast", above, to=ops.onnx_code(kind))


def scaler(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The columns, an offset taken away and times a factor each, in float32."""
    x = call.required(0)
    x = builder.op("Cast", x, to=ops.onnx_code(DataType.FLOAT32))
    for name, op in (("offset", "Sub"), ("scale", "Mul")):
        numbers = call.reals(name)
        if numbers.size not in (1, x.shape[-1] if x.ndim else 1):
            raise call.unfit(name, f"{x.shape[-1] if x.ndim else 1} numbers, or one", numbers.size)
        x = builder.op(op, x, numbers)
    return x


def normalizer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The rows over their norms, in float32; rows of nothing but 0 stay as they are."""
    x, norm = rows(builder, call), call.word("norm", "MAX", ("MAX", "L1", "L2"))
    op = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[norm]
    size = builder.op(op, x, [1], keepdims=1)
    size = builder.op("Where", builder.op("Equal", size, 0.0), np.ones((), x.dtype), size)
    return builder.op("Reshape", x / size, call.required(0).shape)


def imputer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The columns, one number (NaN perhaps) replaced by that of the column."""
    x = call.required(0)
    if x.data_type.is_floating:
        gone, given = call.real("replaced_value_float"), call.reals("imputed_value_floats")
        lacking = builder.op("IsNaN", x) if math.isnan(gone) else builder.op("Equal", x, gone)
    else:
        given = np.array(call.wholes("imputed_value_int64s"), np.int64)
        lacking = builder.op("Equal", x, call.whole("replaced_value_int64"))
    if given.size not in (1, x.shape[-1] if x.ndim else 1):
        raise call.unfit("imputed values", f"{x.shape[-1] if x.ndim else 1}, or one", given.size)
    return builder.op("Where", lacking, given.astype(x.dtype), x)


def zip_map(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The numbers that ONNX Runtime gives as one map a row: a tensor, its columns in the order of
    the labels.
    """
    x = call.required(0)
    count = len(call.wholes("classlabels_int64s")) or len(call.words("classlabels_strings"))
    if count != (x.shape[-1] if x.ndim else 1):
        raise call.unfit("classlabels", f"{list(x.shape)[-1:]} labels", count)
    return builder.op("Identity", x)

"""Small operators of classical machine learning (`ai.onnx.ml`), in ONNX's own words.

Comes in: a node. Goes out: what plain operations make of its operands. Must not know: scopes,
files.
"""

from __future__ import annotations

import math

import numpy as np

from stitch import ops
from stitch.errors import FormatError
from stitch.frontend.onnx_settings import operand
from stitch.frontend.onnx_upgrades import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor


def feature_extractor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The chosen columns; a vector is one row."""
    data, columns = operand(call, 0), operand(call, 1)
    if len(data.shape) < 2:
        data = builder.op("Reshape", data, [1, -1])
    chosen = builder.op("Reshape", columns, [-1])
    return builder.op("Gather", data, chosen, axis=-1)


def binarizer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """1 where a number is above the threshold, else 0, in its own type."""
    data, threshold = operand(call, 0), call.attributes.get("threshold", 0.0)
    if not isinstance(threshold, float):
        raise FormatError("the threshold of Binarizer is one number", where=call.where)
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

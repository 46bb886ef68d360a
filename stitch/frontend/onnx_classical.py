"""Operators of ONNX's other domains, in the words of its own.

Comes in: a node of `ai.onnx.ml`. Goes out: what plain operations make of its operands, or None for
an operator that is not here. Must not know: scopes, files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from stitch import ops
from stitch.errors import FormatError
from stitch.frontend.onnx_trees import lower_trees
from stitch.frontend.onnx_upgrades import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

ML = "ai.onnx.ml"


def _operand(call: NodeCall, index: int) -> SymbolicTensor:
    found = call.operand(index)
    if found is None:
        raise FormatError(f"{call.op} needs its operand {index}", where=call.where)
    return found


def _feature_extractor(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The chosen columns; a vector is one row."""
    data, columns = _operand(call, 0), _operand(call, 1)
    if len(data.shape) < 2:
        data = builder.op("Reshape", data, [1, -1])
    chosen = builder.op("Reshape", columns, [-1])
    return builder.op("Gather", data, chosen, axis=-1)


def _binarizer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """1 where a number is above the threshold, else 0, in its own type."""
    data, threshold = _operand(call, 0), call.attributes.get("threshold", 0.0)
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


_Lowering = Callable[[ComputationGraphBuilder, NodeCall], SymbolicTensor]
_LOWERINGS: Mapping[tuple[str, str], _Lowering] = {
    (ML, "ArrayFeatureExtractor"): _feature_extractor,
    (ML, "Binarizer"): _binarizer,
    (ML, "TreeEnsemble"): lower_trees,
}


def is_lowered(op: str, domain: str) -> bool:
    """Whether an operator is among them."""
    return (domain, op) in _LOWERINGS


def lowered(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The one result of a node of such an operator."""
    return _LOWERINGS[call.domain, call.op](builder, call)

"""Operators of other domains than ONNX's own, and how each is said in its words.

Comes in: a node of `ai.onnx.ml`, `com.microsoft`, or one that ONNX Runtime puts among ONNX's own.
Goes out: its results, made of plain operations. What a lowering does not know (an attribute, an
operand, a result) is refused here, never passed over. Must not know: scopes, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stitch.frontend.onnx import classical, contrib
from stitch.frontend.onnx.calls import Lowering, NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

_LOWERINGS: Mapping[tuple[str, str], Lowering] = {
    **{("ai.onnx.ml", name): row for name, row in classical.LOWERINGS.items()},
    **{("com.microsoft", name): row for name, row in contrib.LOWERINGS.items()},
    **{("", name): row for name, row in contrib.OWN_DOMAIN_LOWERINGS.items()},
}


def is_lowered(op: str, domain: str) -> bool:
    """Whether an operator is among them."""
    return (domain, op) in _LOWERINGS


def lowered(builder: ComputationGraphBuilder, call: NodeCall) -> Sequence[SymbolicTensor | None]:
    """The results of a node of such an operator; raises `CompileError`, `FormatError`."""
    known = _LOWERINGS[call.domain, call.op]
    strange = sorted(call.attributes.keys() - known.attributes)
    strange += [
        f"operand {i}"
        for i, one in enumerate(call.inputs)
        if one is not None and i >= known.operands
    ]
    wanted = [i for i, name in enumerate(call.outputs) if name]
    strange += [f"result {i}" for i in wanted if i not in known.results]
    if strange:
        domain = f"{call.domain}." if call.domain else ""
        raise call.refused(f"operator {domain}{call.op} is not supported with {', '.join(strange)}")
    return known.make(builder, call)

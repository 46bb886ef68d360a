"""How aot_autograd divides a graph of values and gradients into a forward and a backward one.

Comes in: the joint graph. Goes out: the two, as torch's own cut finds them, but that results of
operators that torch runs are saved: what programs compute again is fused, what torch computes
again costs its whole time and may be random. Must not know: devices.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from stitch.frontend.torch.lowering import CHECKS, LOWERINGS


def partition(joint: Any, *operands: Any, **named: Any) -> Any:
    """The forward and the backward graph of a joint one. What a user's checkpoint says of a node
    is left as it is."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and not _has_lowering(node):
            for result in (node, *(u for u in node.users if u.target is operator.getitem)):
                if isinstance(result.meta.get("val"), torch.Tensor):
                    result.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return min_cut_rematerialization_partition(joint, *operands, **named)


def _has_lowering(node: Any) -> bool:
    return node.target in LOWERINGS or node.target in CHECKS or node.target is operator.getitem

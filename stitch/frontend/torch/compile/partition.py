"""How aot_autograd divides a graph of values and gradients into a forward and a backward one.

Comes in: the joint graph. Goes out: the two, as torch's own cut finds them, but that results of
operators that torch runs are saved: what programs compute again is fused, what torch computes
again costs its whole time and may be random. Must not know: devices.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import get_aten_target, rand_ops
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from stitch.frontend.torch.compile.graph_cut import ORIGIN, copied, is_random, is_tensor, unit_of
from stitch.frontend.torch.compile.program_form import Building, GraphSettings
from stitch.frontend.torch.compile.symbolic_sizes import is_static
from stitch.frontend.torch.lowering import CHECKS, lowering_of

aten = torch.ops.aten


def partition(joint: Any, *operands: Any, **named: Any) -> Any:
    """The forward and the backward graph of a joint one. What a user's checkpoint says of a node
    is left as it is."""
    _part_from_running_statistics(joint.graph)
    refused = _refused(joint) if is_static(joint.graph) else _without_lowering(joint.graph)
    for node in set(refused):
        for result in (node, *(u for u in node.users if u.target is operator.getitem)):
            if is_tensor(result):
                result.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    # Torch makes one of nodes that are alike, and knows by a list of its own which ones draw.
    is_known = not any(
        is_random(n) and get_aten_target(n) not in rand_ops for n in joint.graph.nodes
    )
    with functorch_config.patch(cse=functorch_config.cse and is_known):
        return min_cut_rematerialization_partition(joint, *operands, **named)


def _part_from_running_statistics(graph: Any) -> None:
    """Backward passes of batches in training read no running statistics, which are overwritten
    when they run: gradients are taken without, and what a checkpoint computes again is."""
    for node in list(graph.nodes):
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        is_trained = node.target is aten._native_batch_norm_legit_functional.default
        if not is_trained or not node.args[5] or "recompute" not in node.meta:
            continue
        with graph.inserting_before(node):
            operands = *node.args[:3], *node.args[5:]
            again = graph.call_function(aten._native_batch_norm_legit.no_stats, operands)
        again.meta = {**node.meta, "val": tuple(node.meta["val"][:3])}
        for result in list(node.users):
            if result.args[1] < 3:
                result.args = (again, result.args[1])
            else:
                result.meta.pop("recompute", None)
        node.meta.pop("recompute")


def _refused(joint: Any) -> Iterable[Any]:
    """What torch will run; values and gradients are lowered alike in one graph and in two."""
    # The modes that trace: constants of the graph are read here, and have data.
    with _disable_current_modes():
        building = Building(copied(joint.graph), joint, GraphSettings("joint", role="forward"))
    origins = (refusal.node.meta.get(ORIGIN) for refusal in building.refusals)
    return [unit_of(node) for node in origins if isinstance(node, torch.fx.Node)]


def _without_lowering(graph: Any) -> Iterable[Any]:
    known = CHECKS | {operator.getitem}
    return [
        n for n in graph.nodes
        if n.op == "call_function" and n.target not in known and lowering_of(n.target) is None
    ]  # fmt: skip

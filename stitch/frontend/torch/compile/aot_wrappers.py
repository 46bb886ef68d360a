"""What torch's aot_autograd wraps around a compiled graph, and where nothing needs it.

Comes in: what aot_autograd knows of a graph, what the graph became, and that in its wrappers. Goes
out: what is called in their place. Must not know: devices.

Around a graph without gradients aot_autograd writes what it changed back to its arguments, makes
views that share bytes, puts subclasses together, keeps effects in their order, and turns gradients
and autocast off for what torch runs inside. Where plain tensors are read and results are new ones,
all of that does nothing, in 2 us a call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import PlainTensorMeta

from stitch.frontend.torch.compile.graph_program import GraphProgram

_are_gradients_on = torch.is_grad_enabled
_is_autocast_on = torch._C._is_any_autocast_enabled


@dataclass(frozen=True, slots=True)
class Inference:
    """A graph without gradients: how many arguments it takes, what aot_autograd knows of it, and
    whether all that it consists of is torch's own operators."""

    takes: int
    metadata: Any
    is_torchs: bool

    @staticmethod
    def of(graph: Any, metadata: Any) -> Inference:
        """That of a graph of aot_autograd, before it is cut."""
        takes = sum(node.op == "placeholder" for node in graph.nodes)
        return Inference(takes, metadata, all(map(_is_torchs, graph.nodes)))

    def unwrapped(
        self, run: Callable[..., Any], wrapped: Callable[..., Any], examples: Sequence[Any]
    ) -> Callable[..., Any]:
        """What is called with arguments like the examples: what the graph became, where nothing
        needs the wrappers, or that in them."""
        # Arguments may be left out for coming twice, be added, or be in lists.
        is_flat = self.takes == len(examples) and all(map(_is_tensor, examples))
        if not is_flat or self.metadata is None or not _is_plain(self.metadata):
            return wrapped
        if isinstance(getattr(run, "__self__", None), GraphProgram):
            return lambda *arguments: run(list(arguments))
        if not self.is_torchs:
            return wrapped

        def where_modes_are_off(*arguments: Any) -> Any:
            # Between programs torch runs operators, which would listen to them.
            if _are_gradients_on() or _is_autocast_on():
                return wrapped(*arguments)
            return run(list(arguments))

        return where_modes_are_off


def _is_torchs(node: Any) -> bool:
    """Whether a node is no operator of somebody else, which torch looks at when it runs first, nor
    one that calls functions."""
    if node.op != "call_function" or node.target is operator.getitem:
        return bool(node.op != "get_attr")
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace: str = node.target.namespace
    return namespace in ("aten", "prims")


def _is_tensor(example: Any) -> bool:
    return isinstance(example, torch.Tensor)


def _is_plain(metadata: Any) -> bool:
    """Whether a graph changes none of its arguments, gives none of their bytes, and all that it
    takes and gives is plain tensors."""
    return not bool(
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_mutated_graph_handled_indices
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.dynamic_outputs
        or metadata.grad_enabled_mutation is not None
        or metadata.tokens
        or metadata.is_rng_op_functionalized
        or metadata.num_graphsafe_rng_states
        or not all(isinstance(m, PlainTensorMeta) for m in metadata.subclass_inp_meta)
        or not all(isinstance(m, PlainTensorMeta) for m in metadata.subclass_fw_graph_out_meta)
    )

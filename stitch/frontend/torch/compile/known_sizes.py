"""Graphs of aot_autograd with symbolic sizes, for arguments of given shapes.

Comes in: an fx graph, perhaps with symbolic sizes, and the arguments of a call. Goes out: a graph
whose tensors have known shapes and whose numbers are written where they are read. Must not know:
builders.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_static(graph: Any) -> bool:
    """Whether all sizes in a graph are numbers already."""
    return not any(_has_symbols(node.meta.get("val")) for node in graph.nodes)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return any(isinstance(size, torch.SymInt) for size in sizes)
    if isinstance(value, list | tuple):
        return any(map(_has_symbols, value))
    return isinstance(value, _SYMBOLS)


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Remembers what every node gives."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Any, Any] = {}

    def run_node(self, node: Any) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def with_sizes_of(module: Any, arguments: Sequence[Any]) -> Any:
    """A copy of a graph module for arguments of just these shapes."""
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    sized = copy.deepcopy(module)
    with mode, torch.no_grad():
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)
            if isinstance(a, torch.Tensor)
            else a
            for a in arguments
        ]
        recorder = _Recorder(sized)
        recorder.run(*fakes)
    numbers = {n: v for n, v in recorder.results.items() if isinstance(v, _NUMBERS)}
    for node in sized.graph.nodes:
        if node.op != "output":
            node.meta["val"] = recorder.results[node]
        if node.op not in ("placeholder", "get_attr"):
            node.args = torch.fx.node.map_arg(node.args, lambda n: numbers.get(n, n))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: numbers.get(n, n))
    for node in reversed(list(sized.graph.nodes)):
        if node in numbers and node.op == "call_function" and not node.users:
            sized.graph.erase_node(node)
    return sized

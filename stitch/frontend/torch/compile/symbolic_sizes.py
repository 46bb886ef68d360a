"""Graphs with symbolic sizes: functions that compile a graph for each set of shapes they meet.

What depends on data (how many elements are not zero) is torch's: programs get it when it is known.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from stitch.frontend.torch.compile.graph_program import boxed

_log = logging.getLogger(__name__)
#: Shapes for which one symbolic graph keeps programs; the oldest go first.
MAX_SHAPES = 64
DEPENDS_ON_DATA = "the sizes of what it reads or gives depend on data"


class ByShapes:
    """A graph with symbolic sizes: a function for each set of shapes that it is called with."""

    def __init__(self, module: Any, compile_sized: Callable[[Any], Callable[..., Any]]) -> None:
        self._module, self._compile = module, compile_sized
        self._runs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @boxed
    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        key = tuple(map(_kind, arguments))
        run = self._runs.get(key)
        if run is None:
            _log.info("compiled anew, for shapes number %d: %s", len(self._runs) + 1, key)
            run = self._runs[key] = self._compile(with_sizes_of(self._module, arguments))
            while len(self._runs) > MAX_SHAPES:
                del self._runs[next(iter(self._runs))]
        return run(arguments)  # type: ignore[no-any-return]  # torch has no types here


def _kind(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.layout is not torch.strided:
        return argument.shape, argument.layout, argument.dtype
    return argument.shape, argument.stride(), argument.dtype


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_static(graph: Any) -> bool:
    """Whether all sizes in a graph are numbers already."""
    return not any(has_symbols(node.meta.get("val")) for node in graph.nodes)


def has_symbols(value: Any) -> bool:
    """Whether a size, or a number, in what a node gives is a symbol."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return any(isinstance(size, torch.SymInt) for size in sizes)
    if isinstance(value, list | tuple):
        return any(map(has_symbols, value))
    return isinstance(value, _SYMBOLS)


def depending_on_data(graph: Any) -> list[Any]:
    """The operators of a graph that read or give what has sizes, or is a number, out of data."""
    values = {node: _depends(node.meta.get("val")) for node in graph.nodes}
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (values[node] or any(values[source] for source in node.all_input_nodes))
    ]


def _depends(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_depends, value))
    is_sized = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return is_sized and bool(free_unbacked_symbols(value))


def _fake_of(tensor: Any, mode: Any) -> Any:
    if tensor.layout is not torch.strided:
        return mode.from_tensor(tensor)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Remembers what every node gives."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Any, Any] = {}

    def run_node(self, node: Any) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def _size_inner_graphs(module: Any, results: Mapping[Any, Any]) -> None:
    """Gives the graphs that operators of a graph run the sizes of what these are given."""
    for node in module.graph.nodes:
        inner = [
            source.target for source in node.all_input_nodes
            if source.op == "get_attr" and isinstance(results[source], torch.fx.GraphModule)
        ]  # fmt: skip
        if not inner:
            continue
        lists = [given for given in node.args if isinstance(given, list | tuple)]
        operands = torch.fx.node.map_arg([v for given in lists for v in given], results.get)
        for target in inner:
            setattr(module, target, with_sizes_of(getattr(module, target), operands))


def with_sizes_of(module: Any, arguments: Sequence[Any]) -> Any:
    """A copy of a graph module for arguments of just these shapes."""
    # Loops ask it for the symbols that they make.
    shapes = ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sized = copy.deepcopy(module)
    with mode, torch.no_grad():
        fakes = [_fake_of(a, mode) if isinstance(a, torch.Tensor) else a for a in arguments]
        recorder = _Recorder(sized)
        recorder.run(*fakes)
    _size_inner_graphs(sized, recorder.results)
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

"""Graphs of aot_autograd with symbolic sizes: compiled once with named sizes.

The symbols of torch's graph become named sizes. Each set of sizes has the static program of
`DynamicProgram.at`. Sizes with which a guard of the compiler does not hold get another compilation,
with these sizes as examples; what named sizes cannot express is specialised: its graph is traced
again for each set of shapes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from stitch.compiler import DynamicProgram
from stitch.errors import CompileError
from stitch.frontend.torch.compile.graph_program import (
    GraphLowering,
    GraphProgram,
    boxed,
    compile_named,
    program_at,
)
from stitch.frontend.torch.shared_storage import SharedStorage
from stitch.frontend.torch.symbolic_export import TorchSizes
from stitch.frontend.torch.torch_internals import FakeTensorMode
from stitch.ops import MAX_NBYTES
from stitch.program import MAX_SIZE, Dim, SymbolicSizes

_log = logging.getLogger(__name__)
#: Maximum number of sets of sizes for which a graph caches programs; the oldest are removed.
MAX_SHAPES = 256
DEPENDS_ON_DATA = "the sizes of its operands or results depend on data"

# Named sizes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphSymbols:
    """The symbols of the arguments of a graph.

    Attributes:
        sources: Where a call has the value of each symbol: the position of an argument, and the
            axis of its shape or (with `is_stride`) of its strides; None: the argument itself.
        dims: The named sizes of the symbols, in the same order.
        hints: Torch's examples of the sizes, by name.
        names: The names of the sizes, by symbol.
    """

    sources: tuple[tuple[int, int | None, bool], ...]
    dims: tuple[Dim, ...]
    hints: Mapping[str, int]
    names: Mapping[Any, str]

    @staticmethod
    def of(graph: Any) -> GraphSymbols:
        """Read the arguments of a graph; symbols that no argument has by themselves are left out.

        Raises:
            CompileError: a symbol has no value, or has no bounds that a named size can have; or
                torch has recorded no type of a result (random operators of checkpoints).
        """
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                raise CompileError("torch has recorded no type of a result", got=node.name)
        found: dict[Any, tuple[tuple[int, int | None, bool], Any]] = {}
        for position, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
            value = node.meta.get("val")
            sized: list[tuple[int | None, bool, Any]] = []
            if isinstance(value, torch.SymInt):
                sized = [(None, False, value)]
            elif isinstance(value, torch.Tensor):
                sized = [(axis, False, size) for axis, size in enumerate(value.shape)]
                if value.layout is torch.strided:
                    sized += [(axis, True, size) for axis, size in enumerate(value.stride())]
            for axis, is_stride, size in sized:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, ((position, axis, is_stride), size))
        names = {symbol: str(symbol) for symbol in found}
        sizes = [size for _, size in found.values()]
        hints = dict(zip(names.values(), (size.node.hint for size in sizes), strict=True))
        for name, hint in hints.items():
            if type(hint) is not int:  # It depends on data, or is a length of a nested tensor.
                raise CompileError(f"size {name} has no example", got=str(hint))
        dims: list[Dim] = []
        for symbol, size in zip(found, sizes, strict=True):
            bounds = size.node.shape_env.bound_sympy(symbol)
            least, most = max(bounds.lower, 0), min(bounds.upper, MAX_SIZE)
            if not least <= hints[names[symbol]] <= most:
                raise CompileError(f"the example of size {symbol} is {hints[names[symbol]]}")
            dims.append(Dim(names[symbol], int(least), int(most)))
        sources = tuple(source for source, _ in found.values())
        return GraphSymbols(sources, tuple(dims), hints, names)

    def sizes(self, hints: Mapping[str, int]) -> TorchSizes:
        """Return the named sizes for one compilation, with these examples."""
        sizes = SymbolicSizes.restored(self.dims, hints, ())
        sizes.is_open = True
        return TorchSizes(sizes, dict(self.names))

    def values(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Return the sizes of a call."""
        return tuple([
            arguments[position] if axis is None
            else arguments[position].stride(axis) if is_stride
            else arguments[position].shape[axis]
            for position, axis, is_stride in self.sources
        ])  # fmt: skip


@dataclass(slots=True)
class NamedSizes:
    """A graph that was compiled with named sizes.

    `compiled`: its lowerings with their programs (None: nothing is computed); a further one where a
    guard of the others does not hold.
    """

    symbols: GraphSymbols
    storage: SharedStorage
    compiled: list[tuple[GraphLowering, DynamicProgram | None]] = field(default_factory=list)

    @staticmethod
    def of(
        symbols: GraphSymbols, lowering: GraphLowering, storage: SharedStorage
    ) -> tuple[NamedSizes, GraphProgram]:
        """Compile a lowered graph; return it, and its program at torch's examples.

        Raises:
            CompileError: The graph has what named sizes cannot express.
        """
        named = NamedSizes(symbols, storage)
        named.compiled.append((lowering, compile_named(lowering, storage.device)))
        return named, named.at(symbols.hints)

    @property
    def first(self) -> GraphLowering:
        """The lowering at torch's examples."""
        return self.compiled[0][0]

    def at(self, sizes: Mapping[str, int]) -> GraphProgram:
        """Return the static program at some sizes.

        Raises:
            CompileError: The sizes are out of bounds, or the graph has no program there.
            OutOfMemoryError: The program does not fit the machine.
        """
        found = next((each for each in self.compiled if _holds(each[0], sizes)), None)
        lowering, program = found or self._recompiled(sizes)
        return GraphProgram(program_at(lowering, program, self.storage.device, sizes), self.storage)

    def _recompiled(self, sizes: Mapping[str, int]) -> tuple[GraphLowering, DynamicProgram | None]:
        name = self.first.settings.name
        for dim in self.symbols.dims:
            if not dim.least <= sizes[dim.name] <= dim.most:
                raise CompileError(f"size {dim.name} of graph {name} is {sizes[dim.name]}")
        lowering = self.first.relowered(self.symbols.sizes(sizes))
        if lowering.refusals:
            raise CompileError(lowering.refusals[0].reason)
        self.compiled.append((lowering, compile_named(lowering, self.storage.device)))
        del self.compiled[1:-MAX_SHAPES]
        self.storage.counts.recompilations += 1
        _log.info("graph %s: compilation %d, for sizes %s, with guards: %s", name,
                  len(self.compiled), dict(sizes), self.guards())  # fmt: skip
        return self.compiled[-1]

    def guards(self) -> tuple[str, ...]:
        """The guards of the first compilation, with the lines that relied on them, but those that
        bound the bytes of a result."""
        guards = self.first.named.guards
        return tuple(guard.text() for guard in guards if guard.right.constant != MAX_NBYTES)


def _holds(lowering: GraphLowering, sizes: Mapping[str, int]) -> bool:
    named = lowering.named
    return all(d.least <= sizes[n] <= d.most for n, d in named.dims.items()) and all(
        guard.holds(sizes) for guard in named.guards
    )


# Graphs for each set of sizes ---------------------------------------------------------------------


class ByShapes:
    """A graph with symbolic sizes: a function for each set of sizes.

    It is the program of `named` there; where there is none, the graph is specialised for the shapes
    of the arguments.
    """

    def __init__(
        self, module: Any, specialise: Callable[[Any], Callable[..., Any]],
        named: NamedSizes | None = None, first: GraphProgram | None = None,
    ) -> None:  # fmt: skip
        self._module, self._specialise, self._named = module, specialise, named
        self._runs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        if named is not None and first is not None:
            self._runs[tuple(named.symbols.hints.values())] = first.__call__

    @property
    def is_named(self) -> bool:
        """Whether it was compiled with named sizes."""
        return self._named is not None

    @property
    def has_program(self) -> bool:
        """Whether a program with named sizes computes something."""
        return self._named is not None and self._named.first.graph is not None

    @boxed
    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        named = self._named
        key = tuple(map(_kind, arguments)) if named is None else named.symbols.values(arguments)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._run_for(key, arguments)
            while len(self._runs) > MAX_SHAPES:
                self._runs.pop(next(iter(self._runs)), None)
        return run(arguments)  # type: ignore[no-any-return]  # torch has no types here

    def _run_for(self, key: tuple[Any, ...], arguments: list[Any]) -> Callable[..., Any]:
        if self._named is not None:
            names = self._named.symbols.hints
            try:
                return self._named.at(dict(zip(names, key, strict=True))).__call__
            except CompileError as error:
                _log.info("graph %s: %s", self._named.first.settings.name, error)
        _log.info("specialising for set %d of shapes: %s", len(self._runs) + 1, key)
        return self._specialise(with_sizes_of(self._module, arguments))


# Specialised graphs -------------------------------------------------------------------------------


def _kind(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.layout is not torch.strided:
        return argument.shape, argument.layout, argument.dtype
    return argument.shape, argument.stride(), argument.dtype


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_static(graph: Any) -> bool:
    """Whether no size in a graph is symbolic."""
    return not any(has_symbols(node.meta.get("val")) for node in graph.nodes)


def has_symbols(value: Any) -> bool:
    """Whether the result of a node has symbolic sizes, or is a symbol."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return any(isinstance(size, torch.SymInt) for size in sizes)
    if isinstance(value, list | tuple):
        return any(map(has_symbols, value))
    return isinstance(value, _SYMBOLS)


def depending_on_data(graph: Any) -> list[Any]:
    """The nodes with operands or results whose sizes or values depend on data."""
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
    """Records the results of all nodes."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Any, Any] = {}

    def run_node(self, node: Any) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def _size_inner_graphs(module: Any, results: Mapping[Any, Any]) -> None:
    """Specialize the inner graphs of operators for the sizes of their operands."""
    for node in module.graph.nodes:
        inner = [
            source.target for source in node.all_input_nodes
            if source.op == "get_attr" and isinstance(results[source], torch.fx.GraphModule)
        ]  # fmt: skip
        if not inner:
            continue
        lists = [argument for argument in node.args if isinstance(argument, list | tuple)]
        operands = torch.fx.node.map_arg([v for values in lists for v in values], results.get)
        for target in inner:
            setattr(module, target, with_sizes_of(getattr(module, target), operands))


def with_sizes_of(module: Any, arguments: Sequence[Any]) -> Any:
    """A copy of a graph module specialized for the shapes of these arguments."""
    # Loops create symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
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

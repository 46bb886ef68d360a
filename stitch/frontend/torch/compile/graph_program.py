"""A graph of aot_autograd as a loaded program that takes and gives torch tensors.

Comes in: an fx graph with known shapes, the storage that a device shares with torch. Goes out:
`GraphProgram`: called with the graph's arguments it gives the graph's outputs. Which argument goes
where is decided once. Must not know: dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import array_of, data_type_of
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.compile.graph_outputs import (
    Result,
    axes_in_memory,
    shown,
    sorted_outputs,
)
from stitch.frontend.torch.compile.shared_storage import ArgumentSlot, SharedStorage
from stitch.frontend.torch.lowering import (
    KEY_LIMIT,
    KEY_NAME,
    fuse_transposed_products,
    give_key,
    join_selected,
)
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, parse_wish
from stitch.program import DataType, InputKind
from stitch.runtime import PreparedGraph, chain_graph
from stitch.ttb import Binary

PRODUCER = "stitch torch.compile"
REMEDY = "put what Stitch lacks into a function under @torch.compiler.disable: torch runs it then"


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What one graph is compiled with.

    `static`: positions of arguments that are the same storages at every call. `exact_outputs`: how
    many outputs the user sees, and so with the strides of eager torch. `optimize`: run the passes.
    `shares_outputs`: outputs that are views of one value are to share its bytes.
    """

    name: str
    static: frozenset[int] = frozenset()
    exact_outputs: int = 0
    optimize: bool = True
    has_dram: bool = False
    shares_outputs: bool = False


Run = TypeVar("Run", bound=Callable[..., Any])


def boxed(run: Run) -> Run:
    """Mark, for aot_autograd, what takes its arguments in a list and empties it: they may die
    early."""
    run._boxed_call = True  # type: ignore[attr-defined]  # how it asks
    return run


class GraphProgram:
    """A graph on a device: a function of torch tensors. Raises what loading and running raise."""

    def __init__(self, module: Any, storage: SharedStorage, settings: GraphSettings) -> None:
        self._storage = storage
        self._device = storage.device
        built = _Building(module, settings)
        self._outputs = built.outputs
        self._slots = tuple(ArgumentSlot(p, p in settings.static) for p in built.positions)
        self._has_key = built.has_key
        self.graph = built.graph
        self._prepared = None
        if built.graph is not None:
            machine = self._device.machine
            executor = rated_executor(self._device.executor)
            options = CompileOptions(optimize=settings.optimize, executor=executor)
            program = compile_graph(built.graph, machine, options).program
            loaded = self._device.load(Binary((program,), machine.shape, PRODUCER))
            table, _ = chain_graph((loaded,), ({},), "compiled graph")
            self._prepared = PreparedGraph(self._device, table, title="the compiled graph")

    @boxed
    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run it on the graph's arguments, and empty their list; the outputs are ready."""
        storage, prepared = self._storage, self._prepared
        with self._device.lock:
            results: Any = ()
            if prepared is not None:
                given = storage.arguments(arguments, self._slots)
                if self._has_key:
                    given.append(torch.randint(KEY_LIMIT, (1,)).numpy())
                results = prepared.run(tuple(given))
                if type(results) is not tuple:
                    results = (results,)
            outputs = shown(self._outputs, arguments, results, storage.result)
        arguments.clear()
        return outputs


class _Building:
    """From an fx graph to a computation graph, and the way of arguments and outputs through it."""

    def __init__(self, module: Any, settings: GraphSettings) -> None:
        self.module, self.settings = module, settings
        fx_graph = module.graph
        nodes = [n for n in fx_graph.nodes if n.op == "placeholder"]
        self._positions = {node.name: i for i, node in enumerate(nodes)}
        self.has_key = give_key(fx_graph)
        self._tensors = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        _check_devices(self._tensors)
        self._results, self.outputs = sorted_outputs(
            fx_graph, self._positions, settings.exact_outputs, share=settings.shares_outputs
        )
        fuse_transposed_products(fx_graph)
        join_selected(fx_graph)
        #: Positions of the arguments that the program takes, in the order of its inputs.
        self.positions: list[int] = []
        self.builder = ComputationGraphBuilder(settings.name)
        self.graph: ComputationGraph | None = self._lowered(fx_graph) if self._results else None

    def _lowered(self, fx_graph: Any) -> ComputationGraph:
        bindings = {node.name: self._binding(node) for node in self._tensors}
        key: list[SymbolicTensor] = []
        if self.has_key:
            bindings[KEY_NAME] = lambda: key[0]
        # In the order of the arguments, whichever is read first; the key comes last.
        inputs = {node.name: bindings[node.name]() for node in self._tensors if node.users}
        if self.has_key:
            key.append(self.builder.input(KEY_NAME, (1,), DataType.INT64, InputKind.KEY))
        bindings.update({name: partial(inputs.__getitem__, name) for name in inputs})
        values = lower_graph(
            fx_graph, self.builder, bindings, self._attribute, self.settings.name, REMEDY
        )
        for output in self._results:
            self._declare(output, values[output.index])
        return self.builder.build()

    def _binding(self, node: Any) -> Callable[[], SymbolicTensor]:
        def declare() -> SymbolicTensor:
            position, value = self._positions[node.name], node.meta["val"]
            self.positions.append(position)
            kind = InputKind.ACTIVATION
            if position in self.settings.static:
                # Not PARAMETER: a program of those alone would be evaluated once.
                kind = InputKind.STATE
            if self.settings.has_dram:
                # It comes from the host or from another program's results, which lie there.
                self.builder.wish(parse_wish(f"input.{node.name}.space=dram"))
            where = f"argument {node.name}"
            with self.builder.at(where):
                data_type = data_type_of(value.dtype, where)
                return self.builder.input(node.name, tuple(value.shape), data_type, kind)

        return declare

    def _declare(self, output: Result, value: SymbolicTensor) -> None:
        b, name = self.builder, f"output_{output.index}"
        if output.strides is not None:
            order = axes_in_memory(output.strides)
            value = b.transpose(value, order)
        b.output(name, value)
        # Torch looks at results for as long as it likes: L1 is too small for that.
        if self.settings.has_dram:
            b.wish(parse_wish(f"output.{name}.space=dram"))

    def _attribute(self, target: str) -> Any:
        value = attrgetter(target)(self.module)
        if not isinstance(value, torch.Tensor):
            return value
        return self.builder.parameter(target, array_of(value))


def _check_devices(nodes: Sequence[Any]) -> None:
    for node in nodes:
        value = node.meta["val"]
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise CompileError(
                "Stitch takes dense tensors of the CPU",
                where=f"argument {node.name}",
                got=f"{value.layout} on {value.device}",
                remedy="call .to('cpu'), and .to_dense(), before the compiled function",
            )

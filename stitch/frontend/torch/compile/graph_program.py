"""A graph of aot_autograd as a loaded program that takes and gives torch tensors.

Comes in: an fx graph with known shapes, the storage that a device shares with torch. Goes out:
`Building`: its computation graph, or what of it is refused; `GraphProgram`: called with the graph's
arguments it gives the graph's outputs. Which argument goes where is decided once. Must not know:
dynamo, what becomes of refused operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import array_of
from stitch.frontend.torch.aten_walk import (
    Refusal,
    Unreadable,
    lower_graph,
    readable_type,
    try_lowering,
)
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
_log = logging.getLogger(__name__)
REMEDY = (
    'options={"fallback": "torch"}, the default: torch runs what Stitch lacks then; or put it '
    "into a function under @torch.compiler.disable"
)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What one graph is compiled with.

    `static`: positions of arguments that are the same storages at every call. `exact_outputs`: how
    many outputs the user sees, and so with the strides of eager torch. `optimize`: run the passes.
    `role`: forward, backward or inference. `shares_outputs`: outputs that are views of one value
    are to share its bytes. `raises`: what cannot be compiled is an error. `min_operations`: where a
    graph is cut, parts with fewer are left to torch. `torch_draws`: random numbers are those that
    eager torch would draw.
    """

    name: str
    static: frozenset[int] = frozenset()
    exact_outputs: int = 0
    optimize: bool = True
    has_dram: bool = False
    role: str = "inference"
    raises: bool = False
    min_operations: int = 1
    torch_draws: bool = False

    @property
    def shares_outputs(self) -> bool:
        """Where there are gradients, aot_autograd looks after that."""
        return self.role == "inference"


Run = TypeVar("Run", bound=Callable[..., Any])


def boxed(run: Run) -> Run:
    """Mark, for aot_autograd, what takes its arguments in a list and empties it: they may die
    early."""
    run._boxed_call = True  # type: ignore[attr-defined]  # how it asks
    return run


class GraphProgram:
    """A graph on a device: a function of torch tensors. Raises what loading and running raise."""

    def __init__(self, built: Building, storage: SharedStorage) -> None:
        self._storage = storage
        self._device = storage.device
        settings = built.settings
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
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("graph %s: %s", settings.name, program.text())
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


class Building:
    """From an fx graph to a computation graph, and the way of arguments and outputs through it.

    The fx graph is changed. `root` has its attributes. With `settings.raises` whatever cannot be
    compiled raises `CompileError`; else it is in `refusals`, and there is no computation graph.
    """

    def __init__(self, fx_graph: Any, root: Any, settings: GraphSettings) -> None:
        self.root, self.settings = root, settings
        nodes = [n for n in fx_graph.nodes if n.op == "placeholder"]
        self._positions = {node.name: i for i, node in enumerate(nodes)}
        self.has_key = give_key(fx_graph)
        self._tensors = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        self._results, self.outputs = sorted_outputs(
            fx_graph, self._positions, settings.exact_outputs, share=settings.shares_outputs
        )
        fuse_transposed_products(fx_graph)
        join_selected(fx_graph)
        #: Positions of the arguments that the program takes, in the order of its inputs.
        self.positions: list[int] = []
        self.refusals: Sequence[Refusal] = ()
        self.builder = ComputationGraphBuilder(settings.name)
        self.graph: ComputationGraph | None = self._lowered(fx_graph) if self._results else None

    def _lowered(self, fx_graph: Any) -> ComputationGraph | None:
        bindings: dict[str, Callable[[], Any]] = {}
        # In the order of the arguments, whichever is read first; the key comes last.
        for node in self._tensors:
            if node.users:
                bindings[node.name] = partial(_given, self._input(node))
        for name in self._positions.keys() - bindings.keys():
            bindings[name] = partial(Unreadable, "it reads what programs cannot: no tensor")
        if self.has_key:
            key = self.builder.input(KEY_NAME, (1,), DataType.INT64, InputKind.KEY)
            bindings[KEY_NAME] = partial(_given, key)
        where = fx_graph, self.builder, bindings, self._attribute
        if self.settings.raises:
            values = lower_graph(*where, self.settings.name, REMEDY)
        else:
            values, self.refusals = try_lowering(*where)
            if self.refusals:
                return None
        for output in self._results:
            self._declare(output, values[output.index])
        return self.builder.build()

    def _input(self, node: Any) -> SymbolicTensor | Unreadable:
        position, where = self._positions[node.name], f"argument {node.name}"
        try:
            kind = readable_type(node.meta["val"])
        except CompileError as error:
            if self.settings.raises:
                error.where = where
                raise
            return Unreadable.because(error)
        self.positions.append(position)
        # Not PARAMETER: a program of those alone would be evaluated once.
        is_static = position in self.settings.static
        if self.settings.has_dram:
            # It comes from the host or from another program's results, which lie there.
            self.builder.wish(parse_wish(f"input.{node.name}.space=dram"))
        with self.builder.at(where):
            return self.builder.input(
                node.name, kind.shape, kind.data_type,
                InputKind.STATE if is_static else InputKind.ACTIVATION,
            )  # fmt: skip

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
        value = attrgetter(target)(self.root)
        if not isinstance(value, torch.Tensor):
            return value
        return self.builder.parameter(target, array_of(value))


def _given(value: Any) -> Any:
    return value

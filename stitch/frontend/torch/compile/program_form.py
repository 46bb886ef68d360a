"""A graph of aot_autograd as a compiled program, and what stands around that."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from stitch.compile_cache import CompileCache, KeptCompilation
from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import ComplexTensor, array_of, in_pairs, is_complex
from stitch.frontend.torch.aten_walk import (
    Unreadable,
    lower_graph,
    readable_type,
    try_lowering,
)
from stitch.frontend.torch.compile.graph_outputs import (
    Output,
    Result,
    axes_in_memory,
    sorted_outputs,
    without_views,
)
from stitch.frontend.torch.lowering import (
    KEY_NAME,
    give_key,
    join_selected,
)
from stitch.frontend.torch.node_places import location_of, name_of
from stitch.frontend.torch.refused_nodes import Refusal
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, parse_placement
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
)
from stitch.report import Device
from stitch.ttb import Binary, encode, load

PRODUCER = "stitch torch.compile"
_log = logging.getLogger(__name__)
REMEDY = (
    'options={"fallback": "torch"}, the default: torch runs what Stitch lacks then; or put it '
    "into a function under @torch.compiler.disable"
)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What one graph is compiled with.

    `static`: positions of arguments that are the same storages at every call; `fresh`: of those
    that are made anew for each. `exact_outputs`: how many outputs the user sees, and so with the
    strides of eager torch. `optimize`: run the passes. `role`: forward, backward, inference, or a
    part of one. `shares_outputs`: outputs that are views of one value are to share its bytes.
    `raises`: what cannot be compiled is an error. `min_operations`: where a graph is cut, parts
    with fewer are left to torch. `programs`: where programs are kept on disk.
    `copies_results`: torch may get copies of results, for no backward pass reads them.
    """

    name: str
    static: frozenset[int] = frozenset()
    exact_outputs: int = 0
    optimize: bool = True
    has_dram: bool = False
    role: str = "inference"
    raises: bool = False
    min_operations: int = 1
    programs: CompileCache | None = None
    copies_results: bool = False
    fresh: frozenset[int] = frozenset()

    @property
    def shares_outputs(self) -> bool:
        """Also where there are gradients: aot_autograd asks outputs what views to make.

        Of a part of a graph torch makes the views, and of a backward pass the user sees none.
        """
        return self.role in ("inference", "forward")


@dataclass(frozen=True, slots=True)
class ProgramForm:
    """What a graph was compiled to: a binary of one program (None where nothing is computed), which
    arguments it takes, in order, which of them are static, whether a key comes last, and what the
    graph's outputs are."""

    name: str
    binary: Binary | None
    positions: tuple[int, ...]
    static: frozenset[int]
    has_key: bool
    outputs: tuple[Output, ...]
    #: Positions of complex arguments, which it takes as pairs of parts.
    complex: frozenset[int] = frozenset()
    #: Positions of arguments that are made anew for every call.
    fresh: frozenset[int] = frozenset()

    def as_bytes(self) -> bytes:
        """Itself as bytes, for torch's cache, which holds pickles."""
        binary = None if self.binary is None else encode(self.binary)
        rest = (self.positions, self.static, self.has_key, self.outputs, self.complex, self.fresh)
        return pickle.dumps((self.name, binary, *rest))

    @staticmethod
    def of_bytes(data: bytes) -> ProgramForm:
        """What `as_bytes` gave, of a cache that is trusted as torch trusts it."""
        name, binary, positions, static, has_key, outputs, *places = pickle.loads(data)
        decoded = None if binary is None else load(binary, verify="full")
        shown = without_views(outputs)
        return ProgramForm(name, decoded, positions, static, has_key, shown, *places)


def compiled_form(built: Building, device: Device) -> ProgramForm:
    """A graph, compiled for a device; raises what compiling raises."""
    settings, binary = built.settings, None
    if built.graph is not None:
        binary = _binary(built.graph, device, settings)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("graph %s: %s", settings.name, binary.programs[0].text())
    positions = tuple(built.positions)
    static = settings.static.intersection(positions)
    return ProgramForm(
        settings.name, binary, positions, static, built.has_key, tuple(built.outputs),
        frozenset(built.complex), settings.fresh.intersection(positions),
    )  # fmt: skip


def _binary(graph: ComputationGraph, device: Device, settings: GraphSettings) -> Binary:
    machine = device.machine
    options = CompileOptions(
        optimize=settings.optimize, reassociate=True, executor=rated_executor(device.executor)
    )

    def compile() -> KeptCompilation:
        made = compile_graph(graph, machine, options)
        return KeptCompilation(Binary((made.program,), machine.shape, PRODUCER), made.warnings)

    if settings.programs is None:
        return compile().binary
    # Graphs are counted, and what another process has read is not: no key has the number.
    graph = replace(graph, name=settings.role)
    found = settings.programs.compilation(graph, machine, options, compile)
    for warning in found.kept.warnings:
        if warning.kind.startswith("cache_"):
            _log.warning("graph %s: %s: %s", settings.name, warning.where, warning.detail)
    if found.is_hit:
        _log.info("graph %s: its program is read from the cache", settings.name)
    (program,) = found.kept.binary.programs
    return Binary((replace(program, name=settings.name),), machine.shape, PRODUCER)


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
            fx_graph, self._positions, settings.exact_outputs, share=settings.shares_outputs,
            may_copy=settings.copies_results,
        )  # fmt: skip
        join_selected(fx_graph)
        #: Positions of the arguments that the program takes, in the order of its inputs.
        self.positions: list[int] = []
        #: Those of complex ones.
        self.complex: list[int] = []
        self.refusals: Sequence[Refusal] = ()
        #: For each operation of the graph, the node that it was added for.
        self._nodes: Sequence[Any] = ()
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
            values, self.refusals, self._nodes = try_lowering(*where)
            if self.refusals:
                return None
        for output in self._results:
            self._declare(output, values[output.index])
        return self.builder.build()

    def refused_by(self, device: Device, error: CompileError) -> Sequence[Refusal]:
        """The nodes that a device's executor refuses to run, with its reasons: each operation is
        tried by itself. All nodes, where it refuses none alone, only what the whole became."""
        assert self.graph is not None, "what has no program is refused by no executor"
        reasons: dict[Any, str] = {}
        for operation, node in zip(self.graph.operations, self._nodes, strict=True):
            if node not in reasons:
                try:
                    _check_runs(_one_operation(self.graph, operation), device, self.settings)
                except CompileError as alone:
                    reasons[node] = alone.what
        for node in () if reasons else dict.fromkeys(self._nodes):
            reasons[node] = error.what
        return [Refusal(n, name_of(n), location_of(n), why) for n, why in reasons.items()]

    def _input(self, node: Any) -> SymbolicTensor | ComplexTensor | Unreadable:
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
            self.builder.place(parse_placement(f"input.{node.name}.space=dram"))
        with self.builder.at(where):
            given = self.builder.input(
                node.name, kind.shape, kind.data_type,
                InputKind.STATE if is_static else InputKind.ACTIVATION,
            )  # fmt: skip
        if not is_complex(node.meta["val"]):
            return given
        self.complex.append(position)
        return ComplexTensor(given)

    def _declare(self, output: Result, value: SymbolicTensor | ComplexTensor) -> None:
        b, name, order = self.builder, f"output_{output.index}", None
        if output.strides is not None:
            order = axes_in_memory(output.strides)
        if isinstance(value, ComplexTensor):
            order = None if order is None else (*order, len(order))
            value = value.pairs
        b.output(name, value if order is None else b.transpose(value, order))
        # Torch looks at results for as long as it likes: L1 is too small for that.
        if self.settings.has_dram:
            b.place(parse_placement(f"output.{name}.space=dram"))

    def _attribute(self, target: str) -> Any:
        value = attrgetter(target)(self.root)
        if not isinstance(value, torch.Tensor):
            return value
        constant = self.builder.parameter(target, array_of(in_pairs(value)))
        return ComplexTensor(constant) if is_complex(value) else constant


def _check_runs(graph: ComputationGraph, device: Device, settings: GraphSettings) -> None:
    """Raise what the device's executor raises for a program that it refuses."""
    device.load(_binary(graph, device, replace(settings, programs=None))).prepared()


def _one_operation(graph: ComputationGraph, operation: Operation) -> ComputationGraph:
    """An operation as a graph of its own."""
    read = [v for v in dict.fromkeys(operation.inputs) if v != ABSENT]
    made = [v for v in operation.outputs if v != ABSENT]
    number = {value: place for place, value in enumerate((*read, *made))}
    data = {constant.value: constant.data for constant in graph.constants}
    return ComputationGraph(
        "operation",
        inputs=tuple(InputSlot(f"x{number[v]}", number[v]) for v in read if v not in data),
        outputs=tuple(OutputSlot(f"y{number[v]}", number[v]) for v in made),
        values=tuple(graph.values[v] for v in number),
        operations=(
            replace(
                operation,
                inputs=tuple(number.get(v, ABSENT) for v in operation.inputs),
                outputs=tuple(number.get(v, ABSENT) for v in operation.outputs),
            ),
        ),
        constants=tuple(Constant(number[v], data[v]) for v in read if v in data),
        bodies=() if operation.body is None else graph.bodies,
    )


def _given(value: Any) -> Any:
    return value

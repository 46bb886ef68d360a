"""Compile a graph of aot_autograd to one program, and call it with torch tensors."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from stitch.compiler import (
    CompileOptions,
    DynamicProgram,
    compile_dynamic,
    compile_graph,
    rated_executor,
)
from stitch.errors import CompileError, UsageError
from stitch.frontend.torch.aten_call import ComplexTensor, array_of, in_pairs, is_complex
from stitch.frontend.torch.aten_walk import Unreadable, lower_graph, readable_type, try_lowering
from stitch.frontend.torch.compile.subgraphs import (
    Output,
    axes_in_memory,
    classify_outputs,
    output_tensors,
    results_of,
    with_sizes,
)
from stitch.frontend.torch.lowering import KEY_LIMIT, KEY_NAME, give_key, join_selected
from stitch.frontend.torch.refused_nodes import Refusal, location_of, name_of
from stitch.frontend.torch.shared_storage import (
    ArgumentSlot,
    ProgramArguments,
    Result,
    SharedStorage,
)
from stitch.frontend.torch.symbolic_export import TorchSizes
from stitch.frontend.torch.torch_internals import forward_ad
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, parse_placement
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    SymbolicSizes,
    at_sizes,
)
from stitch.report import Device
from stitch.runtime import PreparedGraph, Replay, chain_graph
from stitch.ttb import Binary, encode, load

# Lowering and compiling ---------------------------------------------------------------------------

PRODUCER = "stitch torch.compile"
_log = logging.getLogger(__name__)
REMEDY = (
    'use options={"fallback": "torch"}, the default: torch runs unsupported operators; or move '
    "the code to a function with @torch.compiler.disable"
)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """The settings of one graph.

    `static`: positions of arguments that have the same storage in all calls; `fresh`: positions of
    arguments that are new in each. `exact_outputs`: number of outputs that the user sees, with the
    strides of eager torch. `optimize`: run the compiler's passes. `role`: forward, backward,
    inference or part. `raises`: unsupported operators are an error. `min_operations`: smaller parts
    of a graph that is cut are left to torch. `copies_results`: torch may get copies of results,
    because no backward pass reads them.
    """

    name: str
    static: frozenset[int] = frozenset()
    exact_outputs: int = 0
    optimize: bool = True
    has_dram: bool = False
    role: str = "inference"
    raises: bool = False
    min_operations: int = 1
    copies_results: bool = False
    fresh: frozenset[int] = frozenset()

    @property
    def shares_outputs(self) -> bool:
        """Whether outputs that are views of one value must share its memory.

        Also in training, where aot_autograd makes the views by these outputs. Torch makes the views
        of a part, and the user does not see the outputs of a backward pass.
        """
        return self.role in ("inference", "forward")


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph compiled to a binary of one program (None if nothing is computed).

    `positions`: the arguments that are the program's inputs, in order; `static`, `complex` (passed
    as pairs of parts) and `fresh` (new in each call) are positions among them. `has_key`: the
    program's last input is a key.
    """

    name: str
    binary: Binary | None
    positions: tuple[int, ...]
    static: frozenset[int]
    has_key: bool
    outputs: tuple[Output, ...]
    complex: frozenset[int] = frozenset()
    fresh: frozenset[int] = frozenset()

    def as_bytes(self) -> bytes:
        """Serialize for torch's cache, which has pickles."""
        encoded = None if self.binary is None else encode(self.binary)
        return pickle.dumps((replace(self, binary=None), encoded))

    @staticmethod
    def of_bytes(data: bytes) -> CompiledGraph:
        """Read the bytes of `as_bytes`; torch trusts its cache."""
        graph: CompiledGraph
        graph, encoded = pickle.loads(data)
        for result in results_of(graph.outputs):
            result.views.clear()
        return replace(graph, binary=None if encoded is None else load(encoded, verify="full"))


def compile_lowered(lowering: GraphLowering, device: Device) -> CompiledGraph:
    """Compile a lowered graph for a device; raises what compiling raises."""
    program = None
    if lowering.graph is not None:
        program = _program(lowering.graph, device, lowering.settings)
    return _compiled(lowering, program, device, tuple(lowering.outputs))


def compile_named(lowering: GraphLowering, device: Device) -> DynamicProgram | None:
    """Compile a lowered graph with named sizes, None if nothing is computed; raises what compiling
    raises."""
    if lowering.graph is None:
        return None
    options = _options(device, lowering.settings)
    return compile_dynamic(lowering.graph, lowering.named, device.machine, options)


def program_at(
    lowering: GraphLowering, program: DynamicProgram | None, device: Device,
    sizes: Mapping[str, int],
) -> CompiledGraph:  # fmt: skip
    """Return the static graph of one that was lowered with named sizes; `program`: its program."""
    outputs = with_sizes(lowering.outputs, lambda shape: at_sizes(shape, sizes))
    return _compiled(lowering, None if program is None else program.at(**sizes), device, outputs)


def _compiled(
    lowering: GraphLowering, program: Program | None, device: Device, outputs: tuple[Output, ...]
) -> CompiledGraph:
    settings, binary = lowering.settings, None
    if program is not None:
        binary = Binary((program,), device.machine.shape, PRODUCER)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("graph %s: %s", settings.name, program.text())
    positions = tuple(lowering.positions)
    static = settings.static.intersection(positions)
    return CompiledGraph(
        settings.name, binary, positions, static, lowering.has_key, outputs,
        frozenset(lowering.complex), settings.fresh.intersection(positions),
    )  # fmt: skip


def _program(graph: ComputationGraph, device: Device, settings: GraphSettings) -> Program:
    return compile_graph(graph, device.machine, _options(device, settings)).program


def _options(device: Device, settings: GraphSettings) -> CompileOptions:
    return CompileOptions(
        optimize=settings.optimize, reassociate=True, executor=rated_executor(device.executor)
    )


class GraphLowering:
    """Lowers an fx graph to a computation graph, and maps its arguments and outputs.

    The fx graph is changed; `root` has its attributes. With `settings.raises` an operator that
    cannot be compiled raises `CompileError`; else it is in `refusals`, and `graph` is None.
    `sizes`: the named sizes of a graph with symbols.
    """

    def __init__(
        self, fx_graph: Any, root: Any, settings: GraphSettings, sizes: TorchSizes | None = None
    ) -> None:
        self.root, self.settings, self.sizes = root, settings, sizes
        nodes = [n for n in fx_graph.nodes if n.op == "placeholder"]
        self._positions = {node.name: i for i, node in enumerate(nodes)}
        self.has_key = give_key(fx_graph)
        self._nodes_of_arguments = nodes
        self._results, self._outputs = classify_outputs(
            fx_graph, self._positions, settings.exact_outputs, share=settings.shares_outputs,
            may_copy=settings.copies_results,
        )  # fmt: skip
        #: The axes of each result from the largest stride to the smallest; None: row-major.
        self._orders = [r.strides and axes_in_memory(r.strides) for r in self._results]
        join_selected(fx_graph)
        self._fx_graph = fx_graph
        self._lower()

    @property
    def named(self) -> SymbolicSizes:
        """The named sizes of a graph with symbols, and the guards that its lowering relied on."""
        assert self.sizes is not None, "lowered with named sizes"
        return self.sizes.sizes

    def relowered(self, sizes: TorchSizes) -> GraphLowering:
        """Return the lowering of the same graph with other examples of its named sizes."""
        twin = copy.copy(self)
        twin.sizes = sizes
        twin._lower()
        return twin

    def _lower(self) -> None:
        #: Positions of the arguments that are inputs of the program, in order.
        self.positions: list[int] = []
        #: Positions of complex arguments.
        self.complex: list[int] = []
        self.refusals: Sequence[Refusal] = ()
        #: For each operation of the graph, the node that it was added for.
        self._nodes: Sequence[Any] = ()
        self.builder = builder = ComputationGraphBuilder(self.settings.name)
        self.outputs = self._outputs
        if self.sizes is not None:
            self.named.locate = lambda: builder.location
            # A size that is no expression here is a number at these sizes only: a guard.
            self.outputs = with_sizes(self._outputs, self.sizes.shape)
        self.graph: ComputationGraph | None = self._lowered() if self._results else None

    def _lowered(self) -> ComputationGraph | None:
        bindings: dict[str, Callable[[], Any]] = {}
        # Inputs have the order of the arguments; the key is last.
        for node in self._nodes_of_arguments:
            traced = node.meta.get("val")
            if node.users and isinstance(traced, torch.Tensor):
                bindings[node.name] = partial(_identity, self._input(node))
            elif self.sizes is not None and isinstance(traced, torch.SymInt):
                bindings[node.name] = partial(self.sizes.size, traced)
        for name in self._positions.keys() - bindings.keys():
            bindings[name] = partial(Unreadable, "it reads an argument that is not a tensor")
        if self.has_key:
            key = self.builder.input(KEY_NAME, (1,), DataType.INT64, InputKind.KEY)
            bindings[KEY_NAME] = partial(_identity, key)
        arguments = self._fx_graph, self.builder, bindings, self._attribute
        if self.settings.raises:
            values = lower_graph(*arguments, self.settings.name, REMEDY, self.sizes)
        else:
            values, self.refusals, self._nodes = try_lowering(*arguments, self.sizes)
            if self.refusals:
                return None
        for output, order in zip(self._results, self._orders, strict=True):
            self._declare(output, values[output.index], order)
        return self.builder.build()

    def refused_by(self, device: Device, error: CompileError) -> Sequence[Refusal]:
        """The nodes that a device's executor refuses: each operation is tried alone. All nodes if
        the executor refuses none alone, only the optimized program."""
        assert self.graph is not None, "there is a program to refuse"
        reasons: dict[Any, str] = {}
        for operation, node in zip(self.graph.operations, self._nodes, strict=True):
            if node not in reasons:
                try:
                    alone = _one_operation(self.graph, operation)
                    program = _program(alone, device, self.settings)
                    device.load(Binary((program,), device.machine.shape, PRODUCER)).prepared()
                except CompileError as refusal:
                    reasons[node] = refusal.what
        for node in () if reasons else dict.fromkeys(self._nodes):
            reasons[node] = error.what
        return [Refusal(n, name_of(n), location_of(n), why) for n, why in reasons.items()]

    def _input(self, node: Any) -> SymbolicTensor | ComplexTensor | Unreadable:
        position, where = self._positions[node.name], f"argument {node.name}"
        try:
            kind = readable_type(node.meta["val"], self.sizes)
        except CompileError as error:
            if self.settings.raises:
                error.where = where
                raise
            return Unreadable.because(error)
        self.positions.append(position)
        # Not PARAMETER: a program with only those is evaluated once.
        is_static = position in self.settings.static
        if self.settings.has_dram:
            # Arguments come from the host, or are results of programs, which are in DRAM.
            self.builder.place(parse_placement(f"input.{node.name}.space=dram"))
        with self.builder.at(where):
            slot = self.builder.input(
                node.name, kind.shape, kind.data_type,
                InputKind.STATE if is_static else InputKind.ACTIVATION,
            )  # fmt: skip
        if not is_complex(node.meta["val"]):
            return slot
        self.complex.append(position)
        return ComplexTensor(slot)

    def _declare(
        self, output: Result, value: SymbolicTensor | ComplexTensor, order: tuple[int, ...] | None
    ) -> None:
        b, name = self.builder, f"output_{output.index}"
        if isinstance(value, ComplexTensor):
            order = None if order is None else (*order, len(order))
            value = value.pairs
        b.output(name, value if order is None else b.transpose(value, order))
        # Torch may hold results for long: L1 is too small for that.
        if self.settings.has_dram:
            b.place(parse_placement(f"output.{name}.space=dram"))

    def _attribute(self, target: str) -> Any:
        value = attrgetter(target)(self.root)
        if not isinstance(value, torch.Tensor):
            return value
        constant = self.builder.parameter(target, array_of(in_pairs(value)))
        return ComplexTensor(constant) if is_complex(value) else constant


def _one_operation(graph: ComputationGraph, operation: Operation) -> ComputationGraph:
    """A graph of one operation of another graph."""
    read = [v for v in dict.fromkeys(operation.inputs) if v != ABSENT]
    written = [v for v in operation.outputs if v != ABSENT]
    number = {value: i for i, value in enumerate((*read, *written))}
    data = {constant.value: constant.data for constant in graph.constants}
    return ComputationGraph(
        "operation",
        inputs=tuple(InputSlot(f"x{number[v]}", number[v]) for v in read if v not in data),
        outputs=tuple(OutputSlot(f"y{number[v]}", number[v]) for v in written),
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


def _identity(value: Any) -> Any:
    return value


# Running ------------------------------------------------------------------------------------------

#: For `map`.
_TENSOR = torch.from_numpy

Run = TypeVar("Run", bound=Callable[..., Any])


def boxed(run: Run) -> Run:
    """Tell aot_autograd that a function takes its arguments in a list and empties it, so that they
    are freed early."""
    run._boxed_call = True  # type: ignore[attr-defined]  # torch's convention
    return run


def refuse_tangents(arguments: Iterable[Any]) -> None:
    """Raise `UsageError` for dual tensors: programs do not compute tangents."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UsageError(
            "compiled graphs do not support forward-mode derivatives",
            expected="arguments without tangents", got="a dual tensor",
            remedy='call the module that was compiled, or compile with backend="aot_eager"',
        )  # fmt: skip


class GraphProgram:
    """A compiled graph on a device: a function of torch tensors."""

    def __init__(self, compiled: CompiledGraph, storage: SharedStorage) -> None:
        self.compiled = compiled
        self._storage = storage
        self._device = device = storage.device
        self._holds_run_lock, self._holds_queue_lock = (
            device.holds_run_lock, device.holds_queue_lock,
        )  # fmt: skip
        self._lock = device.quick_lock
        self._outputs = compiled.outputs
        slots = [
            ArgumentSlot(position, position in compiled.static, position in compiled.fresh)
            for position in compiled.positions
        ]
        self._arguments = ProgramArguments(storage, slots)
        self._prepared = None
        if compiled.binary is not None:
            loaded = device.load(compiled.binary)
            # Prepare now, not at the first call: torch can run what the executor refuses.
            loaded.prepared()
            graph, _ = chain_graph((loaded,), ({},), "compiled graph")
            self._prepared = PreparedGraph(device, graph.table(), title="the compiled graph")
        #: Whether torch gets copies of all results; then the last run can be replayed.
        self._copies = all(map(storage.copies, results_of(compiled.outputs)))
        self._replay: Replay | None = None
        made = {result.index: result for result in results_of(compiled.outputs)}
        #: Whether the outputs are the results, without views and strides.
        self._is_plain = len(made) == len(compiled.outputs) and all(
            map(_is_plain, compiled.outputs)
        )
        self._nbytes = sum(result.nbytes for result in made.values())

    @boxed
    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run on the graph's arguments, and empty their list; return the completed outputs."""
        if forward_ad._current_level >= 0:
            refuse_tangents(arguments)
        storage, prepared, compiled = self._storage, self._prepared, self.compiled
        # Locals, because calling an attribute takes 20 ns longer.
        holds_run_lock, holds_queue_lock = self._holds_run_lock, self._holds_queue_lock
        with self._device.lock if holds_run_lock() or holds_queue_lock() else self._lock:
            results: Any = ()
            is_replayed = False
            if prepared is not None:
                # Dropped if this call fails: the next one would not follow the replayed run.
                replay, self._replay = self._replay, None
                tensors = in_parts(arguments, compiled.complex) if compiled.complex else arguments
                converter = self._arguments
                arrays = converter.arrays(tensors)
                if compiled.has_key:
                    arrays.append(torch.randint(KEY_LIMIT, (1,), device="cpu").numpy())
                results = None
                if self._copies and converter.stay:
                    # The last run had the same lent tensors.
                    if replay is None:
                        replay = prepared.repeat(converter.all_of(arrays))
                    results = None if replay is None else replay.copies(arrays)
                is_replayed = results is not None
                if is_replayed:
                    self._replay = replay
                else:
                    results = prepared.run(tuple(converter.all_of(arrays)))
                    if type(results) is not tuple:
                        results = (results,)
            if is_replayed and self._is_plain:
                storage.copied_nbytes += self._nbytes
                outputs = list(map(_TENSOR, results))
            else:
                to_torch = storage.copy if is_replayed else storage.result
                outputs = output_tensors(self._outputs, arguments, results, to_torch)
        arguments.clear()
        return outputs


def _is_plain(output: Output) -> bool:
    """Whether an output is a dense row-major result of a type that NumPy and torch share."""
    if not isinstance(output, Result) or output.strides is not None:
        return False
    return not (output.dtype is torch.bfloat16 or output.dtype.is_complex)


def in_parts(arguments: Sequence[Any], positions: Collection[int]) -> list[Any]:
    """Arguments with those at these positions, which are complex, as pairs of parts."""
    converted = list(arguments)
    for position in positions:
        converted[position] = in_pairs(converted[position])
    return converted

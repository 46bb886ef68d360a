"""A compiled graph of aot_autograd as a function that takes and gives torch tensors.

Which argument goes where is decided once.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from stitch.compile_cache import CachedCompilation, CompileCache
from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import CompileError, UsageError
from stitch.frontend.torch.aten_call import ComplexTensor, array_of, in_pairs, is_complex
from stitch.frontend.torch.aten_walk import (
    Unreadable,
    lower_graph,
    readable_type,
    try_lowering,
)
from stitch.frontend.torch.compile.shared_storage import (
    CALLS_BETWEEN_LOOKS,
    ArgumentSlot,
    SharedStorage,
)
from stitch.frontend.torch.compile.subgraphs import (
    Output,
    Result,
    axes_in_memory,
    results_of,
    shown,
    sorted_outputs,
    without_views,
)
from stitch.frontend.torch.lowering import (
    KEY_LIMIT,
    KEY_NAME,
    give_key,
    join_selected,
)
from stitch.frontend.torch.refused_nodes import Refusal, location_of, name_of
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, parse_placement
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
)
from stitch.report import Device
from stitch.runtime import PreparedGraph, Replay, Tensor, chain_graph
from stitch.ttb import Binary, encode, load

# --------------------------------------------------------------------------------------------------
# Arguments

#: Called by C for one tensor after the other: no line of Python runs for what stays where it is.
_ADDRESS = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True, eq=False)
class _Sorting:
    """Which arguments are known how. `lasting`: the static ones that are lent, `pick`: what takes
    them from all, `addresses`: where they begin, while no more places than `taken_back` were taken
    back; `moving`: the others, with their places."""

    lasting: tuple[ArgumentSlot, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    addresses: list[int]
    taken_back: int
    moving: list[tuple[int, ArgumentSlot]]


def refuse_tangents(arguments: Iterable[Any]) -> None:
    """Raise `UsageError`: programs compute no tangents, and would lose them."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UsageError(
            "forward-mode derivatives do not go through compiled graphs",
            expected="arguments without tangents", got="a dual tensor",
            remedy='call the module that was compiled, or compile with backend="aot_eager"',
        )  # fmt: skip


class ProgramArguments:
    """The arguments of one program, call by call; the device's lock is held."""

    __slots__ = (
        "__weakref__", "_last_call", "_slots", "_sorting", "_storage", "_values", "stay",
    )  # fmt: skip

    def __init__(self, storage: SharedStorage, slots: Iterable[ArgumentSlot]) -> None:
        self._storage, self._slots = storage, tuple(slots)
        #: What stood for each in the last call; None for an array, which is not kept.
        self._values: list[Tensor | None] = [None] * len(self._slots)
        #: Whether these are lent, and were the same in the call before.
        self.stay = False
        self._last_call = 0
        self._sorting = self._sorted(())
        storage.await_looks(self)

    def arrays(self, tensors: Sequence[Any]) -> list[Array]:
        """A call begins, with these arguments of its graph: the arrays among what stands for
        them."""
        storage, values = self._storage, self._values
        self._last_call = storage.calls = now = storage.calls + 1
        if now % CALLS_BETWEEN_LOOKS == 0:
            storage.look()
        arrays: list[Array] = []
        stay, sort = True, False
        sorting = self._sorting
        if sorting.addresses:
            is_same = list(map(_ADDRESS, sorting.pick(tensors))) == sorting.addresses
            if is_same and sorting.taken_back == storage.taken_back:
                storage.recognised += len(sorting.lasting)
            else:
                sorting = self._sort(())
                sort = True
        for place, slot in sorting.moving:
            tensor, lent, before = tensors[slot.position], slot.lent, values[place]
            if slot.is_fresh and tensor.is_contiguous():
                arrays.append(storage.as_array(tensor))
                stay &= before is None
                values[place] = None
                continue
            # Whoever owns what lies there now: it has the type and shape that it had, and is read
            # in place, or else compared.
            if (
                lent is not None
                and lent.tensor is before
                and tensor.data_ptr() == slot.address
                and not lent.is_taken_back
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                lent.last_call = now
                storage.recognised += 1
                continue
            one = storage.argument(tensor, slot)
            if not isinstance(one, Tensor):
                arrays.append(one)
                stay &= before is None
                values[place] = None
                continue
            # What is not lent, such as another program's result, never stays.
            stay = False
            values[place] = one
            sort |= slot.is_static and _is_lent(slot, one)
        self.stay = stay
        if sort:
            places = enumerate(self._slots)
            self._sort([at for at, s in places if s.is_static and _is_lent(s, values[at])])
        return arrays

    def all_of(self, arrays: Iterable[Array]) -> list[Any]:
        """What stands for the arguments of the call that has begun, with its arrays, and what
        follows these."""
        rest = iter(arrays)
        values = [next(rest) if value is None else value for value in self._values]
        values.extend(rest)
        return values

    def look(self) -> None:
        """Say of what is asked for all at once when that was."""
        for slot in self._sorting.lasting:
            if slot.lent is not None:
                slot.lent.last_call = self._last_call

    def _sort(self, lasting: Sequence[int]) -> _Sorting:
        """These are known all at once from now on, by where they begin."""
        self.look()
        # All at once: an interrupt finds none that is asked for neither way.
        made = self._sorting = self._sorted(lasting)
        return made

    def _sorted(self, lasting: Sequence[int]) -> _Sorting:
        slots = self._slots
        known = tuple([slots[at] for at in lasting])
        # What picks one gives that, not a tuple of it: so it is picked twice.
        picked = known * 2 if len(known) == 1 else known
        others = sorted(set(range(len(slots))).difference(lasting))
        return _Sorting(
            known, itemgetter(*[slot.position for slot in picked]) if picked else tuple,
            [slot.address for slot in picked], self._storage.taken_back,
            [(at, slots[at]) for at in others],
        )  # fmt: skip


def _is_lent(slot: ArgumentSlot, value: Tensor | None) -> bool:
    return slot.lent is not None and slot.lent.tensor is value


# --------------------------------------------------------------------------------------------------
# Lowering to a compiled program

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

    def compile() -> CachedCompilation:
        made = compile_graph(graph, machine, options)
        return CachedCompilation(Binary((made.program,), machine.shape, PRODUCER), made.warnings)

    if settings.programs is None:
        return compile().binary
    # Graphs are counted, and what another process has read is not: no key has the number.
    graph = replace(graph, name=settings.role)
    found, is_hit = settings.programs.compilation(graph, machine, options, compile)
    for warning in found.warnings:
        if warning.kind.startswith("cache_"):
            _log.warning("graph %s: %s: %s", settings.name, warning.where, warning.detail)
    if is_hit:
        _log.info("graph %s: its program is read from the cache", settings.name)
    (program,) = found.binary.programs
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


# --------------------------------------------------------------------------------------------------
# The program of a graph

#: Called by C for one array after the other.
_TENSOR = torch.from_numpy

Run = TypeVar("Run", bound=Callable[..., Any])


def boxed(run: Run) -> Run:
    """Mark, for aot_autograd, what takes its arguments in a list and empties it: they may die
    early."""
    run._boxed_call = True  # type: ignore[attr-defined]  # how it asks
    return run


class GraphProgram:
    """A graph on a device: a function of torch tensors. Raises what loading and running raise."""

    def __init__(self, form: ProgramForm, storage: SharedStorage) -> None:
        self.form = form
        self._storage = storage
        self._device = storage.device
        self._runs_here, self._queues_here = (
            self._device.holds_run_lock,
            self._device.holds_queue_lock,
        )
        self._lock = self._device.quick_lock
        self._outputs = form.outputs
        slots = [ArgumentSlot(p, p in form.static, p in form.fresh) for p in form.positions]
        self._arguments = ProgramArguments(storage, slots)
        self._prepared = None
        if form.binary is not None:
            loaded = self._device.load(form.binary)
            # Now, not at the first call: what the executor refuses others can run.
            loaded.prepared()
            table, _ = chain_graph((loaded,), ({},), "compiled graph")
            self._prepared = PreparedGraph(self._device, table, title="the compiled graph")
        #: How what ran last is repeated, where torch gets copies of all results.
        self._copies = all(map(storage.copies, results_of(form.outputs)))
        self._repeat: Replay | None = None
        #: Whether the outputs are those as they are, which the first run has looked at.
        self._is_plain = all(map(_is_plain, form.outputs))
        self._nbytes = sum(result.nbytes for result in results_of(form.outputs))

    @boxed
    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run it on the graph's arguments, and empty their list; the outputs are ready."""
        if forward_ad._current_level >= 0:
            refuse_tangents(arguments)
        storage, prepared, form = self._storage, self._prepared, self.form
        # What is called is a local: a method that an object only has costs 20 ns more to be found.
        holds_run_lock, holds_queue_lock = self._runs_here, self._queues_here
        with self._device.lock if holds_run_lock() or holds_queue_lock() else self._lock:
            results: Any = ()
            is_repeated = False
            if prepared is not None:
                # Not kept where this call does not come to its end: then it is none on the
                # arguments of the call before.
                repeat, self._repeat = self._repeat, None
                tensors = in_parts(arguments, form.complex) if form.complex else arguments
                given = self._arguments
                arrays = given.arrays(tensors)
                if form.has_key:
                    arrays.append(torch.randint(KEY_LIMIT, (1,), device="cpu").numpy())
                results = None
                if self._copies and given.stay:
                    # What ran on the same lent tensors runs again, if it can.
                    if repeat is None:
                        repeat = prepared.repeat(given.all_of(arrays))
                    results = None if repeat is None else repeat(arrays)
                is_repeated = results is not None
                if is_repeated:
                    self._repeat = repeat
                else:
                    results = prepared.run(tuple(given.all_of(arrays)))
                    if type(results) is not tuple:
                        results = (results,)
            if is_repeated and self._is_plain:
                storage.copied_nbytes += self._nbytes
                outputs = list(map(_TENSOR, results))
            else:
                show = storage.copy if is_repeated else storage.result
                outputs = shown(self._outputs, arguments, results, show)
        arguments.clear()
        return outputs


def _is_plain(output: Output) -> bool:
    """Whether an output is a result as it comes."""
    if not isinstance(output, Result) or output.strides is not None:
        return False
    return not (output.dtype is torch.bfloat16 or output.dtype.is_complex)


def in_parts(arguments: Sequence[Any], places: Collection[int]) -> list[Any]:
    """Arguments with the complex ones, which are at these places, as pairs of parts."""
    given = list(arguments)
    for place in places:
        given[place] = in_pairs(given[place])
    return given

"""How functions over nests run, and on which device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from stitch.argument_kinds import TEXT, instance_of, optional, takes
from stitch.compiler import CompileOptions, check_schedule, compile_graph, rated_executor
from stitch.errors import UsageError, closest
from stitch.fractal.current import (
    CallReport,
    ExecutionMode,
    NestCall,
    mode_set,
    report_call,
    reporting,
    using,
)
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.kept_programs import Kept, KeptPrograms
from stitch.fractal.tracing import (
    CallInputs,
    GraphMeaning,
    GraphTracing,
    LengthsOfDataError,
    NestWork,
    Traced,
)
from stitch.fractal.user_function import Sequential, check_bool
from stitch.fractal.value_forms import ValueForm
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import ComputationGraph, NoDataError, SymbolicTensor
from stitch.runtime import LoadedProgram, RuntimeDevice
from stitch.ttb import Binary

# --------------------------------------------------------------------------------------------------
# In parallel: a call is traced into a graph, its loops are scheduled, and it runs as one program.

#: Size of a device's cache of programs by graph.
MAX_PROGRAMS = 256
#: Calls of which a device knows what they were traced into, and bytes of what tells them apart.
MAX_CALLS, MAX_CALL_NBYTES = 1024, 1 << 26


class Parallel:
    """Runs calls as programs of a device; `sequential` runs what cannot be traced."""

    def __init__(
        self, device: RuntimeDevice, sequential: Sequential, schedule: str | None = None
    ) -> None:
        self.device, self.sequential, self.schedule = device, sequential, schedule
        self.builder = sequential.builder
        self._programs: KeptPrograms[tuple[GraphMeaning, LoadedProgram]] = KeptPrograms(
            MAX_PROGRAMS
        )
        self._calls: Kept[_KeptCall] = Kept(MAX_CALLS, lambda: MAX_CALL_NBYTES)
        self._scheduled: dict[str, Parallel] = {}
        self._loops: WeakKeyDictionary[LoadedProgram, tuple[str, ...]] = WeakKeyDictionary()

    def scheduled(self, schedule: str) -> Parallel:
        """The same with loops that run so wherever they can; one for each schedule, as it keeps
        programs."""
        found = self._scheduled.get(schedule)
        if found is None:
            made = Parallel(self.device, self.sequential, schedule)
            found = self._scheduled.setdefault(schedule, made)
        return found

    def given(self, data: Any) -> Any:
        """A leaf, with data."""
        return self.sequential.given(data)

    def mapped(self, call: NestCall, xs: Nest) -> Any:
        """All elements, cells of one form at the same time."""
        return self._run(NestWork(call, xs, None, "mapped"))

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """All states."""
        return self._run(NestWork(call, xs, initializer, "scanned", {"from_right": from_right}))

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state."""
        words = {"from_right": from_right, "is_associative": is_associative}
        return self._run(NestWork(call, xs, initializer, "folded", words))

    def kept(self, call: NestCall, xs: Nest) -> Any:
        """The numbers of the elements for which a predicate is true, all asked at the same time."""
        said = self.mapped(call, xs)
        is_one = isinstance(said, FractalTensor) and said.depth == 1
        check_bool(call, said.leaves()[0] if is_one else said, "element 0")
        return np.flatnonzero(said.numpy())

    def _run(self, work: NestWork) -> Any:
        """The value of a call: of a program, or computed element by element where lengths depend
        on data."""
        name = work.call.name
        try:
            known, arguments, why = self._known(work)
        except (LengthsOfDataError, NoDataError) as error:
            because = error.what
            report_call(name, lambda: f"element by element, as {because}")
            with using(self):
                return work.written(self.sequential)
        program = known.program

        def how() -> str:
            anew = [f"traced at each call, as {why}"] if why else []
            return "; ".join(["one program", *self._loops.get(program, ()), *anew])

        report_call(name, how)
        found = program(*arguments)
        results = iter(found if isinstance(found, tuple) else (found,))
        return self._shown(known.form.value(results))

    def _known(self, work: NestWork) -> tuple[_Known, Sequence[Any], str]:
        """The program of a call, what is given for its inputs, and why it was traced though it may
        come again."""
        readings = [work.read(keeps_numbers=False)]
        if readings[0].inputs.has_numbers:
            readings.append(work.read(keeps_numbers=True))
        for reading in readings:
            kept = None if reading.key is None else self._calls.get(reading.key)
            key = None if kept is None else kept.key()
            found = None if key is None else self._programs.get(key)
            if kept is not None and found is not None:
                return _Known(found[1], kept.form), reading.inputs.arguments, ""
        tracing, form = _traced(work)
        key, program = self._program(tracing.graph())
        reading = readings[-1 if tracing.given.keeps_numbers else 0]
        if reading.key is not None:
            self._calls.put(reading.key, _KeptCall(ref(key), form), reading.inputs.nbytes)
        return _Known(program, form), tracing.given.arguments, reading.why

    def _program(self, graph: ComputationGraph) -> tuple[GraphMeaning, LoadedProgram]:
        """A program for a graph, and the key that it is kept by; it is compiled the first time."""
        key = GraphMeaning(graph)
        found = self._programs.get(key)
        if found is None:
            program, loops = self._compiled(graph)
            found = key, program
            self._programs.keep(key, found, graph)
            self._loops[program] = loops
        return found

    def _compiled(self, graph: ComputationGraph) -> tuple[LoadedProgram, tuple[str, ...]]:
        """A program for a graph, and how its loops run."""
        machine = self.device.machine
        executor = rated_executor(self.device.executor)
        options = CompileOptions(schedule=self.schedule, executor=executor)
        compiled = compile_graph(graph, machine, options)
        loaded = self.device.load(Binary((compiled.program,), machine.shape, "fractal"))
        return loaded, tuple([note.text() for note in compiled.loops])

    def _shown(self, value: Any) -> Any:
        """Results as others give them: leaves as tensors with data."""
        if isinstance(value, tuple):
            return tuple([self._shown(each) for each in value])
        return value if isinstance(value, FractalTensor) else self.given(value)


@dataclass(frozen=True, slots=True)
class _Known:
    """A program, and the form of what it gives."""

    program: LoadedProgram
    form: ValueForm


@dataclass(frozen=True, slots=True)
class _KeptCall:
    """What a call was traced into: the key of its program, which goes with that, as it holds
    constants; the form of its value."""

    key: ReferenceType[GraphMeaning]
    form: ValueForm


def _traced(work: NestWork) -> tuple[GraphTracing, ValueForm]:
    """A call as a graph. Whole numbers are data as others are, so that one program does for all of
    them; a function that asks for them is traced again, with them part of the graph."""
    tracing = GraphTracing(f"fractal_{work.call.name}", CallInputs(keeps_numbers=False))
    try:
        return tracing, tracing.traced(work)
    except LengthsOfDataError:
        raise
    except Exception:
        if not tracing.given.has_numbers:
            raise
    tracing = GraphTracing(f"fractal_{work.call.name}", CallInputs(keeps_numbers=True))
    return tracing, tracing.traced(work)


MODES = ("sequential", "parallel")
#: Under which name a device keeps its ways, with the programs that they have compiled.
_KEPT = "functions over nests"
#: The device that is used where none is told, once it is needed.
_devices: list[RuntimeDevice] = []
_lock = Lock()


@contextmanager
@takes(device=optional(instance_of("an open device", RuntimeDevice)), schedule=optional(TEXT))
def mode(
    name: str, device: RuntimeDevice | None = None, *, schedule: str | None = None
) -> Iterator[CallReport]:
    """Functions over nests run in this mode within, on this device (default: one of the machine
    `host`).

    `sequential`: element by element, each operation computed as it is written, so that a debugger
    sees numbers and errors name the line. `parallel`: traced and run as one program, cells that do
    not wait for one another at the same time; the same results, to rounding where products change
    their shape. There a function runs once for all elements of one form, and what it does beside
    its result, as drawing numbers of `np.random`, it does as often. `schedule`: how loops run in
    parallel wherever they can, in place of what costs least. What `with` gives explains how the
    calls within ran. Raises `UsageError` for another mode or schedule, or one where nothing is
    scheduled.
    """
    if name not in MODES:
        raise UsageError(
            f"there is no mode {name!r}", expected=", ".join(MODES), remedy=closest(name, MODES)
        )
    check_schedule(schedule)
    if schedule is not None and name != "parallel":
        raise UsageError(f"mode {name} has no schedules", got=f"schedule={schedule!r}",
                         remedy='leave it out, or take the mode "parallel"')  # fmt: skip
    way = _way_on(device or _default_device(), name)
    if isinstance(way, Parallel) and schedule is not None:
        way = way.scheduled(schedule)
    report = CallReport()
    with using(way), reporting(report):
        yield report


def mode_in_use(*values: Any) -> ExecutionMode:
    """How functions run now: in the mode chosen, else one after the other; on values of a graph
    that is being written, in that graph."""
    way = mode_set()
    if not isinstance(way, Traced):
        traced = list(traced_in(values))
        if traced:
            builder: Any = traced[0].builder
            return Traced(builder.innermost(traced))
    return way or _way_on(_default_device(), "sequential")


def traced_in(value: Any) -> Iterator[SymbolicTensor]:
    """The values of a graph in a nest, or in several."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from traced_in(each)
    elif isinstance(value, Zipped):
        yield from traced_in(value.parts)
    elif isinstance(value, FractalTensor):
        yield from traced_in(value.data)
    elif isinstance(value, SymbolicTensor) and value.written is None:
        yield value


def _way_on(device: RuntimeDevice, name: str) -> ExecutionMode:
    """The way of a mode on a device: the same one each time, as it keeps programs."""
    with _lock:
        found = device.kept.get(_KEPT)
        if not isinstance(found, Parallel):
            found = Parallel(device, Sequential(EagerBuilder(device)))
            if not device.is_closed:
                device.kept[_KEPT] = found
    return found if name == "parallel" else found.sequential


def _default_device() -> RuntimeDevice:
    """One of the machine `host`; another one in a process forked off, where the first is closed."""
    with _lock:
        if not _devices or _devices[0].is_closed:
            _devices[:] = [RuntimeDevice("host")]
        return _devices[0]

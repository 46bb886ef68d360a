"""The execution modes `sequential` and `parallel` of functions over nests, and their devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from stitch.argument_kinds import TEXT, instance_of, optional, takes
from stitch.compiler import CompileOptions, check_schedule, compile_graph, rated_executor
from stitch.errors import UsageError, unknown
from stitch.fractal.current import (
    CallReport,
    ExecutionMode,
    NestCall,
    collect_reports,
    report_call,
    selected_mode,
    use_mode,
)
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.structures import Structure
from stitch.fractal.tracing import (
    CallInputs,
    GraphKey,
    GraphTracing,
    LengthsOfDataError,
    Traced,
    key_of_call,
)
from stitch.fractal.user_function import Sequential, check_bool
from stitch.fractal.zipped import Zipped
from stitch.graph import ComputationGraph, NoDataError, SymbolicTensor
from stitch.runtime import LoadedProgram, RuntimeDevice
from stitch.ttb import Binary

_Value = TypeVar("_Value")


class LruCache(Generic[_Value]):
    """At most `most` entries and `most_nbytes` bytes, or one entry; the least recently used are
    evicted first.

    >>> cache: LruCache[str] = LruCache(most=2, most_nbytes=9)
    >>> for key in "abc":
    ...     cache.put(key, key.upper(), 1)
    >>> cache.get("a"), cache.get("b"), cache.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, most: int, most_nbytes: int) -> None:
        self.most, self.most_nbytes, self.nbytes = most, most_nbytes, 0
        self._held: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> _Value | None:
        """Return an entry and mark it as most recently used."""
        with self._lock:
            entry = self._held.get(key)
            if entry is None:
                return None
            self._held.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: _Value, nbytes: int) -> None:
        """Add an entry; evict the least recently used ones."""
        dropped = []  # Destroy entries after the lock is released.
        with self._lock:
            if key in self._held:
                dropped.append(self._taken(key))
            while self._held and (
                len(self._held) >= self.most or self.nbytes + nbytes > self.most_nbytes
            ):
                dropped.append(self._taken(next(iter(self._held))))
            self._held[key] = value, nbytes
            self.nbytes += nbytes

    def _taken(self, key: Hashable) -> _Value:
        value, nbytes = self._held.pop(key)
        self.nbytes -= nbytes
        return value


#: Size of a device's cache of programs by graph, in entries and in bytes of their constants.
MAX_PROGRAMS, MAX_CONSTANT_NBYTES = 256, 1 << 28
#: Size of a device's cache of traced calls, in entries and in bytes of their keys.
MAX_CALLS, MAX_CALL_NBYTES = 1024, 1 << 26


class Parallel:
    """Runs each call as one program; a call that cannot be traced runs in `sequential`."""

    def __init__(
        self, device: RuntimeDevice, sequential: Sequential, schedule: str | None = None
    ) -> None:
        self.device, self.sequential, self.schedule = device, sequential, schedule
        self.builder = sequential.builder
        self._programs: LruCache[tuple[GraphKey, LoadedProgram]] = LruCache(
            MAX_PROGRAMS, MAX_CONSTANT_NBYTES
        )
        self._calls: LruCache[_CachedCall] = LruCache(MAX_CALLS, MAX_CALL_NBYTES)
        self._scheduled: dict[str, Parallel] = {}
        self._loops: WeakKeyDictionary[LoadedProgram, tuple[str, ...]] = WeakKeyDictionary()

    def scheduled(self, schedule: str) -> Parallel:
        """Return this mode with a preferred loop schedule; one per schedule, as it caches
        programs."""
        mode = self._scheduled.get(schedule)
        if mode is None:
            new = Parallel(self.device, self.sequential, schedule)
            mode = self._scheduled.setdefault(schedule, new)
        return mode

    def as_leaf(self, data: Any) -> Any:
        return self.sequential.as_leaf(data)

    def run(self, call: NestCall) -> Any:
        """Run a call as a program, or element by element if lengths depend on data."""
        if call.kind == "select":
            result = self.run(replace(call, kind="map"))
            is_one = isinstance(result, FractalTensor) and result.depth == 1
            check_bool(call, result.leaves()[0] if is_one else result, "element 0")
            return np.flatnonzero(result.numpy())
        try:
            program, structure, arguments, why = self._known(call)
        except (LengthsOfDataError, NoDataError) as error:
            because = error.what
            report_call(call.name, lambda: f"element by element, as {because}")
            with use_mode(self):
                return self.sequential.run(call)

        def how() -> str:
            retraced = [f"traced at each call, as {why}"] if why else []
            return "; ".join(["one program", *self._loops.get(program, ()), *retraced])

        report_call(call.name, how)
        outputs = program(*arguments)
        results = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        return self._shown(structure.value(results))

    def _known(self, call: NestCall) -> tuple[LoadedProgram, Structure, Sequence[Any], str]:
        """Return the program of a call, the structure of its result, its inputs, and why it was
        traced again, or ""."""
        readings = [key_of_call(call, keeps_numbers=False)]
        if readings[0].inputs.has_numbers:
            readings.append(key_of_call(call, keeps_numbers=True))
        for reading in readings:
            cached_call = None if reading.key is None else self._calls.get(reading.key)
            key = None if cached_call is None else cached_call.key()
            cached = None if key is None else self._programs.get(key)
            if cached_call is not None and cached is not None:
                return cached[1], cached_call.structure, reading.inputs.arguments, ""
        tracing, structure = _traced(call)
        key, program = self._program(tracing.graph())
        reading = readings[-1 if tracing.call_inputs.keeps_numbers else 0]
        if reading.key is not None:
            self._calls.put(reading.key, _CachedCall(ref(key), structure), reading.inputs.nbytes)
        return program, structure, tracing.call_inputs.arguments, reading.why

    def _program(self, graph: ComputationGraph) -> tuple[GraphKey, LoadedProgram]:
        """Return the program of a graph with its cache key; compile it on first use."""
        key = GraphKey(graph)
        entry = self._programs.get(key)
        if entry is None:
            program, loops = self._compiled(graph)
            entry = key, program
            constants = [*graph.constants, *[c for body in graph.bodies for c in body.constants]]
            self._programs.put(key, entry, sum(constant.data.nbytes for constant in constants))
            self._loops[program] = loops
        return entry

    def _compiled(self, graph: ComputationGraph) -> tuple[LoadedProgram, tuple[str, ...]]:
        """Compile a graph; return its program and the schedules of its loops."""
        machine = self.device.machine
        executor = rated_executor(self.device.executor)
        options = CompileOptions(schedule=self.schedule, executor=executor)
        compiled = compile_graph(graph, machine, options)
        loaded = self.device.load(Binary((compiled.program,), machine.shape, "fractal"))
        return loaded, tuple([note.text() for note in compiled.loops])

    def _shown(self, value: Any) -> Any:
        """Return results as the other modes do: leaves as eager tensors."""
        if isinstance(value, tuple):
            return tuple([self._shown(each) for each in value])
        return value if isinstance(value, FractalTensor) else self.as_leaf(value)


@dataclass(frozen=True, slots=True)
class _CachedCall:
    """The program key of a call and the structure of its result.

    The key is referenced weakly: it holds constants, and goes with its program.
    """

    key: ReferenceType[GraphKey]
    structure: Structure


def _traced(call: NestCall) -> tuple[GraphTracing, Structure]:
    """Trace a call into a graph.

    Whole numbers are inputs, so that one program serves all of them; if the function needs their
    values, trace it again with the numbers as constants.
    """
    tracing = GraphTracing(f"fractal_{call.name}", CallInputs(keeps_numbers=False))
    try:
        return tracing, tracing.trace_call(call)
    except LengthsOfDataError:
        raise
    except Exception:
        if not tracing.call_inputs.has_numbers:
            raise
    tracing = GraphTracing(f"fractal_{call.name}", CallInputs(keeps_numbers=True))
    return tracing, tracing.trace_call(call)


MODES = ("sequential", "parallel")
#: Name of the mode objects in a device's `kept`.
_KEPT = "functions over nests"
#: The default device, opened on first use.
_devices: list[RuntimeDevice] = []
_lock = Lock()


@contextmanager
@takes(device=optional(instance_of("an open device", RuntimeDevice)), schedule=optional(TEXT))
def mode(
    name: str, device: RuntimeDevice | None = None, *, schedule: str | None = None
) -> Iterator[CallReport]:
    """Run functions over nests in this mode within the block.

    `sequential` runs element by element, one operation at a time: a debugger shows numbers and
    errors name the line. `parallel` traces each call into one program and runs independent elements
    together; results agree up to rounding. It calls the function once per element structure, so
    side effects, such as drawing random numbers, happen once per structure.

    Args:
        device: Where they run (default: a device of the machine `host`).
        schedule: A loop schedule to prefer over the cheapest one, in parallel mode.

    Returns:
        A context manager that returns a report of the calls within the block.

    Raises:
        UsageError: Mode or schedule is unknown, or `sequential` has a schedule.
    """
    if name not in MODES:
        raise unknown(f"unknown mode {name!r}", name, MODES)
    check_schedule(schedule)
    if schedule is not None and name != "parallel":
        raise UsageError(f"mode {name} has no loop schedules", got=f"schedule={schedule!r}",
                         remedy='omit schedule=, or use the mode "parallel"')  # fmt: skip
    execution = _mode_on(device or _default_device(), name)
    if isinstance(execution, Parallel) and schedule is not None:
        execution = execution.scheduled(schedule)
    report = CallReport()
    with use_mode(execution), collect_reports(report):
        yield report


def current_mode(*values: Any) -> ExecutionMode:
    """Return the mode of the current block (default: sequential); symbolic values select their
    graph."""
    execution = selected_mode()
    if not isinstance(execution, Traced):
        traced = list(symbolic_values(values))
        if traced:
            builder: Any = traced[0].builder
            return Traced(builder.innermost(traced))
    return execution or _mode_on(_default_device(), "sequential")


def symbolic_values(value: Any) -> Iterator[SymbolicTensor]:
    """Yield the symbolic tensors in a nest, or in several."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from symbolic_values(each)
    elif isinstance(value, Zipped):
        yield from symbolic_values(value.parts)
    elif isinstance(value, FractalTensor):
        yield from symbolic_values(value.data)
    elif isinstance(value, SymbolicTensor) and value.written is None:
        yield value


def _mode_on(device: RuntimeDevice, name: str) -> ExecutionMode:
    """Return the mode object of a device; it is cached because it caches programs."""
    with _lock:
        mode_object = device.kept.get(_KEPT)
        if not isinstance(mode_object, Parallel):
            mode_object = Parallel(device, Sequential(EagerBuilder(device)))
            if not device.is_closed:
                device.kept[_KEPT] = mode_object
    return mode_object if name == "parallel" else mode_object.sequential


def _default_device() -> RuntimeDevice:
    """Return a device of the machine `host`; a forked process opens another one."""
    with _lock:
        if not _devices or _devices[0].is_closed:
            _devices[:] = [RuntimeDevice("host")]
        return _devices[0]

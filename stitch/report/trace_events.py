"""Convert a device's events to the lines of a Chrome trace.

The trace has two processes: the device on its simulated clock, with tracks for the programs and
copies of each inter-op thread, and the host on the wall clock, with a track for each thread. The
simulated clock is the sum of the times of all steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stitch.machine import Machine, MachineShape, footprint
from stitch.planner import Allocate, Copy, Execute, Free, Instance, Plan, Relocate, Step
from stitch.program import Space
from stitch.report.event_report import EventRecord
from stitch.report.explanation import WRITTEN, Place, touched_at_start, touched_buffers
from stitch.runtime import (
    Event,
    Lying,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    Totals,
    Written,
    totals_of,
)

# Tracks.

Line: TypeAlias = dict[str, Any]
SIMULATED, WALL = 1, 2
_SPACES = tuple(Space)
#: Tracks of one worker (inter-op thread): its programs, and its copies to each space.
_TRACKS_PER_WORKER = 1 + len(_SPACES)
#: First track of host threads: Perfetto identifies a track by its number alone.
_THREADS = 1 << 16
#: First track of the workers of host threads, and the tracks of each thread.
_WORKERS, _WORKERS_PER_THREAD = 1 << 20, 1 << 10
#: The shortest slice in nanoseconds, the unit of Perfetto.
TICK = 1


def worker_track(worker: int, space: Space | None = None) -> int:
    """Return the track of a worker's programs, or of its copies to a space."""
    return 1 + worker * _TRACKS_PER_WORKER + (0 if space is None else 1 + _SPACES.index(space))


def thread_track(thread: int, *, reads: bool = False, worker: int = 0) -> int:
    """Return the track of a host thread's runs, of its reads, or of another worker's runs."""
    if worker:
        return _WORKERS + _WORKERS_PER_THREAD * thread + worker
    return _THREADS + 2 * thread + reads


def device_names(device: str, workers: Iterable[int], spaces: Iterable[Space]) -> Iterator[Line]:
    """Name the processes, and the tracks of a device."""
    yield from _process(SIMULATED, f"{device} (simulated time)")
    yield from _process(WALL, "host (wall time)")
    spaces = tuple(spaces)
    for worker in workers:
        yield from track_names(SIMULATED, worker_track(worker), f"inter-op thread {worker}")
        for space in spaces:
            name = f"inter-op thread {worker}: copies to {space.value}"
            yield from track_names(SIMULATED, worker_track(worker, space), name)


def thread_names(thread: int) -> Iterator[Line]:
    """Name the tracks of a host thread."""
    yield from track_names(WALL, thread_track(thread), f"thread {thread}: runs")
    yield from track_names(WALL, thread_track(thread, reads=True), f"thread {thread}: reads")


def _process(process: int, name: str) -> Iterator[Line]:
    for kind, argument in (("name", name), ("sort_index", process)):
        yield {"name": f"process_{kind}", "ph": "M", "pid": process, "tid": 0,
               "args": {kind: argument}}  # fmt: skip


def track_names(process: int, track: int, name: str) -> Iterator[Line]:
    """Name a track of a process, and place it by its number."""
    for kind, argument in (("name", name), ("sort_index", track)):
        yield {"name": f"thread_{kind}", "ph": "M", "pid": process, "tid": track,
               "args": {kind: argument}}  # fmt: skip


def slice_line(
    name: str, kind: str, process: int, track: int, start: int, end: int, arguments: dict[str, Any]
) -> Line:
    """Return a slice from `start` to `end` nanoseconds."""
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": track, "ts": start / 1e3,
            "dur": (end - start) / 1e3, "args": arguments}  # fmt: skip


def instant_line(name: str, process: int, track: int, at: int) -> Line:
    """Return an instant of a plan at `at` nanoseconds."""
    return {"name": name, "cat": "plan", "ph": "i", "pid": process, "tid": track, "ts": at / 1e3,
            "s": "t", "args": {}}  # fmt: skip


def buffer_line(
    phase: str, number: int, name: str, at: int, arguments: dict[str, Any] | None = None
) -> Line:
    """Return the beginning `b` or end `e` of a buffer, or an event `n` of it."""
    return {"name": name, "cat": "memory", "ph": phase, "id": hex(number), "pid": SIMULATED,
            "tid": worker_track(0), "ts": at / 1e3, "args": arguments or {}}  # fmt: skip


def counter_line(name: str, at: int, value: int) -> Line:
    """Return the value of a counter from `at` on."""
    return {"name": name, "ph": "C", "pid": SIMULATED, "tid": worker_track(0), "ts": at / 1e3,
            "args": {"bytes": value}}  # fmt: skip


# Memory: buffers from allocation to release, counters of each space.


class MemoryLines:
    """The present buffers and their numbers."""

    def __init__(self, shape: MachineShape) -> None:
        self._limits = {s: (shape.space(s).base, shape.space(s).limit) for s in shape.spaces}
        self._banks = {s: shape.space(s).banks for s in shape.spaces}
        self._open: dict[Place, tuple[int, Lying]] = {}
        #: Sorted addresses and sizes, and the bytes in use, of each space.
        self._ranges: dict[Space, list[tuple[int, int]]] = {s: [] for s in shape.spaces}
        self._used = dict.fromkeys(shape.spaces, 0)
        #: The spaces whose counters are outdated, and the last values.
        self._changed = set(shape.spaces)
        self._values: dict[str, int] = {}
        self._count = 0

    def update(self, now: Mapping[Place, Lying], at: int, emit: Callable[[Line], object]) -> None:
        """Begin and end buffers to match `now`."""
        for place, (_, buffer) in list(self._open.items()):
            new = now.get(place)
            if new is None or new.size != buffer.size:
                self.end(place, at, emit)
        for place, buffer in now.items():
            if place not in self._open:
                self.begin(buffer, at, emit)

    def begin(self, buffer: Lying, at: int, emit: Callable[[Line], object]) -> None:
        """Add an allocated buffer."""
        if buffer.space not in self._used:
            return
        self.end(buffer.place, at, emit)
        self._count += 1
        self._add(self._count, buffer)
        arguments = {"space": buffer.space.value, "address": buffer.address,
                     "size_per_bank": buffer.size,
                     "nbytes": buffer.size * self._banks[buffer.space]}  # fmt: skip
        emit(buffer_line("b", self._count, buffer.origin, at, arguments))

    def end(self, place: Place, at: int, emit: Callable[[Line], object]) -> None:
        """Remove a freed buffer, if there is one at this address."""
        removed = self._remove(place)
        if removed is not None:
            number, buffer = removed
            emit(buffer_line("e", number, buffer.origin, at))

    def move(
        self, moves: Iterable[tuple[Place, Place]], at: int, emit: Callable[[Line], object]
    ) -> None:
        """Move buffers; simultaneously, because they may exchange their addresses."""
        moved = [(self._remove(source), target) for source, target in moves]
        for removed, (space, address) in moved:
            if removed is not None:
                number, buffer = removed
                self.end((space, address), at, emit)
                self._add(number, buffer._replace(space=space, address=address))
                arguments = {"from": buffer.address, "to": address}
                emit(buffer_line("n", number, buffer.origin, at, arguments))

    def _add(self, number: int, buffer: Lying) -> None:
        self._open[buffer.place] = (number, buffer)
        insort(self._ranges[buffer.space], (buffer.address, buffer.size))
        self._used[buffer.space] += buffer.size
        self._changed.add(buffer.space)

    def _remove(self, place: Place) -> tuple[int, Lying] | None:
        removed = self._open.pop(place, None)
        if removed is not None:
            buffer = removed[1]
            ranges = self._ranges[buffer.space]
            del ranges[bisect_left(ranges, (buffer.address, buffer.size))]
            self._used[buffer.space] -= buffer.size
            self._changed.add(buffer.space)
        return removed

    def counters(self, at: int, emit: Callable[[Line], object]) -> None:
        """Emit the counters that changed."""
        for space in self._limits:
            if space in self._changed:
                values = {"in use": self._used[space], "largest hole": self._hole(space)}
                for what, value in values.items():
                    name = f"{space.value}: {what}"
                    if self._values.get(name) != value:
                        self._values[name] = value
                        emit(counter_line(name, at, value * self._banks[space]))
        self._changed.clear()

    def _hole(self, space: Space) -> int:
        """Return the largest free range of a space, in bytes per bank."""
        end, limit = self._limits[space]
        hole = 0
        for address, size in self._ranges[space]:
            hole = max(hole, address - end)
            end = max(end, address + size)
        return max(hole, limit - end)


# Parts common to all runs of a plan, computed once.


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """The constant parts of all runs of a plan.

    Args:
        plan: The plan.
        started: The buffers that it touches and that exist before it, by address.
        places: Their addresses by number.
        ended: The addresses of the buffers that it touches and leaves.
        nbytes: The bytes of each step that runs a task.
    """

    plan: Plan
    started: dict[Place, Lying]
    places: dict[int, Place]
    ended: frozenset[Place]
    nbytes: dict[int, dict[str, int]]


def facts_of(plan: Plan, machine: Machine) -> PlanFacts:
    """Compute the constant parts of a plan."""
    started, ended = touched_at_start(plan), touched_buffers(plan, plan.final_buffers)

    def of(instances: Sequence[Instance]) -> int:
        return sum(footprint(i.desc, machine.shape).own_nbytes for i in instances)

    nbytes = {}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Execute):
            each = {"read_nbytes": of(step.inputs), "written_nbytes": of(step.outputs)}
            if step.scratch is not None:
                space, _, size = step.scratch
                each["scratch_nbytes"] = size * machine.shape.space(space).banks
            nbytes[index] = each
    return PlanFacts(
        plan,
        {place: Lying(*place, b.size_per_bank, b.origin) for place, b in started.items()},
        {b.number: place for place, b in started.items()}, frozenset(ended), nbytes,
    )  # fmt: skip


#: Plans whose constant parts are cached.
_MAX_PLANS = 512
#: The worker of sequential sections.
MAIN_WORKER = 0


class TraceLines:
    """The state of a device after its events; `add` returns the lines of the next event.

    Args:
        machine: The machine.
        began: The beginning of the trace, in seconds of `perf_counter`.
        workers: The number of inter-op threads.
    """

    def __init__(self, machine: Machine, began: float, workers: int = 1) -> None:
        self._machine, self._began, self._workers = machine, began, workers
        self.total = Totals()
        #: The simulated clock: the sum of all steps in seconds, the end of the last slice in ns.
        self._seconds, self._clock = 0.0, 0
        self._memory = MemoryLines(machine.shape)
        self._threads: dict[int, int] = {}
        #: The tracks of workers that have a name.
        self._named: set[int] = set()
        #: Totals of a run of a plan, by its index: cached, because they take most of the time.
        self._totals: dict[int, Totals] = {}
        self._facts: dict[int, PlanFacts] = {}
        self._out: list[Line] = []
        self._emit = self._out.append

    def names(self) -> list[Line]:
        """Return the names of the tracks, except those of threads, which precede their lines."""
        shape = self._machine.shape
        return list(device_names(self._machine.name, range(self._workers), shape.spaces))

    def add(self, record: EventRecord) -> list[Line]:
        """Add an event and return its lines."""
        event = record.event
        self._out.clear()
        self._add_up(event)
        if isinstance(event, PlanRun | PlanStopped):
            self._plan(event, record.contents)
        elif isinstance(event, Written):
            self._written(event)
        if isinstance(event, PlanRun):
            self._run(event, record.thread)
        elif isinstance(event, ReadBack):
            self._read(event, record.thread)
        elif isinstance(event, PlanMade):
            track = thread_track(self._thread(record.thread))
            name = f"plan {event.index} made"
            self._emit(instant_line(name, WALL, track, self._wall(record.at)))
        return self._out

    def rest(self, contents: tuple[Lying, ...]) -> list[Line]:
        """Return the lines of buffers freed since the last event."""
        self._out.clear()
        self._update({each.place: each for each in contents})
        self._memory.counters(self._clock, self._emit)
        return self._out

    # Clocks.

    def _add_up(self, event: Event) -> None:
        if not isinstance(event, PlanRun):
            self.total += totals_of(event)
            return
        totals = self._totals.get(event.index)
        if totals is None:
            if len(self._totals) >= _MAX_PLANS:
                self._totals.clear()
            totals = self._totals[event.index] = totals_of(event)
        self.total += totals

    def _wall(self, seconds: float) -> int:
        return max(0, round((seconds - self._began) * 1e9))

    def _thread(self, ident: int) -> int:
        """Return the number of a thread, whose tracks are named with its first line."""
        number = self._threads.get(ident)
        if number is None:
            number = self._threads[ident] = len(self._threads) + 1
            self._out.extend(thread_names(number))
        return number

    # The simulated clock.

    def _plan(self, event: PlanRun | PlanStopped, contents: tuple[Lying, ...] | None) -> None:
        facts = self._facts.get(event.index)
        if facts is None or facts.plan is not event.plan:
            if len(self._facts) >= _MAX_PLANS:
                self._facts.clear()
            facts = self._facts[event.index] = facts_of(event.plan, self._machine)
        after = None if contents is None else {each.place: each for each in contents}
        if after is not None:
            self._update(
                {p: each for p, each in after.items() if p not in facts.ended} | facts.started
            )
        steps = _Steps(self, facts, event)
        for index, step in _steps(event):
            steps.add(index, step)
        if isinstance(event, PlanStopped):
            name, track = f"plan {event.index} stopped", worker_track(MAIN_WORKER)
            self._emit(instant_line(name, SIMULATED, track, self._clock))
        if after is not None:
            self._update(after)
        self._memory.counters(self._clock, self._emit)

    def _update(self, now: dict[Place, Lying]) -> None:
        self._memory.update(now, self._clock, self._emit)

    def _written(self, event: Written) -> None:
        self._slice("write", "copy", event.desc.layout.space, event.seconds,
                    {"copies": 1, "nbytes": event.nbytes, "source": "host",
                     "target": event.desc.text(), "reason": WRITTEN})  # fmt: skip

    def _slice(
        self, name: str, kind: str, space: Space | None, seconds: float, arguments: dict[str, Any],
        worker: int = MAIN_WORKER,
    ) -> None:  # fmt: skip
        """Emit a slice; `space` is the target of a copy."""
        self._memory.counters(self._clock, self._emit)
        start = self._clock
        self._seconds += seconds
        self._clock = max(start + TICK, round(self._seconds * 1e9))
        track = worker_track(worker, space)
        self._emit(slice_line(name, kind, SIMULATED, track, start, self._clock, arguments))

    # The wall clock.

    def _run(self, event: PlanRun, thread: int) -> None:
        track, tasks = thread_track(self._thread(thread)), event.plan.request.tasks
        names = [task.transformation.name for task in tasks]
        began, ended = event.began_seconds, event.began_seconds + event.seconds
        self._emit(slice_line(f"plan {event.index}", "run", WALL, track, self._wall(began),
                              self._wall(ended), {"tasks": names}))  # fmt: skip
        for index, (step, span) in enumerate(zip(event.plan.steps, event.spans(), strict=True)):
            start, end = self._wall(span[0]), self._wall(span[1])
            track = self._track(thread, span[2])
            if end > start and isinstance(step, Execute | Copy | Relocate):
                name = names[step.task] if isinstance(step, Execute) else _kind(step)
                self._emit(slice_line(name, "task", WALL, track, start, end, {"step": index}))

    def _track(self, ident: int, worker: int) -> int:
        """Return the track of a worker of a thread's runs; name it with its first line."""
        thread = self._thread(ident)
        track = thread_track(thread, worker=worker)
        if worker and track not in self._named:
            self._named.add(track)
            name = f"thread {thread}, inter-op thread {worker}: runs"
            self._out.extend(track_names(WALL, track, name))
        return track

    def _read(self, event: ReadBack, thread: int) -> None:
        track = thread_track(self._thread(thread), reads=True)
        start, ready, end = (self._wall(moment) for moment in event.moments)
        arguments = {"nbytes": event.nbytes, "tensor": event.desc.text()}
        self._emit(slice_line("read", "read", WALL, track, start, end, arguments))
        if ready > start:
            self._emit(slice_line("wait", "wait", WALL, track, start, ready, {}))


class _Steps:
    """Emits the steps of one run of a plan."""

    def __init__(self, lines: TraceLines, facts: PlanFacts, event: PlanRun | PlanStopped) -> None:
        self._lines, self._facts, self._event = lines, facts, event
        self._places = dict(facts.places)
        self._spans = event.spans() if isinstance(event, PlanRun) else []
        self._worker = MAIN_WORKER

    def add(self, index: int, step: Step) -> None:
        """Emit a step."""
        lines = self._lines
        self._worker = self._spans[index][2] if self._spans else MAIN_WORKER
        if isinstance(step, Allocate):
            buffer = step.buffer
            if buffer.address is not None:
                place = self._places[buffer.number] = (buffer.space, buffer.address)
                lines._memory.begin(
                    Lying(*place, buffer.size_per_bank, buffer.origin), lines._clock, lines._emit
                )
        elif isinstance(step, Free):
            freed = self._places.pop(step.buffer, None)
            if freed is not None:
                lines._memory.end(freed, lines._clock, lines._emit)
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        else:
            self._execute(index, step)

    def _copy(self, step: Copy) -> None:
        source, target = step.source.desc, step.target.desc
        self._lines._slice(
            step.kind, "copy", target.layout.space, step.seconds,
            {"copies": 1, "nbytes": step.nbytes, "plan": self._event.index,
             "source": source.text(), "target": target.text(), "reason": step.reason},
            self._worker,
        )  # fmt: skip

    def _relocate(self, step: Relocate) -> None:
        lines, places = self._lines, self._places
        lines._slice(
            _kind(step), "copy", step.space, step.seconds,
            {"copies": step.count, "nbytes": step.nbytes, "plan": self._event.index,
             "space": step.space.value, "reason": step.reason},
        )  # fmt: skip
        targets = [(number, (step.space, address)) for number, address in step.targets]
        moves = [(places[number], target) for number, target in targets if number in places]
        lines._memory.move(moves, lines._clock, lines._emit)
        places.update(targets)

    def _execute(self, index: int, step: Execute) -> None:
        work = self._event.plan.request.tasks[step.task].transformation
        arguments: dict[str, Any] = {"plan": self._event.index, "task": step.task}
        arguments |= self._facts.nbytes[index]
        if self._spans:
            began, ended, _ = self._spans[index]
            arguments["wall_us"] = round((ended - began) * 1e6, 3)
        self._lines._slice(work.name, work.kind.value, None, work.seconds, arguments, self._worker)


def _steps(event: PlanRun | PlanStopped) -> Iterable[tuple[int, Step]]:
    """Return the completed steps with their numbers."""
    steps = event.plan.steps
    if isinstance(event, PlanStopped):
        return [(number, steps[number]) for number in event.steps]
    return enumerate(steps)


def _kind(step: Copy | Relocate) -> str:
    """Return the kind of a copy."""
    if isinstance(step, Copy):
        return step.kind
    return "move" if step.stage is None else "bounce"

"""The lines of a Chrome trace, made from a device's events.

Two processes: the device on its simulated clock, with tracks for each thread of a plan (its
programs, and its copies into each space), and the host on the wall clock, with a track for each
thread. Simulated times are summed here: the steps of plans follow each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from stitch.machine import Machine, MachineShape, footprint
from stitch.planner import Allocate, Copy, Execute, Free, Instance, Plan, Relocate, Step
from stitch.program import Space
from stitch.report.explanation import WRITTEN, Place, assign_arenas, own_at_start
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
#: Tracks of one lane: of its programs, of its copies into each space.
_OF_LANE = 1 + len(_SPACES)
#: Tracks of the host's threads begin here: Perfetto knows a thread by its number alone.
_THREADS = 1 << 16
#: Those of their lanes begin here, and so many belong to one thread.
_LANES, _OF_THREAD = 1 << 20, 1 << 10
#: The shortest slice that is drawn: Perfetto counts in nanoseconds.
TICK = 1


def lane_track(lane: int, space: Space | None = None) -> int:
    """The track of a lane's programs, or of its copies into a space."""
    return 1 + lane * _OF_LANE + (0 if space is None else 1 + _SPACES.index(space))


def thread_track(thread: int, *, reads: bool = False, lane: int = 0) -> int:
    """The track of the runs of one of the host's threads, of what it reads, or of another lane of
    its runs."""
    return _LANES + _OF_THREAD * thread + lane if lane else _THREADS + 2 * thread + reads


def device_names(device: str, lanes: Iterable[int], spaces: Iterable[Space]) -> Iterator[Line]:
    """The names of the processes, and of the tracks of a device."""
    yield from _process(SIMULATED, f"{device} (simulated time)")
    yield from _process(WALL, "host (wall time)")
    spaces = tuple(spaces)
    for lane in lanes:
        yield from _track(SIMULATED, lane_track(lane), f"inter-op thread {lane}")
        for space in spaces:
            name = f"inter-op thread {lane}: copies to {space.value}"
            yield from _track(SIMULATED, lane_track(lane, space), name)


def thread_names(thread: int) -> Iterator[Line]:
    """The names of the tracks of one of the host's threads."""
    yield from _track(WALL, thread_track(thread), f"thread {thread}: runs")
    yield from _track(WALL, thread_track(thread, reads=True), f"thread {thread}: reads")


def thread_lane_names(thread: int, lane: int) -> Iterator[Line]:
    """The name of the track of another lane of a thread's runs."""
    name = f"thread {thread}, inter-op thread {lane}: runs"
    yield from _track(WALL, thread_track(thread, lane=lane), name)


def _process(process: int, name: str) -> Iterator[Line]:
    for kind, argument in (("name", name), ("sort_index", process)):
        yield {"name": f"process_{kind}", "ph": "M", "pid": process, "tid": 0,
               "args": {kind: argument}}  # fmt: skip


def _track(process: int, track: int, name: str) -> Iterator[Line]:
    for kind, argument in (("name", name), ("sort_index", track)):
        yield {"name": f"thread_{kind}", "ph": "M", "pid": process, "tid": track,
               "args": {kind: argument}}  # fmt: skip


def slice_line(
    name: str, kind: str, process: int, track: int, start: int, end: int, arguments: dict[str, Any]
) -> Line:
    """Something that lasted."""
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": track, "ts": start / 1e3,
            "dur": (end - start) / 1e3, "args": arguments}  # fmt: skip


def instant_line(name: str, kind: str, process: int, track: int, at: int) -> Line:
    """Something that happened."""
    return {"name": name, "cat": kind, "ph": "i", "pid": process, "tid": track, "ts": at / 1e3,
            "s": "t", "args": {}}  # fmt: skip


def flow_line(phase: str, number: int, track: int, at: int) -> Line:
    """One end of an arrow, or a stop on its way; it belongs to the slice that is there then."""
    line = {"name": "value", "cat": "flow", "ph": phase, "id": number, "pid": SIMULATED,
            "tid": track, "ts": at / 1e3}  # fmt: skip
    return line | {"bp": "e"} if phase == "f" else line


def buffer_line(
    phase: str, number: int, name: str, at: int, arguments: dict[str, Any] | None = None
) -> Line:
    """The beginning or end of a buffer, or something that befell it on the way."""
    return {"name": name, "cat": "memory", "ph": phase, "id": hex(number), "pid": SIMULATED,
            "tid": lane_track(0), "ts": at / 1e3, "args": arguments or {}}  # fmt: skip


def counter_line(name: str, at: int, value: int) -> Line:
    """What a counter shows from now on."""
    return {"name": name, "ph": "C", "pid": SIMULATED, "tid": lane_track(0), "ts": at / 1e3,
            "args": {"bytes": value}}  # fmt: skip


# Flows: from the slice that computed a value over its copies to its readers.

#: Slices of a way that are told: the first, and the last ones.
MAX_STOPS = 8


class Slice(NamedTuple):
    """A slice of the simulated clock: its track and its times; whether it computed."""

    track: int
    start: int
    end: int
    computes: bool


Way = tuple[Slice, ...]


class FlowLines:
    """Which slices made and copied what lies where."""

    def __init__(self) -> None:
        #: By place, then by offset in bytes.
        self._known: dict[Place, dict[int, Way]] = {}
        #: The same for the buffers of the plan that is told, by number, then by offset.
        self._ways: dict[int, dict[int, Way]] = {}
        self._places: dict[int, Place] = {}
        self._found: tuple[Place, ...] = ()
        self._told = 0

    def begin(self, places: Mapping[int, Place]) -> None:
        """A plan begins that finds its buffers there."""
        self._ways, self._places = {}, dict(places)
        self._found = tuple(places.values())

    def allocate(self, buffer: int, place: Place) -> None:
        """A new buffer, in which nothing lies yet."""
        self._ways[buffer] = {}
        self._places[buffer] = place

    def forget(self, place: Place) -> None:
        """Nothing lies there any more."""
        self._known.pop(place, None)

    def _of(self, buffer: int) -> dict[int, Way]:
        """The ways of what lies in a buffer."""
        ways = self._ways.get(buffer)
        if ways is None:
            ways = self._ways[buffer] = dict(self._known.get(self._places[buffer], {})
                                             if buffer in self._places else {})  # fmt: skip
        return ways

    def make(self, outputs: Iterable[Instance], by: Slice) -> None:
        """A task has written its outputs."""
        for instance in outputs:
            self._of(instance.buffer)[instance.offset_nbytes] = (by,)

    def copy(self, source: Instance, target: Instance, by: Slice, *, whole: bool) -> None:
        """A value was copied, or all that lies in its buffer."""
        ways = self._of(source.buffer)
        into = self._of(target.buffer)
        if whole:
            into.update({offset: _longer(way, by) for offset, way in ways.items()})
        way = ways.get(source.offset_nbytes, ())
        into[target.offset_nbytes] = _longer(way, by)

    def move(self, buffers: Iterable[tuple[int, Place]], by: Slice) -> None:
        """Buffers were brought elsewhere, with all that lies in them."""
        for buffer, place in buffers:
            ways = self._of(buffer)
            self._ways[buffer] = {offset: _longer(way, by) for offset, way in ways.items()}
            self._places[buffer] = place

    def read(self, inputs: Sequence[Instance], by: Slice,
             tell: Callable[[Line], object]) -> int | None:  # fmt: skip
        """A task reads its inputs: tells where they come from; gives when the last of them was
        computed, None where none was."""
        ready: int | None = None
        for way in dict.fromkeys(self._of(i.buffer).get(i.offset_nbytes, ()) for i in inputs):
            if not way:
                continue
            self._told += 1
            first, *stops = way
            tell(flow_line("s", self._told, first.track, first.end - TICK))
            for stop in stops:
                tell(flow_line("t", self._told, stop.track, stop.start))
            tell(flow_line("f", self._told, by.track, by.start))
            if first.computes:
                ready = max(first.end, ready or 0)
        return ready

    def end(self, final: Iterable[int]) -> None:
        """The plan has ended; these buffers are left where they lie."""
        places = self._places
        left = {places[buffer]: self._of(buffer) for buffer in final if buffer in places}
        for place in (*self._found, *places.values()):
            self._known.pop(place, None)
        self._known |= left
        self._ways, self._places, self._found = {}, {}, ()


def _longer(way: Way, by: Slice) -> Way:
    """A way with one more slice; of long ones the first slice and the last ones stay."""
    if len(way) < MAX_STOPS:
        return (*way, by)
    return (way[0], *way[2:], by)


# Memory: buffers from allocation to release, counters of each space.


class MemoryLines:
    """What lies where now, and the numbers of the buffers."""

    def __init__(self, shape: MachineShape) -> None:
        self._limits = {s: (shape.space(s).base, shape.space(s).limit) for s in shape.spaces}
        self._banks = {s: shape.space(s).banks for s in shape.spaces}
        self._open: dict[Place, tuple[int, Lying]] = {}
        #: Of each space: addresses and sizes in order, and bytes in use.
        self._ranges: dict[Space, list[tuple[int, int]]] = {s: [] for s in shape.spaces}
        self._used = dict.fromkeys(shape.spaces, 0)
        #: The spaces whose counters are out of date, and what they showed last.
        self._changed = set(shape.spaces)
        self._shown: dict[str, int] = {}
        self._begun = 0

    def become(
        self, now: Mapping[Place, Lying], at: int, tell: Callable[[Line], object],
        gone: Callable[[Place], object],
    ) -> None:  # fmt: skip
        """This is what lies in the spaces now; `gone` hears of places that were left."""
        for place, (_, lying) in list(self._open.items()):
            new = now.get(place)
            if new is None or new.size != lying.size:
                self.end(place, at, tell)
                gone(place)
        for place, lying in now.items():
            if place not in self._open:
                self.begin(lying, at, tell)

    def begin(self, lying: Lying, at: int, tell: Callable[[Line], object]) -> None:
        """A buffer was allocated."""
        if lying.space not in self._used:
            return
        self.end(lying.place, at, tell)
        self._begun += 1
        self._take(self._begun, lying)
        arguments = {"space": lying.space.value, "address": lying.address,
                     "size_per_bank": lying.size,
                     "nbytes": lying.size * self._banks[lying.space]}  # fmt: skip
        tell(buffer_line("b", self._begun, lying.origin, at, arguments))

    def end(self, place: Place, at: int, tell: Callable[[Line], object]) -> None:
        """A buffer was freed; where none is known to lie nothing happens."""
        known = self._leave(place)
        if known is not None:
            number, lying = known
            tell(buffer_line("e", number, lying.origin, at))

    def move(
        self, ways: Iterable[tuple[Place, Place]], at: int, tell: Callable[[Line], object]
    ) -> None:
        """Buffers lie elsewhere in their spaces; all at once, as they may take turns."""
        moved = [(self._leave(place), target) for place, target in ways]
        for known, (space, address) in moved:
            if known is not None:
                number, lying = known
                self.end((space, address), at, tell)
                self._take(number, lying._replace(space=space, address=address))
                arguments = {"from": lying.address, "to": address}
                tell(buffer_line("n", number, lying.origin, at, arguments))

    def _take(self, number: int, lying: Lying) -> None:
        self._open[lying.place] = (number, lying)
        insort(self._ranges[lying.space], (lying.address, lying.size))
        self._used[lying.space] += lying.size
        self._changed.add(lying.space)

    def _leave(self, place: Place) -> tuple[int, Lying] | None:
        known = self._open.pop(place, None)
        if known is not None:
            lying = known[1]
            ranges = self._ranges[lying.space]
            del ranges[bisect_left(ranges, (lying.address, lying.size))]
            self._used[lying.space] -= lying.size
            self._changed.add(lying.space)
        return known

    def counters(self, at: int, tell: Callable[[Line], object]) -> None:
        """What the counters show from now on, where that is new."""
        for space in self._limits:
            if space in self._changed:
                shows = {"in use": self._used[space], "largest hole": self._hole(space)}
                for what, value in shows.items():
                    name = f"{space.value}: {what}"
                    if self._shown.get(name) != value:
                        self._shown[name] = value
                        tell(counter_line(name, at, value * self._banks[space]))
        self._changed.clear()

    def _hole(self, space: Space) -> int:
        """The largest range of a space where nothing lies, in bytes per bank."""
        end, limit = self._limits[space]
        hole = 0
        for address, size in self._ranges[space]:
            hole = max(hole, address - end)
            end = max(end, address + size)
        return max(hole, limit - end)


# Parts common to all runs of a plan, computed once.


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What all runs of a plan have in common: what it finds of its own, by place and by number, the
    places and numbers of what it leaves, the bytes of each step that runs a task."""

    plan: Plan
    started: dict[Place, Lying]
    places: dict[int, Place]
    ended: frozenset[Place]
    final: tuple[int, ...]
    nbytes: dict[int, dict[str, int]]


def facts_of(plan: Plan, machine: Machine) -> PlanFacts:
    """What is the same in each run of a plan."""
    started, ended = own_at_start(plan), assign_arenas(plan, plan.final_buffers)

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
        {b.number: place for place, b in started.items()},
        frozenset(ended), tuple([b.number for b in ended.values()]), nbytes,
    )  # fmt: skip


#: Plans of which is remembered what all of their runs have in common.
_MAX_PLANS = 512
#: Where programs run that no fork gives to another.
LANE = 0


class Heard(NamedTuple):
    """An event, what lay in the spaces afterwards (None where nobody can tell), the thread that
    told it, and when, in seconds of `perf_counter`."""

    event: Event
    lying: tuple[Lying, ...] | None
    thread: int
    at: float


class TraceLines:
    """What is known of a device after so many events; `add` gives the lines of one more."""

    def __init__(self, machine: Machine, began: float, lanes: int = 1) -> None:
        """`began`: when the trace did, in seconds of `perf_counter`; `lanes`: how many the device
        has."""
        self._machine, self._began, self._lanes = machine, began, lanes
        self.total = Totals()
        #: The simulated clock: what all steps took, and where the last slice ended.
        self._seconds, self._clock = 0.0, 0
        self._memory, self._flows = MemoryLines(machine.shape), FlowLines()
        self._threads: dict[int, int] = {}
        #: The tracks of threads' other lanes that have their names.
        self._named: set[int] = set()
        #: What a run of a plan adds up to, by its index: that takes longer to find than all else.
        self._totals: dict[int, Totals] = {}
        self._facts: dict[int, PlanFacts] = {}
        self._out: list[Line] = []
        self._tell = self._out.append

    def twin(self) -> TraceLines:
        """Another one that knows the same; this one stays as it is."""
        twin = TraceLines(self._machine, self._began, self._lanes)
        twin.total, twin._seconds, twin._clock = self.total, self._seconds, self._clock
        twin._memory, twin._flows = deepcopy(self._memory), deepcopy(self._flows)
        twin._threads, twin._named = dict(self._threads), set(self._named)
        return twin

    def names(self) -> list[Line]:
        """The names of the tracks, but for those of threads, which come with their first lines."""
        shape = self._machine.shape
        return list(device_names(self._machine.name, range(self._lanes), shape.spaces))

    def skip(self, heard: Heard) -> None:
        """One more event, whose lines nobody wants."""
        event = heard.event
        self._add_up(event)
        if isinstance(event, Written):
            self._pass(event.seconds)
        elif isinstance(event, PlanRun | PlanStopped):
            for _, step in _steps(event):
                if isinstance(step, Copy | Relocate):
                    self._pass(step.seconds)
                elif isinstance(step, Execute):
                    self._pass(event.plan.request.tasks[step.task].transformation.seconds)

    def add(self, heard: Heard) -> list[Line]:
        """The lines of one more event."""
        event = heard.event
        self._out.clear()
        self._add_up(event)
        if isinstance(event, PlanRun | PlanStopped):
            self._plan(event, heard.lying)
        elif isinstance(event, Written):
            self._written(event)
        if isinstance(event, PlanRun):
            self._run(event, heard.thread)
        elif isinstance(event, ReadBack):
            self._read(event, heard.thread)
        elif isinstance(event, PlanMade):
            track = thread_track(self._thread(heard.thread))
            name = f"plan {event.index} made"
            self._tell(instant_line(name, "plan", WALL, track, self._wall(heard.at)))
        return self._out

    def rest(self, lying: tuple[Lying, ...]) -> list[Line]:
        """What has been let go of since the last event."""
        self._out.clear()
        self._become({each.place: each for each in lying})
        self._memory.counters(self._clock, self._tell)
        return self._out

    # -- clocks ------------------------------------------------------------------------------------

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

    def _pass(self, seconds: float) -> tuple[int, int]:
        """The simulated clock goes on; from when to when, in nanoseconds."""
        start = self._clock
        self._seconds += seconds
        self._clock = max(start + TICK, round(self._seconds * 1e9))
        return start, self._clock

    def _wall(self, seconds: float) -> int:
        return max(0, round((seconds - self._began) * 1e9))

    def _thread(self, ident: int) -> int:
        """A small number for a thread; its tracks get their names."""
        number = self._threads.get(ident)
        if number is None:
            number = self._threads[ident] = len(self._threads) + 1
            self._out.extend(thread_names(number))
        return number

    # -- the simulated clock -----------------------------------------------------------------------

    def _plan(self, event: PlanRun | PlanStopped, lying: tuple[Lying, ...] | None) -> None:
        facts = self._facts.get(event.index)
        if facts is None or facts.plan is not event.plan:
            if len(self._facts) >= _MAX_PLANS:
                self._facts.clear()
            facts = self._facts[event.index] = facts_of(event.plan, self._machine)
        after = None if lying is None else {each.place: each for each in lying}
        if after is not None:
            self._become(
                {p: each for p, each in after.items() if p not in facts.ended} | facts.started
            )
        self._flows.begin(facts.places)
        told = _Steps(self, facts, event)
        for index, step in _steps(event):
            told.step(index, step)
        self._flows.end(facts.final)
        if isinstance(event, PlanStopped):
            name = f"plan {event.index} stopped"
            self._tell(instant_line(name, "plan", SIMULATED, lane_track(LANE), self._clock))
        if after is not None:
            self._become(after)
        self._memory.counters(self._clock, self._tell)

    def _become(self, now: dict[Place, Lying]) -> None:
        self._memory.become(now, self._clock, self._tell, self._flows.forget)

    def _written(self, event: Written) -> None:
        self._slice("write", "copy", event.desc.layout.space, event.seconds,
                    {"copies": 1, "nbytes": event.nbytes, "source": "host",
                     "target": event.desc.text(), "reason": WRITTEN})  # fmt: skip

    def _slice(
        self, name: str, kind: str, space: Space | None, seconds: float, arguments: dict[str, Any],
        lane: int = LANE,
    ) -> Slice:  # fmt: skip
        """Something that takes its time; `space`: where to, if it is a copy."""
        self._memory.counters(self._clock, self._tell)
        start, end = self._pass(seconds)
        track = lane_track(lane, space)
        self._tell(slice_line(name, kind, SIMULATED, track, start, end, arguments))
        return Slice(track, start, end, space is None)

    # -- the wall clock ----------------------------------------------------------------------------

    def _run(self, event: PlanRun, thread: int) -> None:
        track, tasks = thread_track(self._thread(thread)), event.plan.request.tasks
        names = [task.transformation.name for task in tasks]
        began, ended = event.began_seconds, event.began_seconds + event.seconds
        self._tell(slice_line(f"plan {event.index}", "run", WALL, track, self._wall(began),
                              self._wall(ended), {"tasks": names}))  # fmt: skip
        for index, (step, span) in enumerate(zip(event.plan.steps, event.spans(), strict=True)):
            start, end, track = (
                self._wall(span[0]),
                self._wall(span[1]),
                self._track(thread, span[2]),
            )
            if end > start and isinstance(step, Execute | Copy | Relocate):
                name = names[step.task] if isinstance(step, Execute) else _kind(step)
                self._tell(slice_line(name, "task", WALL, track, start, end, {"step": index}))

    def _track(self, ident: int, lane: int) -> int:
        """The track of a lane of a thread's runs; another than the thread's own gets its name."""
        thread = self._thread(ident)
        track = thread_track(thread, lane=lane)
        if lane and track not in self._named:
            self._named.add(track)
            self._out.extend(thread_lane_names(thread, lane))
        return track

    def _read(self, event: ReadBack, thread: int) -> None:
        track = thread_track(self._thread(thread), reads=True)
        asked, ready, got = (self._wall(moment) for moment in event.moments)
        arguments = {"nbytes": event.nbytes, "tensor": event.desc.text()}
        self._tell(slice_line("read", "read", WALL, track, asked, got, arguments))
        if ready > asked:
            self._tell(slice_line("wait", "wait", WALL, track, asked, ready, {}))


class _Steps:
    """The steps of one run of a plan, as they are told."""

    def __init__(self, lines: TraceLines, facts: PlanFacts, event: PlanRun | PlanStopped) -> None:
        self._lines, self._facts, self._event = lines, facts, event
        self._places = dict(facts.places)
        self._began = lines._clock
        self._spans = event.spans() if isinstance(event, PlanRun) else []
        self._lane = LANE

    def step(self, index: int, step: Step) -> None:
        """One more step."""
        lines, flows = self._lines, self._lines._flows
        self._lane = self._spans[index][2] if self._spans else LANE
        if isinstance(step, Allocate):
            buffer = step.buffer
            if buffer.address is not None:
                place = self._places[buffer.number] = (buffer.space, buffer.address)
                lines._memory.begin(
                    Lying(*place, buffer.size_per_bank, buffer.origin), lines._clock, lines._tell
                )
                flows.allocate(buffer.number, place)
        elif isinstance(step, Free):
            freed = self._places.pop(step.buffer, None)
            if freed is not None:
                lines._memory.end(freed, lines._clock, lines._tell)
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        else:
            self._execute(index, step)

    def _copy(self, step: Copy) -> None:
        source, target = step.source.desc, step.target.desc
        by = self._lines._slice(
            step.kind, "copy", target.layout.space, step.seconds,
            {"copies": 1, "nbytes": step.nbytes, "plan": self._event.index,
             "source": source.text(), "target": target.text(), "reason": step.reason},
            self._lane,
        )  # fmt: skip
        self._lines._flows.copy(step.source, step.target, by, whole=step.kind != "copy")

    def _relocate(self, step: Relocate) -> None:
        lines, places = self._lines, self._places
        by = lines._slice(
            _kind(step), "copy", step.space, step.seconds,
            {"copies": step.count, "nbytes": step.nbytes, "plan": self._event.index,
             "space": step.space.value, "reason": step.reason},
        )  # fmt: skip
        targets = [(number, (step.space, address)) for number, address in step.targets]
        ways = [(places[number], target) for number, target in targets if number in places]
        lines._memory.move(ways, lines._clock, lines._tell)
        places.update(targets)
        lines._flows.move(targets, by)

    def _execute(self, index: int, step: Execute) -> None:
        lines, what = self._lines, self._event.plan.request.tasks[step.task].transformation
        arguments: dict[str, Any] = {"plan": self._event.index, "task": step.task}
        arguments |= self._facts.nbytes[index]
        if self._spans:
            began, ended, _ = self._spans[index]
            arguments["wall_us"] = round((ended - began) * 1e6, 3)
        by = lines._slice(what.name, what.kind.value, None, what.seconds, arguments, self._lane)
        ready = lines._flows.read(step.inputs, by, lines._tell)
        # From when the last program that it waits for had ended.
        since = self._began if ready is None else max(ready, self._began)
        arguments["waited_us"] = (by.start - since) / 1e3
        lines._flows.make(step.outputs, by)


def _steps(event: PlanRun | PlanStopped) -> Iterable[tuple[int, Step]]:
    """The steps that were done, with their numbers."""
    steps = event.plan.steps
    if isinstance(event, PlanStopped):
        return [(number, steps[number]) for number in event.steps]
    return enumerate(steps)


def _kind(step: Copy | Relocate) -> str:
    """What a copy is called."""
    if isinstance(step, Copy):
        return step.kind
    return "move" if step.stage is None else "bounce"

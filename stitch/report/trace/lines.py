"""The lines that a device's events make in a trace, in their order.

Comes in: events, each with what lay in the spaces, who told it and when. Goes out: lines. Times on
the simulated clock are added up here: steps of plans come one after the other. Must not know: where
lines go, how many are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

from stitch.machine import Machine
from stitch.planner import Allocate, Copy, Execute, Free, Relocate, Step
from stitch.program import Space
from stitch.report.allocations import Place
from stitch.report.explanation import WRITTEN
from stitch.report.trace.flows import FlowLines, Slice
from stitch.report.trace.memory import MemoryLines
from stitch.report.trace.plan_facts import PlanFacts, facts_of
from stitch.report.trace.tracks import (
    SIMULATED,
    TICK,
    WALL,
    Line,
    device_names,
    instant_line,
    lane_track,
    slice_line,
    thread_lane_names,
    thread_names,
    thread_track,
)
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

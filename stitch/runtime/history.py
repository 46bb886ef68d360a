"""What a device has done, added up: the events of its stream as plans and counts.

A period begins with the device, or where `clear` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stitch.planner import Copy, Execute, Plan, Relocate
from stitch.program import Space, TensorDesc
from stitch.runtime.events import Event, PlanRun, PlanStopped, Written

#: The period that begins with the device.
WHOLE_RUN = "whole run"
#: Plans that are listed one by one; what older ones did is only added up.
MAX_PLANS = 512


@dataclass(frozen=True, slots=True)
class Totals:
    """Program runs and copies, added up; `seconds` of copies and `program_seconds` are simulated.

    `copies` and `nbytes` as `Footprint.own_nbytes` says; `entries` are those of the copies that
    carried the host arrays of a call in. `staging_nbytes`: the most that any plan's kernels staged.
    `beside`: the stretches that threads run beside each other, where no hook looks on.
    """

    programs: int = 0
    copies: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    entries: int = 0
    staging_nbytes: int = 0
    program_seconds: float = 0.0
    beside: int = 0

    def __add__(self, other: Totals) -> Totals:
        return self.plus(other, 1)

    def plus(self, other: Totals, times: int) -> Totals:
        """Another's, so many times, on top."""
        return Totals(
            self.programs + times * other.programs,
            self.copies + times * other.copies,
            self.nbytes + times * other.nbytes,
            self.seconds + times * other.seconds,
            self.entries + times * other.entries,
            max(self.staging_nbytes, other.staging_nbytes if times else 0),
            self.program_seconds + times * other.program_seconds,
            self.beside + times * other.beside,
        )


def totals_of(event: Event) -> Totals:
    """What an event adds to the totals (reads and plans that were only made: nothing)."""
    if isinstance(event, PlanRun):
        return totals_of_steps(event.plan)
    if isinstance(event, PlanStopped):
        return totals_of_steps(event.plan, event.steps)
    if isinstance(event, Written):
        return Totals(0, 1, event.nbytes, event.seconds)
    return Totals()


def totals_of_steps(plan: Plan, numbers: Iterable[int] | None = None) -> Totals:
    """What one run of a plan, or of some of its steps, does."""
    steps = plan.steps if numbers is None else [plan.steps[number] for number in numbers]
    entering = plan.request.entering()
    totals = Totals()
    for step in steps:
        if isinstance(step, Execute):
            task = plan.request.tasks[step.task]
            totals += Totals(1, program_seconds=task.transformation.seconds)
        elif isinstance(step, Copy | Relocate):
            enters = isinstance(step, Copy) and step.source.buffer in entering
            totals += Totals(0, step.count, step.nbytes, step.seconds, int(enters))
    return totals


class Tally:
    """How often one plan ran. It outlives the bound plan, which holds programs and arrays."""

    __slots__ = ("_addresses", "_each", "_is_new", "_plan", "is_closed", "runs")

    def __init__(
        self, plan: Plan, each: Totals, addresses: Mapping[int, int], *, is_new: bool
    ) -> None:
        """`each`: what one run does; `addresses`: where buffers lie, if not where the plan says;
        `is_new`: whether the plan was made for the first run."""
        #: Whether the plan cannot run again.
        self.is_closed = False
        self._is_new = is_new
        self._plan, self._each, self._addresses = plan, each, addresses
        self.runs = 0

    @property
    def plan(self) -> Plan:
        """What is counted; it is made for the addresses when it is first asked for."""
        if self._addresses:
            self._plan, self._addresses = self._plan.at(self._addresses), {}
        return self._plan

    @property
    def total(self) -> Totals:
        """What all runs did."""
        return Totals().plus(self._each, self.runs)

    @property
    def replays(self) -> int:
        """How many runs needed no plan."""
        return self.runs - (self._is_new and self.runs > 0)

    def begin_anew(self) -> None:
        """Count from zero."""
        self._is_new = self._is_new and not self.runs
        self.runs = 0


@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened `times` times, each with so many bytes and simulated seconds."""

    source: str
    target: str
    nbytes: int
    seconds: float
    times: int


@dataclass(frozen=True, slots=True)
class Account:
    """What a device did in a period, all of one moment.

    `plans` with how often each ran, in the order of first runs; `earlier`: plans that are not
    listed any more; `writes`: tensors that the host
    overwrote; `reads`: tensors that the host read. `total` adds all of that up but the reads;
    `writes_seen` and `nbytes_seen` are what the memories of the spaces themselves counted.
    """

    period: str
    plans: tuple[tuple[Plan, int], ...]
    earlier: Totals
    writes: tuple[Line, ...]
    reads: tuple[Line, ...]
    total: Totals
    writes_seen: int
    nbytes_seen: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a device has done since it opened, counted; in the steady state only `replays` grows,
    and `windows` where work goes by way of the queue (pipelines and settled trainings do not).

    `recordings_made`: plans that are kept to run again; `bindings_made`: how often one was bound to
    places. `replays`: runs of plans that were known, by way of the queue or past it, to their end.
    `windows`: runs of the queue. `revocations`: leases that gave their memory up.
    """

    plans_made: int
    recordings_made: int
    bindings_made: int
    replays: int
    code_written: int
    windows: int
    revocations: int


class History:
    """How often each plan ran, and what else happened, since the period began."""

    def __init__(self, seen: Callable[[], tuple[int, int]]) -> None:
        #: Gives the writes and bytes that the memories of the spaces have counted.
        self.seen = seen
        self._began = (0, 0)
        self.period = WHOLE_RUN
        self._plans: dict[int, Tally] = {}
        self._limit = MAX_PLANS
        #: What plans did that are no longer listed one by one, and what ended half-way.
        self._earlier = Totals()
        self._before = Totals()
        #: How often a known plan ran, but for what is listed one by one.
        self._replays = 0
        self._reads: dict[int, tuple[TensorDesc, int, list[int]]] = {}
        #: Tensors that the host overwrote, as text, and their bytes → simulated seconds, how often.
        self._writes: dict[tuple[str, int], tuple[float, list[int]]] = {}

    # -- counting ----------------------------------------------------------------------------------

    def add(self, key: int, tally: Tally) -> None:
        """Work that `tally` describes, and counts each time, may run from now on; `key` is its
        own."""
        self._plans[key] = tally
        if len(self._plans) > self._limit:
            self._fold()

    def _fold(self) -> None:
        """Add up what nothing can run any more, oldest first; the rest is alive in any case."""
        spare = len(self._plans) - MAX_PLANS
        for key in [k for k, tally in self._plans.items() if tally.is_closed][:spare]:
            tally = self._plans.pop(key)
            self._earlier += tally.total
            self._replays += tally.replays
        self._limit = max(MAX_PLANS + MAX_PLANS // 4, 2 * len(self._plans) - MAX_PLANS)

    def count(self, event: Event) -> None:
        """Count an event that comes seldom: runs and reads are counted as they happen."""
        if isinstance(event, PlanStopped):
            self._earlier += totals_of(event)
        elif isinstance(event, Written):
            key = (event.desc.text(), event.nbytes)
            self._writes.setdefault(key, (event.seconds, [0]))[1][0] += 1

    def read(self, key: int, desc: TensorDesc, nbytes: int) -> None:
        """The host read a tensor; `key` is its descriptor's."""
        self.reads_of(key, desc, nbytes)[0] += 1

    def reads_of(self, key: int, desc: TensorDesc, nbytes: int) -> list[int]:
        """How often the host read such tensors, for who counts by himself."""
        counted = self._reads.get(key)
        if counted is None:
            counted = self._reads[key] = (desc, nbytes, [0])
        return counted[2]

    # -- telling -----------------------------------------------------------------------------------

    @property
    def plans(self) -> tuple[tuple[Plan, int], ...]:
        """Every listed plan that ran, with how often."""
        return tuple((t.plan, t.runs) for t in self._plans.copy().values() if t.runs)

    @property
    def replays(self) -> int:
        """How often a known plan ran to its end since the device was opened."""
        return self._replays + sum([tally.replays for tally in self._plans.copy().values()])

    def account(self) -> Account:
        """What happened since the period began; the device's lock is held."""
        reads = tuple(
            Line(desc.text(), Space.HOST.value, nbytes, 0.0, times[0])
            for desc, nbytes, times in self._reads.copy().values()
            if times[0]
        )
        writes_seen, nbytes_seen = self.seen()
        return Account(
            self.period, self.plans, self._earlier, self._written(), reads,
            self._total(), writes_seen - self._began[0], nbytes_seen - self._began[1],
        )  # fmt: skip

    def whole(self) -> Totals:
        """What happened since the device was opened."""
        return self._before + self._total()

    def period_from_now(self) -> str:
        """What a period is called that begins now."""
        return WHOLE_RUN if self.whole() == Totals() else "since it was watched"

    def _written(self) -> tuple[Line, ...]:
        return tuple(
            Line(Space.HOST.value, target, nbytes, seconds, times[0])
            for (target, nbytes), (seconds, times) in self._writes.copy().items()
        )

    def _total(self) -> Totals:
        total = self._earlier
        for tally in self._plans.copy().values():
            total += tally.total
        for line in self._written():
            total = total.plus(Totals(0, 1, line.nbytes, line.seconds), line.times)
        return total

    def clear(self, period: str = "since the last look") -> None:
        """Begin another period (counts of plans that run again go on from zero)."""
        self._before, self._began = self.whole(), self.seen()
        self.period = period
        self._replays = self.replays
        for tally in self._plans.values():
            tally.begin_anew()
        self._earlier = Totals()
        self._writes.clear()
        # Others count there.
        for _, _, times in self._reads.copy().values():
            times[0] = 0

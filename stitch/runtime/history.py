"""The history of a device: counts of plan runs, copies, reads and writes.

A period begins when the device is opened or `clear` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from stitch.planner import Copy, Execute, Plan, Relocate
from stitch.program import Space, TensorDesc
from stitch.runtime.events import Event, PlanRun, PlanStopped, Written

#: Name of the period that begins when the device is opened.
WHOLE_RUN = "whole run"
#: Number of plans listed separately; older ones are only summed.
MAX_PLANS = 512


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of program runs and copies; `seconds` (copies) and `program_seconds` are simulated.

    `copies` and `nbytes` are as `Footprint.own_nbytes` defines; `entries` are the copies that
    brought host arrays of a call to the device. `staging_nbytes`: the largest staging memory of any
    plan's kernels. `beside`: sections that ran in parallel threads (without hooks).
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
        """Return the sum with `times` times `other`."""
        return self.plus_all([(other, times)])

    def plus_all(self, others: Iterable[tuple[Totals, int]]) -> Totals:
        """Return the sum with each of `others` so many times."""
        programs, copies, nbytes, seconds = self.programs, self.copies, self.nbytes, self.seconds
        entries, staging, beside = self.entries, self.staging_nbytes, self.beside
        program_seconds = self.program_seconds
        for other, times in others:
            if times:
                programs += times * other.programs
                copies += times * other.copies
                nbytes += times * other.nbytes
                seconds += times * other.seconds
                entries += times * other.entries
                staging = max(staging, other.staging_nbytes)
                program_seconds += times * other.program_seconds
                beside += times * other.beside
        return Totals(
            programs, copies, nbytes, seconds, entries, staging, program_seconds, beside
        )  # fmt: skip


def totals_of(event: Event) -> Totals:
    """Return the totals of one event; zero for reads and new plans."""
    if isinstance(event, PlanRun):
        return totals_of_steps(event.plan)
    if isinstance(event, PlanStopped):
        return totals_of_steps(event.plan, event.steps)
    if isinstance(event, Written):
        return Totals(0, 1, event.nbytes, event.seconds)
    return Totals()


def totals_of_steps(plan: Plan, numbers: Iterable[int] | None = None) -> Totals:
    """Return the totals of one run of a plan, or of some of its steps."""
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
    """Counts the runs of one plan. It outlives the bound plan, which holds programs and arrays."""

    __slots__ = ("_addresses", "_is_new", "_plan", "each", "is_closed", "runs", "shortest")

    def __init__(
        self, plan: Plan, each: Totals, addresses: Mapping[int, int], *, is_new: bool
    ) -> None:
        """Initialize.

        Args:
            plan: The plan.
            each: Totals of one run.
            addresses: Buffer addresses that differ from the plan's.
            is_new: Whether the plan was made for the first run.
        """
        #: Whether the plan cannot run again.
        self.is_closed = False
        self._is_new = is_new
        self._plan, self.each, self._addresses = plan, each, addresses
        self.runs = 0
        #: Seconds of the shortest run that was timed; 0 before there is one.
        self.shortest = 0.0

    @property
    def plan(self) -> Plan:
        """The plan, rebound to the actual addresses on first use."""
        if self._addresses:
            self._plan, self._addresses = self._plan.at(self._addresses), {}
        return self._plan

    def time(self, seconds: float) -> None:
        """Note the time of a run."""
        self.shortest = min(self.shortest or seconds, seconds)

    @property
    def total(self) -> Totals:
        """The totals of all runs."""
        return Totals().plus(self.each, self.runs)

    @property
    def replays(self) -> int:
        """The number of runs that needed no new plan."""
        return self.runs - (self._is_new and self.runs > 0)

    def begin_anew(self) -> None:
        """Reset the count."""
        self._is_new = self._is_new and not self.runs
        self.runs = 0


@dataclass(frozen=True, slots=True)
class Line:
    """An event that happened `times` times, with its bytes and simulated seconds each."""

    source: str
    target: str
    nbytes: int
    seconds: float
    times: int


@dataclass(frozen=True, slots=True)
class Account:
    """A consistent summary of what a device did in a period.

    `plans`: each plan with its number of runs, in the order of first runs; `earlier`: totals of
    plans no longer listed; `writes`: tensors that the host overwrote; `reads`: tensors that the
    host read. `total` is the sum without reads; `writes_seen` and `nbytes_seen` are counted by the
    memory spaces themselves. `measured`: the runs of plans that were timed, and their seconds if
    each took as long as its plan's shortest.
    """

    period: str
    plans: tuple[tuple[Plan, int], ...]
    earlier: Totals
    writes: tuple[Line, ...]
    reads: tuple[Line, ...]
    total: Totals
    writes_seen: int
    nbytes_seen: int
    measured: tuple[int, float]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the device opened.

    In the steady state only `replays` grows, and `batches` for work that uses the queue (pipelines
    and settled trainings do not). `executables_made`: plans kept for replay; `bindings_made`:
    bindings of these to addresses. `replays`: completed runs of cached plans. `batches`: runs of
    the queue. `revocations`: output slots whose memory was taken for something else.
    `graphs_captured`: CUDA graphs of bindings; `graphs_failed`: sequences that CUDA or PyTorch did
    not capture, which are launched call by call.
    """

    plans_made: int
    executables_made: int
    bindings_made: int
    replays: int
    code_written: int
    batches: int
    revocations: int
    graphs_captured: int
    graphs_failed: int


class History:
    """Counts plan runs and other events since the period began."""

    def __init__(self, seen: Callable[[], tuple[int, int]], on_clear: Callable[[], object]) -> None:
        #: Returns the writes and bytes that the memory spaces counted.
        self.seen = seen
        #: Called when a new period begins.
        self.on_clear = on_clear
        #: See `RuntimeDevice.on_plan`.
        self.on_plan: list[Callable[[Plan], object]] = []
        self._began = (0, 0)
        self.period = WHOLE_RUN
        self._plans: dict[int, Tally] = {}
        self._limit = MAX_PLANS
        #: Totals of plans no longer listed, and of failed runs.
        self._earlier = Totals()
        self._before = Totals()
        #: Replays of plans that are not listed separately.
        self._replays = 0
        self._reads: dict[int, tuple[TensorDesc, int, list[int]]] = {}
        #: Tensors that the host overwrote, as text, and their bytes → simulated seconds, how often.
        self._writes: dict[tuple[str, int], tuple[float, list[int]]] = {}

    # -- counting ----------------------------------------------------------------------------------

    def add(self, key: int, tally: Tally) -> None:
        """Register a tally, which counts its runs itself; `key` must be unique."""
        self._give(tally.plan)
        self._plans[key] = tally
        if len(self._plans) > self._limit:
            self._fold()

    def _give(self, plan: Plan) -> None:
        """Give a plan to the callbacks, which may end themselves meanwhile."""
        for callback in tuple(self.on_plan):
            try:
                callback(plan)
            except Exception as error:
                error.__dict__["stitch_callback"] = True
                with suppress(Exception):
                    error.add_note(f"in a callback of Device.on_plan: {callback!r}")
                raise

    def _fold(self) -> None:
        """Sum the oldest plans that cannot run again; the others are alive in any case."""
        spare = len(self._plans) - MAX_PLANS
        for key in [k for k, tally in self._plans.items() if tally.is_closed][:spare]:
            tally = self._plans.pop(key)
            self._earlier += tally.total
            self._replays += tally.replays
        self._limit = max(MAX_PLANS + MAX_PLANS // 4, 2 * len(self._plans) - MAX_PLANS)

    def count(self, event: Event) -> None:
        """Count a rare event; runs and reads are counted where they happen."""
        if isinstance(event, PlanStopped):
            self._give(event.plan)
            self._earlier += totals_of(event)
        elif isinstance(event, Written):
            key = (event.desc.text(), event.nbytes)
            self._writes.setdefault(key, (event.seconds, [0]))[1][0] += 1

    def reads_of(self, key: int, desc: TensorDesc, nbytes: int) -> list[int]:
        """Return the counter of reads of such tensors, which readers increment.

        `key` identifies the descriptor.
        """
        counted = self._reads.get(key)
        if counted is None:
            counted = self._reads[key] = (desc, nbytes, [0])
        return counted[2]

    # -- telling -----------------------------------------------------------------------------------

    @property
    def plans(self) -> tuple[tuple[Plan, int], ...]:
        """The listed plans that ran, with their numbers of runs."""
        return tuple((t.plan, t.runs) for t in self._plans.copy().values() if t.runs)

    @property
    def replays(self) -> int:
        """The number of completed replays since the device was opened."""
        return self._replays + sum([tally.replays for tally in self._plans.copy().values()])

    def account(self) -> Account:
        """Return a summary of the period; the caller holds the run lock."""
        reads = tuple(
            Line(desc.text(), Space.HOST.value, nbytes, 0.0, times[0])
            for desc, nbytes, times in self._reads.copy().values()
            if times[0]
        )
        writes_seen, nbytes_seen = self.seen()
        timed = [(t.runs, t.shortest) for t in self._plans.copy().values() if t.shortest]
        return Account(
            self.period, self.plans, self._earlier, self._written(), reads,
            self._total(), writes_seen - self._began[0], nbytes_seen - self._began[1],
            (sum(runs for runs, _ in timed), sum(runs * seconds for runs, seconds in timed)),
        )  # fmt: skip

    def whole(self) -> Totals:
        """Return the totals since the device was opened."""
        return self._before + self._total()

    def period_from_now(self) -> str:
        """Return the name of a period that begins now."""
        return WHOLE_RUN if self.whole() == Totals() else "since it was watched"

    def _written(self) -> tuple[Line, ...]:
        return tuple(
            Line(Space.HOST.value, target, nbytes, seconds, times[0])
            for (target, nbytes), (seconds, times) in self._writes.copy().items()
        )

    def _total(self) -> Totals:
        plans = [(tally.each, tally.runs) for tally in self._plans.copy().values()]
        written = [
            (Totals(0, 1, line.nbytes, line.seconds), line.times) for line in self._written()
        ]
        return self._earlier.plus_all((*plans, *written))

    def clear(self, period: str = "since the last look") -> None:
        """Begin a new period and reset the counts."""
        self._before, self._began = self.whole(), self.seen()
        self.on_clear()
        self.period = period
        self._replays = self.replays
        for tally in self._plans.values():
            tally.begin_anew()
        self._earlier = Totals()
        self._writes.clear()
        # Callers of `reads_of` keep these lists: reset them in place.
        for _, _, times in self._reads.copy().values():
            times[0] = 0

"""Divide the steps of a plan among threads.

Thread 0 is the caller's. A *fork* is a section of the plan whose independent steps are assigned to
threads: all threads start together, and the plan continues when all have finished. The assignment
depends on the plan alone, never on a clock.

Two steps depend on each other if they touch one buffer and one of them writes it. Reuse of an
address by another buffer is no dependency: inside a fork, temporary values and scratch get slots in
an arena of their thread (register renaming). So the plan, its addresses and its copies do not
depend on the number of threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import accumulate
from typing import TypeAlias

from stitch.memory import Allocator
from stitch.planner.plan import Allocate, Copy, Execute, Free, Plan, Step
from stitch.program import Space

#: Least microseconds of a thread's part of a fork; measured cost of starting and joining a thread.
LEAST, HANDING = 100.0, 11.0
#: A fork begins and ends at steps of at least so many microseconds.
_HEAVY = 20.0
#: Search window in steps: the search is quadratic.
_SPAN = 256


@dataclass(frozen=True, slots=True)
class Fork:
    """The steps `[start, stop)` of a plan by thread, each in the plan's order.

    The first thread takes longest.
    """

    start: int
    stop: int
    threads: tuple[tuple[int, ...], ...]


def forks_of(plan: Plan, microseconds: Sequence[float | None], most: int) -> Iterator[Fork]:
    """Return the forks of a plan, in order; see `assign_threads`."""
    start = 0
    for index in range(len(plan.steps) + 1):
        is_alone = index < len(plan.steps) and microseconds[index] is None
        if is_alone or index == len(plan.steps) or index - start == _SPAN:
            costs = [cost or 0.0 for cost in microseconds[start:index]]
            if most > 1 and sum(costs) >= 2 * LEAST:
                yield from _best(plan.steps[start:index], start, costs, most)
            start = index + is_alone


def _best(steps: Sequence[Step], first: int, costs: Sequence[float], most: int) -> list[Fork]:
    """Return the forks of a window of steps that together save most; `first` is its first step."""
    touched = [touched_by(step) for step in steps]
    cuts = _cuts(steps, costs)
    spent = [0.0, *accumulate(costs)]
    #: The time saved up to each cut, and the fork that ends there.
    saved = [0.0] * len(cuts)
    by: list[tuple[int, list[list[int]]] | None] = [None] * len(cuts)
    for begin, start in enumerate(cuts):
        if begin and saved[begin - 1] > saved[begin]:
            saved[begin], by[begin] = saved[begin - 1], None
        # Upper bound of the saving of a fork.
        most_saved = [(spent[cut] - spent[start]) * (1 - 1 / most) for cut in cuts]
        ends = range(begin + 1, len(cuts))
        if all(saved[begin] + most_saved[end] <= saved[end] for end in ends):
            continue
        parts = _Parts(start)
        for end in ends:
            for index in range(cuts[end - 1], cuts[end]):
                parts.add(index, costs[index], *touched[index])
            bound = min(most_saved[end], spent[cuts[end]] - spent[start] - parts.heaviest)
            if saved[begin] + bound - HANDING <= saved[end]:
                continue
            gain, division = parts.divided(most)
            if division and saved[begin] + gain > saved[end]:
                saved[end], by[end] = saved[begin] + gain, (begin, division)
    found = []
    end = len(cuts) - 1
    while end > 0:
        fork = by[end]
        if fork is None:
            end -= 1
            continue
        begin, division = fork
        threads = tuple([tuple([first + index for index in thread]) for thread in division])
        found.append(Fork(first + cuts[begin], first + cuts[end], threads))
        end = begin
    return found[::-1]


def _cuts(steps: Sequence[Step], costs: Sequence[float]) -> list[int]:
    """Return where forks may begin or end: around long steps and the copies of their operands."""
    cuts = {0, len(steps)}
    before = 0
    for index, (step, cost) in enumerate(zip(steps, costs, strict=True)):
        if cost >= _HEAVY:
            cuts |= {before, index + 1}
        if cost >= _HEAVY or not isinstance(step, Allocate | Copy):
            before = index + 1
    return sorted(cuts)


def touched_by(step: Step) -> tuple[Iterable[int], Iterable[int]]:
    """Return the buffers that a step reads, and those that it writes; freeing is no access."""
    if isinstance(step, Allocate):
        return (), (step.buffer.number,)
    if isinstance(step, Copy):
        return (step.source.buffer,), (step.target.buffer,)
    if isinstance(step, Execute):
        return [i.buffer for i in step.inputs], [i.buffer for i in step.outputs]
    return (), ()


class _Parts:
    """Steps from `start` on in groups that depend on each other (union-find)."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._parents: list[int] = []
        #: By the root of a group.
        self._costs: dict[int, float] = {}
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        #: Cost of the most expensive group.
        self.heaviest = 0.0

    def add(self, index: int, cost: float, reads: Iterable[int], writes: Iterable[int]) -> None:
        own = index - self._start
        self._parents.append(own)
        if cost:
            self._costs[own] = cost
            self.heaviest = max(self.heaviest, cost)
        for buffer in reads:
            writer = self._writer.get(buffer)
            if writer is not None:
                self._join(own, writer)
            self._readers.setdefault(buffer, []).append(own)
        for buffer in writes:
            for other in self._readers.pop(buffer, ()):
                self._join(own, other)
            writer = self._writer.get(buffer)
            if writer is not None:
                self._join(own, writer)
            self._writer[buffer] = own

    def _root(self, own: int) -> int:
        parents = self._parents
        while parents[own] != own:
            parents[own] = parents[parents[own]]
            own = parents[own]
        return own

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self._root(one), self._root(other)))
        if first != second:
            # The earliest step is the root.
            self._parents[second] = first
            cost = self._costs.get(first, 0.0) + self._costs.pop(second, 0.0)
            if cost:
                self._costs[first] = cost
                self.heaviest = max(self.heaviest, cost)

    def divided(self, most: int) -> tuple[float, list[list[int]]]:
        """Return the microseconds saved and each thread's steps; none if a thread has too few."""
        costs = self._costs
        heaviest_first = sorted(costs, key=lambda root: (-costs[root], root))
        total = sum(costs.values())
        for count in range(min(most, len(costs), int(total // LEAST)), 1, -1):
            loads = [(0.0, thread) for thread in range(count)]
            thread_of: dict[int, int] = {}
            for root in heaviest_first:
                load, thread = loads[0]
                thread_of[root] = thread
                heapreplace(loads, (load + costs[root], thread))
            saved = total - max(loads)[0] - HANDING * (count - 1)
            if min(loads)[0] >= LEAST and saved > 0:
                order = [
                    thread for _, thread in sorted(loads, key=lambda each: (-each[0], each[1]))
                ]
                return saved, self._steps(thread_of, order)
        return 0.0, []

    def _steps(self, thread_of: Mapping[int, int], order: Sequence[int]) -> list[list[int]]:
        """Return the steps of each thread; steps without cost belong to the first."""
        steps: list[list[int]] = [[] for _ in order]
        for own in range(len(self._parents)):
            thread = thread_of.get(self._root(own))
            steps[0 if thread is None else order.index(thread)].append(self._start + own)
        return steps


#: Alignment of arena slots (a cache line), and the size limit of an arena.
_LINE, _ENDLESS = 64, 1 << 44


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """Bytes `[offset, offset + nbytes)` of a thread's arena."""

    thread: int
    offset: int
    nbytes: int


#: Slots by buffer, slots of scratch by task, and the arena size of each thread.
ArenaAssignment: TypeAlias = tuple[dict[int, ArenaSlot], dict[int, ArenaSlot], tuple[int, ...]]


def assign_arenas(plan: Plan, forks: Sequence[Fork]) -> ArenaAssignment:
    """Assign arena slots to temporary values that are used in forks, and to scratch there."""
    #: By step: its fork and thread.
    in_fork = {
        index: (number, thread)
        for number, fork in enumerate(forks)
        for thread, steps in enumerate(fork.threads)
        for index in steps
    }
    results = {buffer.number for buffer in plan.final_buffers}
    made = [step.buffer for step in plan.steps if isinstance(step, Allocate)]
    passing = {b.number for b in made if b.number not in results and b.address is not None}
    #: By temporary value and fork: the threads that use it.
    users: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for index, (number, thread) in in_fork.items():
        for side in touched_by(plan.steps[index]):
            for buffer in side:
                if buffer in passing:
                    users[buffer][number].add(thread)
    count = max(len(fork.threads) for fork in forks)
    arenas, sizes = [Allocator(0, _ENDLESS, _LINE) for _ in range(count)], [0] * count
    buffers: dict[int, ArenaSlot] = {}
    scratch: dict[int, ArenaSlot] = {}
    later: list[ArenaSlot] = []

    def take(thread: int, space: Space, size_per_bank: int) -> ArenaSlot:
        nbytes = size_per_bank * plan.request.machine.shape.space(space).banks
        offset = arenas[thread].alloc(nbytes, low=True)
        sizes[thread] = max(sizes[thread], offset + nbytes)
        return ArenaSlot(thread, offset, nbytes)

    def release(slot: ArenaSlot) -> None:
        arenas[slot.thread].free(slot.offset)

    now = -1
    for index, step in enumerate(plan.steps):
        number, thread = in_fork.get(index, (-1, 0))
        if number != now:
            # All threads have joined.
            for slot in later:
                release(slot)
            later.clear()
            now = number
        if isinstance(step, Allocate) and step.buffer.number in users:
            b = step.buffer
            buffers[b.number] = take(thread, b.space, b.size_per_bank)
        elif isinstance(step, Free) and step.buffer in users:
            slot = buffers[step.buffer]
            if number < 0 or users[step.buffer][number] <= {slot.thread}:
                release(slot)
            else:
                # Another thread may still read it: release the slot after the join.
                later.append(slot)
        elif isinstance(step, Execute) and step.scratch is not None and number >= 0:
            space, _, size_per_bank = step.scratch
            scratch[step.task] = take(thread, space, size_per_bank)
            release(scratch[step.task])
    return buffers, scratch, tuple(sizes)


@dataclass(frozen=True, slots=True)
class ThreadAssignment:
    """How a plan runs on several threads.

    `buffers`: the arena slots of temporary values, by buffer. `scratch`: those of the programs'
    scratch, by task. `nbytes`: the arena size of each thread.
    """

    forks: tuple[Fork, ...] = ()
    buffers: Mapping[int, ArenaSlot] = field(default_factory=dict)
    scratch: Mapping[int, ArenaSlot] = field(default_factory=dict)
    nbytes: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """The number of threads."""
        return len(self.nbytes)

    def of_tasks(self, plan: Plan) -> dict[int, int]:
        """Return the thread of each task that does not run on the caller's."""
        return {
            step.task: thread
            for fork in self.forks
            for thread, steps in enumerate(fork.threads)
            for index in steps
            if thread and isinstance(step := plan.steps[index], Execute)
        }


#: Everything runs on the caller's thread.
SINGLE_THREAD = ThreadAssignment()


def assign_threads(plan: Plan, microseconds: Sequence[float | None], most: int) -> ThreadAssignment:
    """Divide a plan that overwrites only its results among at most `most` threads.

    `microseconds`: the least time of each step; None: it runs alone on the caller's thread.
    """
    forks = tuple(forks_of(plan, microseconds, most))
    return ThreadAssignment(forks, *assign_arenas(plan, forks)) if forks else SINGLE_THREAD

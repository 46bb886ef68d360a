"""Choose which tensors stay in L1 between their uses over a known chain of tasks.

A *stay* is the time between two uses of a tensor in L1. If the tensor is evicted, its bytes are
free in between, but it must be copied back for the next use, and first written to DRAM if it has no
other instance (once: values are immutable). So residency is a covering problem: at every task,
evict at least so many bytes at the least cost. `chain_of` reads the stays from a request; `choose`
covers greedily in several orders, computes a lower bound by Lagrange multipliers, and improves the
cover by a beam search that is exact if it discards nothing. Effort is counted, never timed.

Source of the bound: Held, Wolfe, Crowder, "Validation of subgradient optimization", 1974.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import fsum, gcd, inf
from typing import TypeAlias

from stitch.errors import LayoutError
from stitch.machine import room_per_bank, round_up
from stitch.planner.plan import Instance, PlanRequest, copy_cost, evicted_desc
from stitch.program import DataType, Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

#: Horizon of predicted uses: so many tasks after the request's.
MAX_LATER = 256


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor is in L1 and idle during the tasks `[first, end)`; `end` reads it, or is the end.

    `nbytes` are per bank. `back_seconds`: the cost of bringing it back. `is_dirty`: it has no other
    instance, so it must be written first, once for all stays of its holder.
    """

    holder: int
    first: int
    end: int
    nbytes: int
    back_seconds: float
    is_dirty: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """What is evicted as a whole: a resident buffer, or a value in one layout.

    `write_seconds`: the cost of writing it to DRAM.
    """

    values: frozenset[int]
    desc: TensorDesc
    write_seconds: float


@dataclass(frozen=True, slots=True)
class StayChain:
    """Stays over tasks. At task t, `excess[t]` bytes per bank of the stays that span it must be
    evicted.

    Predicted reads follow the tasks of the request, with as much pressure as its fullest task.

    `first_seconds`: the cost of copies that every plan makes. `is_exact`: no plan costs less than
    these and a cover; false if parts of a buffer, or one of several copies, can be brought back
    alone.
    """

    holders: tuple[Holder, ...]
    stays: tuple[Stay, ...]
    excess: tuple[int, ...]
    first_seconds: float = 0.0
    is_exact: bool = True

    def spanning(self) -> dict[int, list[int]]:
        """Return the numbers of the stays over each task at which something must be evicted."""
        over: dict[int, list[int]] = {t: [] for t, n in enumerate(self.excess) if n > 0}
        for number, stay in enumerate(self.stays):
            for task in range(stay.first, stay.end):
                if task in over:
                    over[task].append(number)
        return over


def chain_of(request: PlanRequest) -> StayChain:
    """Return the stays in L1 of a request; none without L1 or DRAM."""
    if Space.L1 not in request.machine.shape.spaces or request.machine.shape.dram is None:
        return StayChain((), (), (0,) * len(request.tasks))
    return _ChainReader(request).chain()


@dataclass(slots=True)
class _OpenHolder:
    """A holder while tasks are read: idle since when, and whether it has no other instance."""

    number: int
    size: int
    idle_since: int
    is_dirty: bool


@dataclass(slots=True)
class _ChainReader:
    """Reads the tasks in order."""

    request: PlanRequest
    holders: list[Holder] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    #: By (value, descriptor): what is in L1, and what is pinned there. Values that were in L1, and
    #: the values of shared buffers.
    open: dict[tuple[int, TensorDesc], _OpenHolder] = field(default_factory=dict)
    pinned: set[tuple[int, TensorDesc]] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    #: Exact copies of values outside L1.
    lossless_outside: dict[int, list[TensorDesc]] = field(default_factory=dict)
    #: (value, descriptor) pairs in spaces outside L1; the data type in which values were made.
    stored_outside: set[tuple[int, TensorDesc]] = field(default_factory=set)
    dtypes: dict[int, DataType] = field(default_factory=dict)
    first_seconds: float = 0.0
    is_exact: bool = True

    def chain(self) -> StayChain:
        request = self.request
        shape = request.machine.shape.space(Space.L1)
        capacity = shape.capacity - self._read_residents()
        last_use = {v: t for t, task in enumerate(request.tasks) for v in task.inputs}
        last_use |= dict.fromkeys(request.kept, len(request.tasks))
        busy = [0] * len(request.tasks)
        for t, task in enumerate(request.tasks):
            busy[t] = self._read_task(t, last_use)
            for value in {*task.inputs, *task.outputs}:
                if last_use.get(value, -1) <= t:
                    self._end(value, t + 1)
        later = {value: max(use, len(busy)) for value, use in request.later}
        end = max([len(busy), *(use + 1 for use in later.values())])
        end = min(end, len(busy) + MAX_LATER)
        busy += [max(busy, default=0)] * (end - len(busy))
        for held in {id(o): o for o in self.open.values()}.values():
            uses = [later[v] for v in self.holders[held.number].values if later.get(v, end) < end]
            after = 0.0
            if uses:
                back, use = self._back_seconds(held), min(uses)
                self._stay(held, use, back)
                held.idle_since = use + 1
                # It will be read again at an unknown time: the later, the longer it can be evicted.
                after = back * (end - use - 1) / (end - len(request.tasks))
            self._stay(held, end, after)
        idle = [0] * (end + 1)
        for stay in self.stays:
            idle[stay.first] += stay.nbytes
            idle[stay.end] -= stay.nbytes
        excess, lying = [], 0
        for t in range(end):
            lying += idle[t]
            excess.append(busy[t] + lying - capacity)
        return StayChain(
            tuple(self.holders), tuple(self.stays), tuple(excess), self.first_seconds, self.is_exact
        )

    def _read_residents(self) -> int:
        """Open the buffers in L1 at the start; return the bytes that cannot be evicted."""
        request, stuck = self.request, 0
        users: dict[int, list[tuple[int, Instance]]] = {}
        places = {b.number: b for b in request.buffers}
        for resident in request.residents:
            origin = self.dtypes[resident.value] = resident.instances[0].desc.layout.data_type
            for instance in resident.instances:
                users.setdefault(instance.buffer, []).append((resident.value, instance))
                buffer = places[instance.buffer]
                if buffer.space is Space.L1:
                    continue
                if buffer.address is not None:
                    self.stored_outside.add((resident.value, instance.desc))
                if instance.desc.layout.data_type is origin:
                    self.lossless_outside.setdefault(resident.value, []).append(instance.desc)
        for buffer in request.buffers:
            inside = users.get(buffer.number, [])
            if buffer.space is not Space.L1 or buffer.address is None:
                # Views may be brought in together with their block.
                self.is_exact &= len(inside) <= 1
                continue
            stays = buffer.pinned or not inside
            values = frozenset(value for value, _ in inside)
            if len(inside) > 1:
                self.shared |= values
            # A view can be brought back without its block.
            self.is_exact &= [instance.desc for _, instance in inside] in ([], [buffer.desc])
            if stays:
                stuck += buffer.size_per_bank
                self.pinned |= {(value, instance.desc) for value, instance in inside}
                self.inside |= values
                continue
            held = self._new(values, buffer.desc, buffer.size_per_bank, 0)
            for value, instance in inside:
                self._open(value, instance.desc, held)
        return stuck

    def _open(self, value: int, desc: TensorDesc, held: _OpenHolder) -> None:
        """Add an instance in L1; a value with several can be brought back from any."""
        if value in self.inside:
            self.is_exact = False
        self.inside.add(value)
        self.open[value, desc] = held

    def _new(self, values: frozenset[int], desc: TensorDesc, size: int, since: int) -> _OpenHolder:
        self.holders.append(Holder(values, desc, self._seconds(desc, evicted_desc(desc))))
        is_dirty = not values <= self.lossless_outside.keys()
        return _OpenHolder(len(self.holders) - 1, size, since, is_dirty)

    def _seconds(self, source: TensorDesc, target: TensorDesc) -> float:
        return copy_cost(self.request.machine, source, target)[1]

    def _back_seconds(self, held: _OpenHolder) -> float:
        """Return the cost of bringing a holder back from DRAM, or from a copy outside L1."""
        holder = self.holders[held.number]
        sources = [d for value in holder.values for d in self.lossless_outside.get(value, ())]
        if held.is_dirty or not sources or len(holder.values) > 1:
            sources = [evicted_desc(holder.desc)]
        return min(self._seconds(source, holder.desc) for source in sources)

    def _read_task(self, t: int, last_use: Mapping[int, int]) -> int:
        """End the stays of what a task reads; return the bytes that it needs in L1."""
        task = self.request.tasks[t]
        what = task.transformation
        used: dict[int, _OpenHolder] = {}
        need = 0
        if what.scratch is not None and what.scratch.space is Space.L1:
            need += round_up(what.scratch.size_per_bank, self._granule)
        given = {i for _, i in what.aliases}
        for i, (value, desc) in enumerate(zip(task.inputs, what.inputs, strict=False)):
            bare = desc.without_address()
            held = self.open.get((value, bare))
            if i in given and not self._can_donate(task, value, bare, t, last_use):
                # The task overwrites a copy made for it; other inputs of the task may be copied
                # from it.
                if desc.layout.space is Space.L1:
                    need += self._size(bare)
                self._count_copy(value, bare)
                self.is_exact &= task.inputs.count(value) == 1
            elif held is not None:
                used[id(held)] = held
            elif (value, bare) in self.pinned:
                pass
            elif desc.layout.space is not Space.L1:
                self._read_outside(value, bare)
            else:
                held = self._add_copy(value, bare, t)
                used[id(held)] = held
        for held in used.values():
            self._stay(held, t, self._back_seconds(held))
            held.idle_since = t + 1
            need += held.size
        for i in given:
            if self._can_donate(task, task.inputs[i], what.inputs[i], t, last_use):
                self._end(task.inputs[i], t + 1)
        if what.kind is TransformationKind.COPY:
            self._count_copy(task.inputs[0], what.outputs[0])
        taken = dict(what.aliases)
        for o, (value, desc) in enumerate(zip(task.outputs, what.outputs, strict=True)):
            bare = desc.without_address()
            self.dtypes[value] = bare.layout.data_type
            if desc.layout.space is not Space.L1:
                self.lossless_outside.setdefault(value, []).append(bare)
                self.stored_outside.add((value, bare))
                continue
            size = self._size(bare)
            self._open(value, bare, self._new(frozenset({value}), bare, size, t + 1))
            if o not in taken:
                need += size
        return need

    def _can_donate(
        self, task: NumberedTask, value: int, desc: TensorDesc, t: int, last_use: Mapping[int, int]
    ) -> bool:
        """Whether an output may overwrite this input in place: it has no other reader."""
        bare = desc.without_address()
        return (
            last_use[value] <= t
            and task.inputs.count(value) == 1
            and value not in self.shared
            and (value, bare) not in self.pinned
        )

    @property
    def _granule(self) -> int:
        return self.request.machine.shape.space(Space.L1).granule

    def _size(self, desc: TensorDesc) -> int:
        return room_per_bank(desc, self.request.machine.shape)

    def _add_copy(self, value: int, desc: TensorDesc, t: int) -> _OpenHolder:
        """Add a copy in L1 made for a task; it can be dropped, as another instance exists."""
        made = self._new(frozenset({value}), desc, self._size(desc), t)
        made.is_dirty = False
        self._count_copy(value, desc)
        self._open(value, desc, made)
        return made

    def _count_copy(self, value: int, desc: TensorDesc) -> None:
        """Add the cost of a copy that every plan makes, from the cheapest source."""
        lying = [d for other, d in (*self.open, *self.pinned) if other == value]
        sources = {*self.lossless_outside.get(value, ()), *lying, *self._evicted_layouts(value)}
        seconds = []
        for source in sources:
            # Sources without a path do not count.
            with suppress(LayoutError):
                seconds.append(self._seconds(source, desc))
        self.first_seconds += min(seconds, default=0.0)

    def _evicted_layouts(self, value: int) -> set[TensorDesc]:
        """Return the layouts in which a value may be stored after an eviction."""
        inside = [desc for other, desc in self.open if other == value]
        outside = [
            d for d in self.lossless_outside.get(value, ()) if (value, d) in self.stored_outside
        ]
        left = {evicted_desc(desc) for desc in inside}
        return left | {evicted_desc(desc, Space.HOST) for desc in (*inside, *outside)}

    def _read_outside(self, value: int, desc: TensorDesc) -> None:
        """Add a read outside L1: one copy, unless it is there or gets there by an eviction."""
        kind = desc.layout.data_type
        if (value, desc) not in self.stored_outside:
            if desc not in self._evicted_layouts(value):
                self._count_copy(value, desc)
            self.stored_outside.add((value, desc))
        inside = [(d.layout.data_type, held) for (v, d), held in self.open.items() if v == value]
        if kind is self.dtypes.get(value) or any(other is kind for other, _ in inside):
            self.lossless_outside.setdefault(value, []).append(desc)
        for other, held in inside:
            if other is kind and held.is_dirty:
                held.is_dirty = not self._is_clean_by(held)

    def _is_clean_by(self, held: _OpenHolder) -> bool:
        """Whether the copies outside L1 are cheap enough to make writing to DRAM unnecessary."""
        holder = self.holders[held.number]
        if not holder.values <= self.lossless_outside.keys():
            return False
        outside = [d for value in holder.values for d in self.lossless_outside[value]]
        dear = min(self._seconds(source, holder.desc) for source in outside)
        waiting = self._seconds(evicted_desc(holder.desc), holder.desc)
        if waiting < dear <= holder.write_seconds + waiting:
            # The better choice depends on how often it is brought back.
            self.is_exact = False
        return dear <= holder.write_seconds + waiting

    def _stay(self, held: _OpenHolder, end: int, back_seconds: float) -> None:
        if held.idle_since < end and held.size:
            self.stays.append(
                Stay(held.number, held.idle_since, end, held.size, back_seconds, held.is_dirty)
            )

    def _end(self, value: int, end: int) -> None:
        """End a dead value; a holder without other values is free."""
        for key in [key for key in self.open if key[0] == value]:
            held = self.open.pop(key)
            if all(other is not held for other in self.open.values()):
                self._stay(held, end, 0.0)


#: Cost of a stay that costs nothing, so that fewer are chosen.
_LEAST = 1e-18
#: Weight of a byte relative to the least time per byte: breaks ties in favour of fewer bytes.
BYTES = 1e-11
#: Costs within this factor are equal.
EQUAL = 1 - 1e-14


class CoverProblem:
    """A chain as arrays: stays over the tasks at which something must be evicted, renumbered.

    `spans[i]` is the half-open range of these tasks, `need[j]` the bytes to evict at task j.
    """

    __slots__ = (
        "back", "counts", "groups", "holder", "need", "over", "sizes", "spans", "stays", "write",
    )  # fmt: skip

    def __init__(self, chain: StayChain) -> None:
        over = chain.spanning()
        tight: list[int] = []
        sets: list[tuple[int, ...]] = []
        for task in sorted(over):
            here = tuple(over[task])
            if sets and sets[-1] == here:
                # Same stays as at the task before: keep the larger need.
                if chain.excess[task] > chain.excess[tight[-1]]:
                    tight[-1] = task
                continue
            tight.append(task)
            sets.append(here)
        #: Numbers of the stays in the chain.
        self.stays = sorted({number for here in sets for number in here})
        index = {number: i for i, number in enumerate(self.stays)}
        self.over = [tuple(index[number] for number in here) for here in sets]
        sizes = {number: stay.nbytes for number, stay in enumerate(chain.stays)}
        self.need = [
            float(least_sum(chain.excess[task], [sizes[number] for number in here]))
            for task, here in zip(tight, sets, strict=True)
        ]
        first = [len(tight)] * len(self.stays)
        last = [-1] * len(self.stays)
        for j, here_i in enumerate(self.over):
            for i in here_i:
                first[i], last[i] = min(first[i], j), j
        self.spans = [(a, b + 1) for a, b in zip(first, last, strict=True)]
        chosen = [chain.stays[number] for number in self.stays]
        self.sizes = [stay.nbytes for stay in chosen]
        #: Bytes that a stay contributes at each task of its span, at most the need.
        self.counts = [
            [float(min(size, n)) for n in self.need[a:b]]
            for size, (a, b) in zip(self.sizes, self.spans, strict=True)
        ]
        holders = {stay.holder: chain.holders[stay.holder] for stay in chosen}
        nbytes = {
            h: holder.desc.layout.data_type.nbytes(holder.desc.elements) or 1
            for h, holder in holders.items()
        }
        times = [(s.back_seconds, nbytes[s.holder]) for s in chosen]
        times += [(holder.write_seconds, nbytes[h]) for h, holder in holders.items()]
        byte = BYTES * min((seconds / n for seconds, n in times if seconds), default=0.0)
        self.back = [
            stay.back_seconds + (byte * nbytes[stay.holder] if stay.back_seconds else _LEAST)
            for stay in chosen
        ]
        #: The holder that must be written for a stay; -1 if none.
        self.holder = [stay.holder if stay.is_dirty else -1 for stay in chosen]
        self.write = {h: holder.write_seconds + byte * nbytes[h] for h, holder in holders.items()}
        self.groups: dict[int, list[int]] = {}
        for i, holder in enumerate(self.holder):
            if holder >= 0:
                self.groups.setdefault(holder, []).append(i)

    def seconds(self, away: Iterable[int]) -> float:
        """Return the cost of evicting these stays."""
        chosen = set(away)
        written = {self.holder[i] for i in chosen} - {-1}
        # Exact summation, so that the order does not matter.
        return fsum([*(self.back[i] for i in chosen), *(self.write[h] for h in written)])

    def is_hopeless(self) -> bool:
        """Whether the chain does not fit even with every stay evicted."""
        return any(sum(self.sizes[i] for i in here) < n
                   for here, n in zip(self.over, self.need, strict=True))  # fmt: skip


def least_sum(least: int, sizes: Sequence[int]) -> int:
    """Return the least sum of some of the sizes that is at least `least`; `least` if there is none.

    >>> least_sum(5, [2, 4, 4]), least_sum(5, [2, 2])
    (6, 5)
    """
    if not sizes:
        return least
    unit = gcd(*sizes)
    sums = 1
    for size in sizes:
        sums |= sums << size // unit
    above = sums >> -(-least // unit)
    return -(-least // unit) * unit + ((above & -above).bit_length() - 1) * unit if above else least


Rank = Callable[[int, int, list[float], float], tuple[float, ...]]


def _farthest(problem: CoverProblem) -> Rank:
    """Farthest next use first (Belady's rule), then the cheapest."""
    return lambda i, j, left, price: (-problem.spans[i][1], price)


def _cheapest(problem: CoverProblem) -> Rank:
    """The least cost per byte that is needed."""

    def rank(i: int, j: int, left: list[float], price: float) -> tuple[float, ...]:
        size = problem.sizes[i]
        useful = sum(min(size, n) for n in left[slice(*problem.spans[i])] if n > 0)
        return (price / max(1, useful),)

    return rank


def _sufficient(problem: CoverProblem) -> Rank:
    """The cheapest that is sufficient alone, else the largest."""
    return lambda i, j, left, price: (
        problem.sizes[i] < left[j], price if problem.sizes[i] >= left[j] else -problem.sizes[i],
    )  # fmt: skip


RANKS = (_farthest, _cheapest, _sufficient)


def greedy_cover_by(problem: CoverProblem, rank: Rank) -> list[int]:
    """Evict stays task by task in the order of `rank`, then drop redundant ones."""
    chosen: dict[int, None] = {}
    left = list(problem.need)
    written = {-1}
    for j in range(len(left)):
        while left[j] > 0:
            prices = {
                i: problem.back[i]
                + (0 if problem.holder[i] in written else problem.write[problem.holder[i]])
                for i in problem.over[j]
                if i not in chosen
            }
            best = min(prices, key=lambda i: rank(i, j, left, prices[i]))
            chosen[best] = None
            written.add(problem.holder[best])
            for k in range(*problem.spans[best]):
                left[k] -= problem.sizes[best]
    return _needed(problem, list(chosen), left)


def _needed(problem: CoverProblem, chosen: Sequence[int], left: list[float]) -> list[int]:
    """Drop stays that need not be evicted, the most expensive first."""
    stay: set[int] = set()
    for i in sorted(chosen, key=lambda i: (-problem.back[i], problem.sizes[i], i)):
        size = problem.sizes[i]
        span = range(*problem.spans[i])
        if all(left[j] + size <= 0 for j in span):
            stay.add(i)
            for j in span:
                left[j] += size
    return [i for i in chosen if i not in stay]


def greedy_cover(problem: CoverProblem) -> list[int] | None:
    """Return the cheapest greedy cover, None if there is none."""
    if problem.is_hopeless():
        return None
    found = [greedy_cover_by(problem, make(problem)) for make in RANKS]
    return min(found, key=problem.seconds)


#: Halve the step after so many rounds without a better bound; stop below the least step.
PATIENCE = 4
LEAST_SCALE = 1e-2


def prices_of(problem: CoverProblem, upper: float, rounds: int) -> tuple[float, list[float]]:
    """Search multipliers by subgradient steps.

    Returns:
        A lower bound on the seconds of any cover, and a price for each task.
    """
    prices = [0.0] * len(problem.need)
    best, best_prices = 0.0, prices
    scale, waited = 1.0, 0
    for _ in range(rounds):
        value, slack = _at(problem, prices)
        if value > best:
            best, best_prices, waited = value, prices, 0
        else:
            waited += 1
        if best >= upper * EQUAL:
            break
        if waited > PATIENCE:
            scale, waited = scale / 2, 0
            if scale < LEAST_SCALE:
                break
            _, slack = _at(problem, best_prices)
            prices, value = best_prices, best
        # A satisfied need with price 0 has no gradient.
        slack = [0 if s < 0 and not p else s for s, p in zip(slack, prices, strict=True)]
        norm = sum(s * s for s in slack)
        if not norm:
            break
        step = scale * max(upper - value, upper * LEAST_SCALE) / norm
        prices = [max(0.0, p + step * s) for p, s in zip(prices, slack, strict=True)]
    return best, best_prices


def reduced_costs(problem: CoverProblem, prices: Sequence[float]) -> list[float]:
    """Return the cost of each stay minus the prices of the needs that it meets."""
    return [
        back - sum(map(float.__mul__, prices[a:b], counts))
        for back, (a, b), counts in zip(problem.back, problem.spans, problem.counts, strict=True)
    ]


def _at(problem: CoverProblem, prices: Sequence[float]) -> tuple[float, list[float]]:
    """Return the Lagrangian bound at given prices, and its subgradient."""
    value = sum(map(float.__mul__, prices, problem.need))
    less = reduced_costs(problem, prices)
    chosen: list[int] = []
    for i, holder in enumerate(problem.holder):
        if holder < 0 and less[i] < 0:
            value += less[i]
            chosen.append(i)
    for holder, group in problem.groups.items():
        wanting = [i for i in group if less[i] < 0]
        total = problem.write[holder] + sum(less[i] for i in wanting)
        if total < 0:
            value += total
            chosen += wanting
    slack = list(problem.need)
    for i in chosen:
        for j, count in enumerate(problem.counts[i], problem.spans[i][0]):
            slack[j] -= count
    return value, slack


#: Evicted stays as a linked list, the last one first.
_Trail: TypeAlias = "tuple[int, _Trail] | None"
#: Lower bound in seconds, evicted bytes that count at this task, evicted stays.
_State: TypeAlias = tuple[float, float, _Trail]


def beam_search(
    problem: CoverProblem, prices: Sequence[float], upper: float, width: int
) -> tuple[list[int] | None, float]:
    """Improve a cover by beam search over the tasks.

    Returns:
        A cover cheaper than `upper` if one was found, and a lower bound on the seconds of any such
            cover (`upper` if there is none).
    """
    least, here, away = _steps(problem, prices)
    tasks = len(problem.need)
    starting, bit_of, going_on = _bits(problem.spans, tasks)
    # The state tracks whether a holder is written from the start of its first stay to the end of
    # its last.
    starts = [[problem.spans[i][0] for i in group] for group in problem.groups.values()]
    _, bits, asked_again = _bits([(min(s), max(s) + 1) for s in starts], tasks)
    written_bits = dict(zip(problem.groups, bits, strict=True))
    written_bit = [written_bits.get(h, 0) for h in problem.holder]
    enough, left_out = upper * EQUAL, upper
    dear: _State = enough, 0.0, None
    states: dict[tuple[int, int], _State] = {(0, 0): (least, 0.0, None)}
    for j, need in enumerate(problem.need):
        over, alive = going_on[j], asked_again[j]
        # Adjust the counted bytes of evicted stays for this task.
        changes = [
            (bit_of[i], change)
            for i in (problem.over[j - 1] if j else ())
            if (change := _count(problem, i, j) - _count(problem, i, j - 1))
        ]
        merged: dict[tuple[int, int], _State] = {}
        for (gone, written), (seconds, n, trail) in states.items():
            key = gone & over, written & alive
            if key not in merged or seconds < merged[key][0]:
                n += sum([change for bit, change in changes if gone & bit])
                merged[key] = seconds, n, trail
        states = merged
        rest = sum(problem.counts[i][0] for i in starting[j])
        for i in starting[j]:
            count, bit = problem.counts[i][0], written_bit[i]
            rest -= count
            branched: dict[tuple[int, int], _State] = {}
            for (gone, written), (seconds, n, trail) in states.items():
                first = 1 if bit and not written & bit else 0
                stays, leaves = seconds + here[first][i], seconds + away[first][i]
                if stays < enough and n + rest >= need:
                    branched[gone, written] = stays, n, trail
                key = gone | bit_of[i], written | bit
                # Another state may have reached the same key at a lower cost.
                if leaves < branched.get(key, dear)[0] and n + count + rest >= need:
                    branched[key] = leaves, n + count, (i, trail)
            states, left_out = _kept(branched, width, left_out)
        states = {
            key: (total, n, trail)
            for key, (seconds, n, trail) in states.items()
            if n >= need and (total := seconds + prices[j] * (n - need)) < enough
        }
    best = min(states.values(), key=lambda state: state[0], default=None)
    if best is None:
        return None, left_out
    cover, trail = [], best[2]
    while trail is not None:
        cover.append(trail[0])
        trail = trail[1]
    return cover[::-1], min(left_out, best[0])


def _count(problem: CoverProblem, i: int, j: int) -> float:
    """Return the bytes that a stay contributes at a task: 0 after its end."""
    first, end = problem.spans[i]
    return problem.counts[i][j - first] if j < end else 0.0


def _bits(
    spans: Sequence[tuple[int, int]], tasks: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Assign a bit to each half-open span, unique among overlapping ones, so that keys stay short.

    Returns:
        The spans that start at each task, the bit of each span, and the bits of the spans that
            continue at each task.
    """
    starting: list[list[int]] = [[] for _ in range(tasks)]
    ending: list[list[int]] = [[] for _ in range(tasks + 1)]
    for i, (first, end) in enumerate(spans):
        starting[first].append(i)
        ending[end].append(i)
    bits, free, on = [0] * len(spans), [1], 0
    going_on = []
    for j in range(tasks):
        for i in ending[j]:
            on ^= bits[i]
            free.append(bits[i])
        going_on.append(on)
        for i in starting[j]:
            bits[i] = free.pop()
            on ^= bits[i]
            free = free or [1 << on.bit_length()]
    return starting, bits, going_on


def _kept(
    states: dict[tuple[int, int], _State], width: int, left_out: float
) -> tuple[dict[tuple[int, int], _State], float]:
    """Keep the `width` cheapest states; return them and the least cost discarded so far."""
    if len(states) <= width:
        return states, left_out
    ranked = sorted(states.items(), key=lambda item: item[1][0])
    return dict(ranked[:width]), min(left_out, ranked[width][1][0])


def _steps(
    problem: CoverProblem, prices: Sequence[float]
) -> tuple[float, tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Return the initial bound, and by how much it rises if a stay is kept or evicted.

    The rises are given twice: if its holder is written already, and if not.
    """
    less = reduced_costs(problem, prices)
    here = [max(0.0, -n) for n in less], [0.0] * len(less)
    away = [max(0.0, n) for n in less], [0.0] * len(less)
    least = sum(map(float.__mul__, prices, problem.need))
    least += sum(min(0.0, less[i]) for i, holder in enumerate(problem.holder) if holder < 0)
    for holder, group in problem.groups.items():
        later, bound = problem.write[holder], 0.0
        for i in sorted(group, key=lambda i: problem.spans[i], reverse=True):
            now = min(0.0, later + min(0.0, less[i]))
            here[1][i], away[1][i] = bound - now, less[i] + later - now
            later, bound = later + min(0.0, less[i]), now
        least += bound
    return least, here, away


#: Rounds of `prices_of`, and the beam width of `beam_search`.
ROUNDS, WIDTH = 40, 100


@dataclass(frozen=True, slots=True)
class StayChoice:
    """The stays to evict, their cost, and a lower bound on the cost of any choice."""

    away: tuple[Stay, ...]
    seconds: float
    least_seconds: float

    @property
    def is_best(self) -> bool:
        """Whether the bound proves the choice optimal."""
        return self.seconds <= self.least_seconds * (1 + 1e-9)


def choose(
    chain: StayChain, rounds: int = ROUNDS, width: int = WIDTH, looks: float = inf
) -> StayChoice | None:
    """Choose the stays to evict over a chain; None if it does not fit.

    Args:
        chain: The stays.
        rounds: Limit of the search for prices.
        width: Beam width.
        looks: Limit of both together in (stay, task) pairs; 0 leaves the greedy cover.
    """
    problem = CoverProblem(chain)
    if not problem.need:
        return StayChoice((), 0.0, 0.0)
    share = looks / max(1, (rounds + width) * sum(map(len, problem.counts)))
    if share < 1:
        rounds, width = int(rounds * share), max(1, int(width * share))
    away = greedy_cover(problem)
    if away is None:
        return None
    seconds = problem.seconds(away)
    least, prices = prices_of(problem, seconds, rounds)
    if least < seconds * EQUAL:
        cheaper, swept_least = beam_search(problem, prices, seconds, width)
        least = max(least, swept_least)
        if cheaper is not None:
            away, seconds = cheaper, problem.seconds(cheaper)
    stays = tuple(chain.stays[problem.stays[i]] for i in sorted(away))
    return StayChoice(stays, seconds, min(least, seconds))

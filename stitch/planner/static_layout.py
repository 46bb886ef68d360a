"""Search static addresses for the tensors of a whole plan, so that fewer bytes are moved.

A *moment* is a run of tasks in which buffers are allocated and none is freed, so its last task sees
all of them. The search visits the moments forwards or backwards (a move costs the same either way)
and puts each new buffer into a hole, preferably beside a neighbour that is freed at about the same
time. If no hole is large enough, the mover makes one. The weights of these rules are drawn anew for
every pass, which starts from the best layouts so far, near a moment with moves. Effort is counted,
never timed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from stitch.machine import round_up
from stitch.memory import LENT_ADDRESSES
from stitch.planner.mover import SpaceProblem, arrange, operation_size
from stitch.planner.plan import Allocate, Buffer, Copy, Execute, Free, Plan, Relocate, Step
from stitch.program import Space
from stitch.tasks import NumberedTask, TransformationKind

#: Addresses at a moment, by the index of the lifetime.
Layout = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime of a buffer: moments `first` to `last`, both included.

    `before`: its address before the first task, if it is resident. `made`: else (task, index among
    the buffers that the task allocates in the space).
    """

    number: int
    size: int
    first: int
    last: int
    before: int | None
    made: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The buffers of a space that may get other addresses, and their constraints.

    `begins`: the first task of each moment. `obstacles`: by moment, the regions (address, size) of
    buffers with required addresses and of scratch. `layouts`: by moment, the plan's addresses.
    """

    base: int
    limit: int
    alignment: int
    operation_size: int
    lives: tuple[Lifetime, ...]
    begins: tuple[int, ...]
    obstacles: tuple[tuple[tuple[int, int], ...], ...]
    layouts: tuple[Layout, ...]


@dataclass(slots=True)
class _Stay:
    """A buffer with its lifetime in tasks, and (task, address) for each address it gets."""

    buffer: Buffer
    first: int
    last: int
    made: tuple[int, int] | None
    places: list[tuple[int, int]]

    def address(self, task: int) -> int:
        return [at for since, at in self.places if since <= task][-1]


def lifetimes_in(plan: Plan, space: Space) -> Lifetimes:
    """Return the lifetimes of the buffers of a space in a plan."""
    shape = plan.request.machine.shape.space(space)
    stays, regions = _stays(plan, space)
    tasks, named = len(plan.request.tasks), plan.fixed
    must = [s.buffer.pinned or s.buffer.number in named for s in stays]
    ends = {s.last for s in stays} | regions.keys()
    ends |= {since - 1 for s, fixed in zip(stays, must, strict=True) if fixed
             for since, _ in s.places[1:]}  # fmt: skip
    begins = [0, *(task + 1 for task in sorted(ends) if 0 <= task < tasks - 1)]
    moment = [0] * (tasks + 1)
    for at, (begin, end) in enumerate(zip(begins, (*begins[1:], tasks), strict=True)):
        moment[begin:end] = [at] * (end - begin)
    obstacles: list[set[tuple[int, int]]] = [set() for _ in begins]
    layouts: list[dict[int, int]] = [{} for _ in begins]
    lives: list[Lifetime] = []
    for task, region in regions.items():
        obstacles[moment[task]].add((region[0], round_up(region[1], shape.granule)))
    for stay, fixed in zip(stays, must, strict=True):
        size = round_up(max(stay.buffer.size_per_bank, 1), shape.granule)
        first, last = moment[stay.first], moment[stay.last]
        ends_of = [*begins[1:], tasks]
        for at in range(first, last + 1):
            address = stay.address(max(stay.first, ends_of[at] - 1))
            if fixed:
                obstacles[at].add((address, size))
            else:
                layouts[at][len(lives)] = address
        if not fixed:
            before = None if stay.made else stay.buffer.address
            lives.append(Lifetime(stay.buffer.number, size, first, last, before, stay.made))
    return Lifetimes(
        shape.base, shape.limit, shape.granule, operation_size(plan.request.machine, space),
        tuple(lives), tuple(begins), tuple(tuple(sorted(those)) for those in obstacles),
        tuple(layouts),
    )  # fmt: skip


def _stays(plan: Plan, space: Space) -> tuple[list[_Stay], dict[int, tuple[int, int]]]:
    """Return the buffers that exist during a task, and the scratch region of each task."""
    tasks = plan.request.tasks
    here = {
        b.number: _Stay(b, 0, len(tasks) - 1, None, [(-1, b.address)])
        for b in plan.request.buffers
        if b.space is space and b.address is not None and b.address < LENT_ADDRESSES
    }
    done: list[_Stay] = []
    regions: dict[int, tuple[int, int]] = {}
    task = count = 0
    for step in plan.steps:
        if isinstance(step, Allocate):
            b = step.buffer
            if b.space is space and b.address is not None:
                here[b.number] = _Stay(b, task, len(tasks) - 1, (task, count), [(task, b.address)])
                count += 1
        elif isinstance(step, Free) and step.buffer in here:
            # Buffers freed for a task are freed before its own buffers are allocated.
            gone = here.pop(step.buffer)
            gone.last = task - 1
            done.append(gone)
        elif isinstance(step, Relocate) and step.space is space:
            for number, address in step.targets:
                here[number].places.append((task, address))
        elif task < len(tasks) and _ends(step, tasks[task]):
            if isinstance(step, Execute) and step.scratch is not None and step.scratch[0] is space:
                regions[task] = step.scratch[1:]
            task, count = task + 1, 0
    stays = [*done, *here.values()]
    return [stay for stay in stays if stay.first <= stay.last], regions


def _ends(step: Step, task: NumberedTask) -> bool:
    """Whether a step is the last one of a task."""
    if task.transformation.kind is TransformationKind.COPY:
        return isinstance(step, Copy) and step.kind == "copy" and step.made == task.outputs[0]
    return isinstance(step, Execute)


_SEED = 3
#: Work limit per lifetime. Choosing a hole counts 1, calling the mover `ARRANGING`.
EFFORT, ARRANGING = 200, 25
#: Share of its usual work limit that the mover gets.
_SHARE = 0.3
#: Number of initial passes over all moments.
STARTS = 8
#: How many moments before (or after) one with moves a pass begins.
_BEFORE = (0, 1, 2, 4, 8, 16, 32)
#: Random parameters of a pass: the weight of the rest of a hole, the variation of prices, and the
#: disorder of new buffers.
_WEIGHTS, _CHANCES, _DISORDER = (10.0, 20.0, 40.0, 80.0), (0.3, 0.8), (0.0, 0.3, 1.0)
#: A wall counts as a neighbour whose end differs by so many hundredths of all moments; filling a
#: hole exactly saves so many.
_WALL, _FILLED = 3.0, 30.0

#: Start, end, and lifetime (-1: an obstacle).
_Used = tuple[int, int, int]


def search(lives: Lifetimes, effort: int = EFFORT) -> tuple[Layout, ...] | None:
    """Return layouts that cost less than the plan's, or None.

    The cost of a move is the buffer's size plus `operation_size`.
    """
    found = _Search(lives, effort * len(lives.lives))
    least = found.costs
    found.improve()
    return tuple(found.layouts) if sum(found.costs) < sum(least) else None


class _Search:
    """The best layouts so far, the cost of the moves before each moment, and the remaining work."""

    def __init__(self, lives: Lifetimes, work: int) -> None:
        self.problem, self.work = lives, work
        self.layouts: list[Layout] = [*lives.layouts]
        self._chance = Random(_SEED)
        self._count = count = len(lives.begins)
        self._sizes = [life.size for life in lives.lives]
        self._costs = [size + lives.operation_size for size in self._sizes]
        self._firsts = [life.first for life in lives.lives]
        self._lasts = [life.last for life in lives.lives]
        self._before = {i: life.before for i, life in enumerate(lives.lives)
                        if life.before is not None and not life.first}  # fmt: skip
        self._coming: list[list[int]] = [[] for _ in range(count + 1)]
        self._going: list[list[int]] = [[] for _ in range(count + 1)]
        for i, life in enumerate(lives.lives):
            self._coming[life.first].append(i)
            self._going[life.last + 1].append(i)
        self._later: list[list[_Used] | None] = [None] * len(lives.lives)
        sides = [self._before, *lives.layouts]
        self.costs = [self._moving(*pair) for pair in zip(sides, lives.layouts, strict=False)]

    def improve(self) -> None:
        """Run passes until the work limit, or until nothing moves."""
        chance, last = self._chance, self._count
        for start in range(STARTS):
            self._try(last if start % 2 else -1, start % 2 == 1, sum(self.costs))
        while self.work > 0 and any(self.costs):
            costly = [at for at, cost in enumerate(self.costs) if cost]
            at, far = chance.choice(costly), chance.choice(_BEFORE)
            if chance.random() < 0.5:
                begin = min(last, at + far)
                self._try(begin, True, sum(self.costs[: begin + 1]))
            else:
                begin = max(-1, at - 1 - far)
                self._try(begin, False, sum(self.costs[begin + 1 :]))

    def _try(self, begin: int, backwards: bool, most: int) -> None:
        """Run one pass; keep its layouts if they cost no more."""
        made = self._run(begin, backwards, most)
        if made is None:
            return
        layouts = [made.get(at, layout) for at, layout in enumerate(self.layouts)]
        sides = [self._before, *layouts]
        costs = [self._moving(*pair) for pair in zip(sides, layouts, strict=False)]
        if sum(costs) <= sum(self.costs):
            self.layouts, self.costs = layouts, costs

    def _moving(self, before: Layout, after: Layout) -> int:
        costs, get = self._costs, before.get
        return sum([costs[i] for i, at in after.items() if get(i, at) != at])

    def _run(self, begin: int, backwards: bool, most: int) -> dict[int, Layout] | None:
        """Return the layouts of all moments after (before) one; None if they cost over `most`."""
        self._weight = self._chance.choice(_WEIGHTS)
        self._vary, disorder = self._chance.choice(_CHANCES), self._chance.choice(_DISORDER)
        self._ends = self._firsts if backwards else self._lasts
        lying: dict[int, int] = {}
        if 0 <= begin < self._count:
            lying = dict(self.layouts[begin])
        elif begin < 0:
            lying = dict(self._before)
        made: dict[int, Layout] = {}
        moments = range(begin - 1, -1, -1) if backwards else range(begin + 1, self._count)
        for at in moments:
            before = dict(lying)
            coming = self._going[at + 1] if backwards else self._coming[at]
            for i in self._coming[at + 1] if backwards else self._going[at]:
                lying.pop(i, None)
            order = [
                (-self._sizes[i] * (1 + disorder * self._chance.random()), i)
                for i in coming
                if i not in lying
            ]
            if not self._put(at, lying, [i for _, i in sorted(order)]):
                return None
            most -= self._moving(before, lying)
            if most < 0 or self.work <= 0:
                return None
            made[at] = dict(lying)
        return made

    def _put(self, at: int, lying: dict[int, int], coming: Sequence[int]) -> bool:
        """Assign addresses to the new buffers of a moment; False if they do not fit."""
        obstacles, sizes = self.problem.obstacles[at], self._sizes
        taken = self._taken(at, lying)
        displaced = obstacles and any(a[1] > b[0] for a, b in pairwise(taken))
        if displaced:
            if not self._arrange(at, lying, None):
                return False
            taken = self._taken(at, lying)
        for i in coming:
            self.work -= 1
            size = sizes[i]
            address = self._hole(i, taken)
            if address is None:
                if not self._arrange(at, lying, i):
                    return False
                taken = self._taken(at, lying)
            else:
                lying[i] = address
                insort(taken, (address, address + size, i))
        return True

    def _taken(self, at: int, lying: Layout) -> list[_Used]:
        sizes = self._sizes
        taken = [(address, address + sizes[i], i) for i, address in lying.items()]
        taken += [(address, address + size, -1) for address, size in self.problem.obstacles[at]]
        return sorted(taken)

    def _hole(self, i: int, taken: list[_Used]) -> int | None:
        """Return an address for a buffer, if possible outside its later obstacles; None if full."""
        later = self._obstacles_of(i)
        if later:
            apart = self._best_hole(i, sorted([*taken, *later]))
            if apart is not None:
                return apart
        return self._best_hole(i, taken)

    def _obstacles_of(self, i: int) -> list[_Used]:
        later = self._later[i]
        if later is None:
            regions = self.problem.obstacles[self._firsts[i] : self._lasts[i] + 1]
            later = [(a, a + n, -1) for a, n in {r for those in regions for r in those}]
            self._later[i] = later
        return later

    def _best_hole(self, i: int, taken: Sequence[_Used]) -> int | None:
        problem, size, ends = self.problem, self._sizes[i], self._ends
        scale, mine = 100 / self._count, ends[i]
        weight = self._weight / (problem.limit - problem.base)
        draw, vary = self._chance.random, self._vary
        best, least = None, 0.0
        at, beside = problem.base, -1
        for start, end, other in (*taken, (problem.limit, problem.limit, -1)):
            rest = start - at - size
            if rest >= 0:
                for address, neighbour in ((at, beside), (start - size, other)):
                    apart = abs(ends[neighbour] - mine) * scale if neighbour >= 0 else _WALL
                    price = rest * weight + apart * (1 + vary * (2 * draw() - 1))
                    price -= 0 if rest else _FILLED
                    if best is None or price < least:
                        best, least = address, price
            if end >= at:
                at, beside = end, other
        return best

    def _arrange(self, at: int, lying: dict[int, int], coming: int | None) -> bool:
        """Let the mover make a hole, and move buffers off obstacles; False if it cannot."""
        problem, sizes = self.problem, self._sizes
        obstacles = problem.obstacles[at]
        self.work -= ARRANGING
        movable: list[tuple[int, int, int]] = []
        displaced: list[tuple[int, int, int]] = []
        for i, address in lying.items():
            end = address + sizes[i]
            is_clear = all(end <= a or a + n <= address for a, n in obstacles)
            (movable if is_clear else displaced).append((i, address, sizes[i]))
        pieces = () if coming is None else (sizes[coming],)
        try:
            found = arrange(SpaceProblem(
                problem.base, problem.limit, problem.alignment, tuple(movable), tuple(displaced),
                obstacles, pieces, problem.operation_size,
            ), _SHARE)  # fmt: skip
        except TimeoutError:
            return False
        if found is None:
            return False
        lying.update(found.moves)
        if coming is not None:
            lying[coming] = found.pieces[0]
        return True


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """Addresses in a space, chosen for all lifetimes at once.

    `allocations`: by (task, index among its buffers in the space). `moves`: by task, the moves
    (buffer, from, to) before it.
    """

    space: Space
    allocations: Mapping[tuple[int, int], int]
    moves: Mapping[int, Sequence[tuple[int, int, int]]]


def find_static_layout(plan: Plan) -> StaticLayout | None:
    """Return addresses for which a plan moves fewer bytes in L1; None if none are found."""
    if not _may_improve(plan):
        return None
    lives = lifetimes_in(plan, Space.L1)
    layouts = search(lives)
    if layouts is None:
        return None
    allocations, moves = {}, {}
    for i, life in enumerate(lives.lives):
        if life.made is not None:
            allocations[life.made] = layouts[life.first][i]
    before = {i: life.before for i, life in enumerate(lives.lives) if life.before is not None}
    for task, last, layout in zip(lives.begins, (before, *layouts), layouts, strict=False):
        moved = [
            (lives.lives[i].number, was, now)
            for i, now in layout.items()
            if (was := last.get(i, now)) != now
        ]
        if moved:
            moves[task] = tuple(moved)
    return StaticLayout(Space.L1, allocations, moves)


def _may_improve(plan: Plan) -> bool:
    """Whether a plan moves something in L1 after freeing a buffer that it allocated there."""
    made, gone = set(), False
    for step in plan.steps:
        if isinstance(step, Allocate) and step.buffer.space is Space.L1:
            made.add(step.buffer.number)
        elif isinstance(step, Free) and step.buffer in made:
            gone = True
        elif gone and isinstance(step, Relocate) and step.space is Space.L1:
            return True
    return False

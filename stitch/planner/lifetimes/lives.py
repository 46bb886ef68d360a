"""Lives: the buffers of one space while a plan runs, and where they lay in it.

A moment is a stretch of tasks in which buffers come and none goes, so its last task sees them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stitch.machine import round_up
from stitch.memory import LENT_ADDRESSES
from stitch.planner.mover import operation_size
from stitch.planner.plan import Allocate, Buffer, Copy, Execute, Free, Plan, Relocate, Step
from stitch.program import Space
from stitch.tasks import NumberedTask, TransformationKind

#: Where each life lies at a moment, by its position among all.
Layout = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer, there from moment `first` to moment `last`, both included.

    `before`: where it lay before the first task, None if a task makes it. `made`: by which task,
    and the how manieth of its buffers it is.
    """

    number: int
    size: int
    first: int
    last: int
    before: int | None
    made: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Lives:
    """Those of a space that may lie elsewhere, with all that limits them.

    `begins`: the first task of each moment. `obstacles`: by moment, the regions (address, size) of
    what lies where it must. `layouts`: by moment, where the plan has them.
    """

    base: int
    limit: int
    alignment: int
    operation_size: int
    lives: tuple[Life, ...]
    begins: tuple[int, ...]
    obstacles: tuple[tuple[tuple[int, int], ...], ...]
    layouts: tuple[Layout, ...]


@dataclass(slots=True)
class _Stay:
    """A buffer from task to task, and where it lies from which task on."""

    buffer: Buffer
    first: int
    last: int
    made: tuple[int, int] | None
    places: list[tuple[int, int]]

    def address(self, task: int) -> int:
        return [at for since, at in self.places if since <= task][-1]


def lives_in(plan: Plan, space: Space) -> Lives:
    """Who lives in a space of a plan's machine while it runs."""
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
    lives: list[Life] = []
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
            lives.append(Life(stay.buffer.number, size, first, last, before, stay.made))
    return Lives(
        shape.base, shape.limit, shape.granule, operation_size(plan.request.machine, space),
        tuple(lives), tuple(begins), tuple(tuple(sorted(those)) for those in obstacles),
        tuple(layouts),
    )  # fmt: skip


def _stays(plan: Plan, space: Space) -> tuple[list[_Stay], dict[int, tuple[int, int]]]:
    """The buffers of a space that see a task; and by task the region of its scratch there."""
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
            # What goes for a task's sake goes before anything is made for it.
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
    """Whether a task is done with this step of it."""
    if task.transformation.kind is TransformationKind.COPY:
        return isinstance(step, Copy) and step.kind == "copy" and step.made == task.outputs[0]
    return isinstance(step, Execute)

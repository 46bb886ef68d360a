"""Whether what left its space in a plan had to, and whether a task finds room at all, by trying
everything: no code of the planner.

For each task of a plan: what lies where when the planner comes to it, what the task needs, and all
that could stay. A tensor that left could have stayed if some way to serve the inputs (where they
lie, or as copies) and some set of spare copies to drop leaves an arrangement of all that stays and
all that is needed, if copies of what the task reads where it lies take less time than the tensor's
leaving. A bounce could have been spared if the task runs with nothing moved.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stitch.machine import copy_counts, footprint
from stitch.planner import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Step,
)
from stitch.program import DataType, Layout, Space, TensorDesc

#: Ways and sets that are tried for one question, and ways to lay out one set of pieces.
MOST_TRIALS, MOST_WAYS = 4_000, 20_000
Region = tuple[int, int]


class TooManyWaysError(Exception):
    """There are more ways to lay something out than can be tried."""


@dataclass(frozen=True)
class Moment:
    """What lies where when the planner comes to a task."""

    request: PlanRequest
    task: int
    buffers: Mapping[int, Buffer]
    values: Mapping[int, tuple[Instance, ...]]

    def users(self, buffer: int) -> set[int]:
        return {v for v, there in self.values.items() if any(i.buffer == buffer for i in there)}

    def origin(self, value: int) -> DataType:
        """The type in which a value was made: others may have lost something."""
        request = self.request
        for resident in request.residents:
            if resident.value == value:
                return resident.instances[0].desc.layout.data_type
        task = next(task for task in request.tasks if value in task.outputs)
        return task.transformation.outputs[task.outputs.index(value)].layout.data_type

    def is_read_later(self, value: int) -> bool:
        tasks = self.request.tasks[self.task + 1 :]
        return any(value in task.inputs for task in tasks)


@dataclass(frozen=True)
class Way:
    """One way to have an input of a task in a space: in a block that is there, or as a copy."""

    block: int | None
    address: int | None
    size: int
    #: Of a copy: where a later task names it, and its seconds where the plan makes none.
    named: int | None = None
    seconds: float = 0.0


def needless(plan: Plan) -> tuple[list[str], Counter[str]]:
    """What left its space in a plan without need, in words; how much was looked at, how much was
    more than could be (`undecided`), and what came during the very task on its way farther out
    (`passing`: whether it had to leave the space before is looked at)."""
    said: list[str] = []
    seen: Counter[str] = Counter()
    for moment, steps in _moments(plan):
        for space in plan.request.machine.shape.spaces:
            for at, step in enumerate(steps):
                if not _evicts_from(step, space):
                    continue
                assert isinstance(step, Copy)
                number = step.source.buffer
                if number not in moment.buffers:
                    seen["passing"] += 1
                    continue
                answer = _could_stay(moment, steps, space, number, at)
                seen["evict" if answer is not None else "undecided"] += 1
                if answer:
                    said.append(f"task {moment.task}: buffer {number} left {space.value} "
                                "and could have stayed")  # fmt: skip
        for step in steps:
            if isinstance(step, Relocate) and step.stage is not None:
                seen["bounce"] += 1
                said += _needless_bounce(moment, steps, step, seen)
    return said, seen


def _evicts_from(step: Step, space: Space) -> bool:
    """Whether a step takes a buffer out of a space."""
    return (
        isinstance(step, Copy) and step.kind == "evict" and step.source.desc.layout.space is space
    )


# -- following a plan ----------------------------------------------------------------------------


def _moments(plan: Plan) -> Iterator[tuple[Moment, list[Step]]]:
    """For each task: what lies where, and the steps up to its run."""
    buffers = {b.number: b for b in plan.request.buffers}
    values = {r.value: r.instances for r in plan.request.residents}
    steps: list[Step] = []
    task = 0
    moment = Moment(plan.request, task, dict(buffers), dict(values))
    for step in plan.steps:
        steps.append(step)
        if isinstance(step, Allocate):
            buffers[step.buffer.number] = step.buffer
        elif isinstance(step, Free):
            del buffers[step.buffer]
            values = _without(values, step.buffer)
        elif isinstance(step, Relocate):
            buffers |= {n: replace(buffers[n], address=at) for n, at in step.targets}
        elif isinstance(step, Copy) and step.kind == "evict":
            space = step.target.desc.layout.space
            values = {
                v: tuple(
                    Instance(step.target.buffer, i.offset_nbytes, _waiting(i.desc, space))
                    if i.buffer == step.source.buffer else i
                    for i in there
                )
                for v, there in values.items()
            }  # fmt: skip
        elif isinstance(step, Copy) and step.kind != "copy":
            space = step.target.desc.layout.space
            values = {
                v: (*there, *(Instance(step.target.buffer, i.offset_nbytes, _waiting(i.desc, space))
                              for i in there if i.buffer == step.source.buffer))
                for v, there in values.items()
            }  # fmt: skip
        elif isinstance(step, Copy):
            values[step.made] = (*values.get(step.made, ()), step.target)
        if isinstance(step, Execute):
            for instance in step.outputs:
                values = _without(values, instance.buffer)
            for value, instance in zip(plan.request.tasks[task].outputs, step.outputs, strict=True):
                values[value] = (instance,)
        if isinstance(step, Execute) or (isinstance(step, Copy) and step.made != step.value):
            yield moment, steps
            task, steps = task + 1, []
            moment = Moment(plan.request, task, dict(buffers), dict(values))
        elif all(isinstance(s, Free) for s in steps):
            # What the task before it has left behind.
            moment = Moment(plan.request, task, dict(buffers), dict(values))
    assert all(isinstance(s, Free) for s in steps)


def _waiting(desc: TensorDesc, space: Space) -> TensorDesc:
    return TensorDesc(desc.shape, Layout(desc.layout.data_type, space, desc.layout.tile_shape))


def _without(
    values: dict[int, tuple[Instance, ...]], buffer: int
) -> dict[int, tuple[Instance, ...]]:
    left = {v: tuple(i for i in there if i.buffer != buffer) for v, there in values.items()}
    return {v: there for v, there in left.items() if there}


# -- what could stay -----------------------------------------------------------------------------


def _could_stay(
    moment: Moment, steps: Sequence[Step], space: Space, buffer: int, at: int
) -> bool | None:
    """Whether there is room with a buffer in its space that left it by a step; None: too many ways
    to try. Room is made for one comer after another, last for what the task needs itself."""
    comers = list(_comers(steps, space))
    following = next((comer for comer in comers if comer[0] > at), None)
    gone = {
        step.source.buffer
        for i, step in enumerate(steps)
        if isinstance(step, Copy) and _evicts_from(step, space)
        and step.source.buffer != buffer and (following is None or i < following[0])
    }  # fmt: skip
    came = [size for i, size, stays in comers if stays and (following is None or i < following[0])]
    ways = [] if following is not None else list(_ways(moment, steps, space, gone))
    pieces = came if following is None else [*came, following[1]]
    # What the task reads where it lies would have to come again.
    run = steps[-1]
    read = {i.buffer for i in run.inputs} if following and isinstance(run, Execute) else set()
    spare = [n for n in _spare(moment, space) if n != buffer and n not in (*gone, *read)]
    left = steps[at]
    assert isinstance(left, Copy)
    trials = 2 ** len(spare)
    for some in ways:
        trials *= len(some)
    if trials > MOST_TRIALS:
        return None
    try:
        return any(
            _fits(moment, space, {*gone, *dropped}, chosen, pieces,
                  still=False, is_for_task=following is None)
            for count in range(len(spare) + 1)
            for dropped in itertools.combinations(spare, count)
            if _survive(moment, dropped)
            for chosen in itertools.product(*ways)
            if (again := sum(way.seconds for way in chosen)) == 0 or again < left.seconds
        )  # fmt: skip
    except TooManyWaysError:
        return None


def _spare(moment: Moment, space: Space) -> list[int]:
    """The buffers of a space that hold nothing that is read later, in L1 by predictions too, or
    nowhere else."""
    predicted = {v for v, _ in moment.request.later} if space is Space.L1 else set()
    return [
        b.number
        for b in moment.buffers.values()
        if b.space is space and b.address is not None and not b.pinned
        and not any(moment.is_read_later(v) or v in predicted for v in moment.users(b.number))
        and _survive(moment, (b.number,))
    ]  # fmt: skip


def _survive(moment: Moment, dropped: Sequence[int]) -> bool:
    """Whether every value keeps an instance of its own type, and views stay together."""
    for value, there in moment.values.items():
        kind = moment.origin(value)
        if there[0].buffer in dropped and len(moment.users(there[0].buffer)) > 1:
            return False
        left = [i for i in there if i.buffer not in dropped]
        if not any(i.desc.layout.data_type is kind for i in left):
            return False
    return True


def _comers(steps: Sequence[Step], space: Space) -> Iterator[tuple[int, int, bool]]:
    """What comes into a space from another while room is made: step, size, whether it stays."""
    for i, step in enumerate(steps):
        after = steps[i + 1] if i + 1 < len(steps) else None
        if isinstance(step, Allocate) and step.buffer.space is space:
            if isinstance(after, Copy) and after.kind == "evict":
                yield i, step.buffer.size_per_bank, True
        elif isinstance(step, Relocate) and step.stage is not None and step.stage_space is space:
            yield i, step.stage[1], False


def _ways(
    moment: Moment, steps: Sequence[Step], space: Space, gone: set[int]
) -> Iterator[list[Way]]:
    """For each input that the task wants in a space, all ways to have it there: of one that is read
    later too, the plan's own, which may serve it then as well."""
    for (value, desc, overwritten), position in _wanted(moment, space).items():
        ways = list(_ways_of(moment, space, gone, value, desc, overwritten))
        run = steps[-1]
        if isinstance(run, Execute):
            own = run.inputs[position].buffer
            own_block = own if own in moment.buffers else None
            if moment.is_read_later(value):
                ways = [way for way in ways if way.block == own_block]
            if own_block is not None:
                again = _seconds(moment, value, desc, own)
                ways = [way if way.block is not None else replace(way, seconds=again)
                        for way in ways]  # fmt: skip
        yield ways


def _wanted(moment: Moment, space: Space) -> dict[tuple[int, TensorDesc, int], int]:
    """The inputs that the task wants in a space: (value, descriptor, input if it is overwritten,
    else -1), to the last such input."""
    task = moment.request.tasks[moment.task]
    given = {i for _, i in task.transformation.aliases}
    return {
        (task.inputs[i], desc, i if i in given else -1): i
        for i, desc in enumerate(task.transformation.inputs)
        if desc.layout.space is space and task.inputs
    }


def _seconds(moment: Moment, value: int, desc: TensorDesc, but: int) -> float:
    """What a copy of a value takes at least, made of another buffer than one."""
    machine = moment.request.machine
    return min(
        (
            machine.copy_seconds(copy_counts(i.desc, desc, machine))
            for i in moment.values[value]
            if i.buffer != but
        ),
        default=0.0,
    )


def _ways_of(
    moment: Moment, space: Space, gone: set[int], value: int, desc: TensorDesc, overwritten: int
) -> Iterator[Way]:
    task = moment.request.tasks[moment.task]
    bare = TensorDesc(desc.shape, desc.layout.without_address())
    address = desc.layout.address
    if _is_reached(moment, value, space):
        kept = task.outputs[overwritten] if overwritten >= 0 else value
        yield Way(None, address, _size(moment, desc), _named_later(moment, kept, bare))
    for instance in moment.values.get(value, ()):
        block = moment.buffers[instance.buffer]
        if instance.desc != bare or block.address is None or block.number in gone:
            continue
        if address is not None and (
            instance.offset_nbytes or (block.pinned and block.address != address)
        ):
            continue
        if overwritten >= 0 and (
            block.pinned
            or instance.offset_nbytes
            or moment.users(block.number) != {value}
            or value in moment.request.kept
            or moment.is_read_later(value)
            or task.inputs.count(value) > 1
        ):
            continue
        yield Way(block.number, address, block.size_per_bank)


def _is_reached(moment: Moment, value: int, space: Space) -> bool:
    """Whether some instance of a value has a path to a space, so that a copy needs no detour."""
    machine = moment.request.machine
    sources = {i.desc.layout.space for i in moment.values.get(value, ())}
    return any(machine.path(source, space) is not None for source in sources)


def _fits(
    moment: Moment, space: Space, gone: set[int], chosen: Sequence[Way], arriving: Sequence[int],
    *, still: bool, is_for_task: bool = True,
) -> bool:  # fmt: skip
    """Whether all that stays and all that is needed lie side by side; `still`: nothing moves."""
    shape = moment.request.machine.shape.space(space)
    held: dict[int, int | None] = {}
    for way in chosen:
        if way.block is None:
            continue
        if way.block in gone or held.get(way.block, way.address) != way.address:
            return False
        held[way.block] = way.address if held.get(way.block) is None else held[way.block]
    regions, pieces = [], [*arriving]
    for block in moment.buffers.values():
        if block.space is not space or block.address is None or block.number in gone:
            continue
        if block.address >= shape.limit:
            continue  # Lent bytes lie beyond its end.
        address = held.get(block.number)
        if still and address not in (None, block.address):
            return False
        if block.pinned or still:
            regions.append((block.address, block.size_per_bank))
        elif address is not None:
            regions.append((address, block.size_per_bank))
        else:
            pieces.append(block.size_per_bank)
    up = shape.granule
    if is_for_task:
        _add_needs(moment, space, chosen, regions, pieces, still=still)
    regions = [(at, -(-max(size, 1) // up) * up) for at, size in regions]
    pieces = sorted((-(-max(size, 1) // up) * up for size in pieces), reverse=True)
    return lies(regions, pieces, shape.base, shape.limit)


def _add_needs(
    moment: Moment, space: Space, chosen: Sequence[Way], regions: list[Region], pieces: list[int],
    *, still: bool,
) -> None:  # fmt: skip
    """What a task needs in a space beside the blocks that serve it where they are; `still`: what is
    to be read at an address is made there, as what lies there would have to move for its reader."""
    shape = moment.request.machine.shape.space(space)
    for way in chosen:
        if way.block is None:
            named = way.named if still and way.address is None else way.address
            _add(regions, pieces, named, way.size)
    task = moment.request.tasks[moment.task].transformation
    scratch = task.scratch
    if scratch is not None and scratch.space is space and scratch.size_per_bank:
        at = shape.base if space is Space.L1 else None
        _add(regions, pieces, at, scratch.size_per_bank)
    taken = {o for o, _ in task.aliases}
    for o, desc in enumerate(task.outputs):
        if o not in taken and desc.layout.space is space:
            address = desc.layout.address
            if still and address is None:
                value = moment.request.tasks[moment.task].outputs[o]
                address = _named_later(moment, value, desc)
            _add(regions, pieces, address, _size(moment, desc))


def _named_later(moment: Moment, value: int, made: TensorDesc) -> int | None:
    """The first address at which a later task names a value in this form."""
    for later in moment.request.tasks[moment.task + 1 :]:
        for read, desc in zip(later.inputs, later.transformation.inputs, strict=False):
            if read == value and desc.layout.address is not None and desc.without_address() == made:
                return desc.layout.address
    return None


def _add(regions: list[Region], pieces: list[int], address: int | None, size: int) -> None:
    if address is None:
        pieces.append(size)
    else:
        regions.append((address, size))


def _size(moment: Moment, desc: TensorDesc) -> int:
    return footprint(desc, moment.request.machine.shape).size_per_bank


# -- bounces -------------------------------------------------------------------------------------


def _needless_bounce(
    moment: Moment, steps: Sequence[Step], step: Relocate, seen: Counter[str]
) -> Iterator[str]:
    """Why bytes that left a space and came back could have stayed in it."""
    machine, space = moment.request.machine, step.space
    out = {s.source.buffer for s in steps if isinstance(s, Copy) and _evicts_from(s, space)}
    freed = {s.buffer for s in steps if isinstance(s, Free)}
    # A copy where the input lies in the space already takes time as well.
    ways = [
        [w for w in some if w.block is not None] or some
        for some in _ways(moment, steps, space, out)
    ]
    trials = 1
    for some in ways:
        trials *= len(some)
    if trials > MOST_TRIALS:
        seen["undecided"] += 1
    elif any(
        _fits(moment, space, out | freed, chosen, (), still=True)
        for chosen in itertools.product(*ways)
    ):
        yield f"task {moment.task}: {space.value} bounces and the task runs with nothing moved"
    if machine.path(space, space) is None:
        return
    assert step.certificate is not None
    shape = machine.shape.space(space)
    there = [b for b in moment.buffers.values() if b.space is space and b.address is not None]
    free = shape.capacity - sum(b.size_per_bank for b in there if b.number not in out | freed)
    if step.certificate.kind == "cycle" and free:
        yield f"task {moment.task}: {free} B of {space.value} are free, and a cycle leaves it"
    if step.certificate.kind == "cost":
        seen["cost, which the checker alone is asked"] += 1


# -- room for a task -----------------------------------------------------------------------------


def task_finds_room(request: PlanRequest, index: int) -> bool:
    """Whether some way to serve the inputs of a task leaves room for all that it needs, when all
    else that is not pinned has left.

    Raises `TooManyWaysError` for what is more than can be tried.
    """
    buffers = {b.number: b for b in request.buffers}
    values = {r.value: r.instances for r in request.residents}
    moment = Moment(request, index, buffers, values)
    return all(_finds_room(moment, space) for space in request.machine.shape.spaces)


def _finds_room(moment: Moment, space: Space) -> bool:
    loose = {b.number for b in moment.buffers.values() if not b.pinned}
    served = []
    for value, desc, overwritten in _wanted(moment, space):
        ways = [Way(None, desc.layout.address, _size(moment, desc))]
        if overwritten < 0:
            found = _ways_of(moment, space, set(), value, desc, overwritten)
            ways += [way for way in found if way.block is not None]
        served.append(ways)
    return any(
        _fits(moment, space, loose - {way.block for way in ways}, ways, (), still=False)
        for ways in itertools.product(*served)
    )


def lies(regions: Sequence[Region], pieces: Sequence[int], base: int, limit: int) -> bool:
    """Whether fixed regions do not clash, and pieces find places in the gaps between them.

    Raises `TooManyWaysError` for what is more than can be tried.
    """
    gaps, at = [], base
    for address, size in sorted(regions):
        if address < at:
            return False
        gaps.append(address - at)
        at = address + size
    return at <= limit and _packs(sorted(pieces, reverse=True), [*gaps, limit - at])


def _packs(pieces: Sequence[int], gaps: Sequence[int]) -> bool:
    """Whether pieces, the largest first, find places in gaps: every way is tried once.

    What is left of the gaps decides, not which of them it is: equal pieces in any order are one
    way. A gap below the smallest piece counts for nothing.
    """
    after = [sum(pieces[at:]) for at in range(len(pieces))]
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def from_piece(at: int, gaps: tuple[int, ...]) -> bool:
        if at == len(pieces):
            return True
        if sum(gaps) < after[at] or (at, gaps) in failed:
            return False
        for gap in dict.fromkeys(gaps):
            if gap >= pieces[at]:
                left = [*gaps]
                left.remove(gap)
                if from_piece(at + 1, usable([*left, gap - pieces[at]])):
                    return True
        failed.add((at, gaps))
        if len(failed) > MOST_WAYS:
            raise TooManyWaysError
        return False

    def usable(gaps: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(gap for gap in gaps if gap >= pieces[-1])) if pieces else ()

    return from_piece(0, usable(gaps))

"""A plan is a shape and a binding: the same steps for the same work where things lie elsewhere.

Comes in: a plan, and a request that differs from the plan's own in places. Goes out: the plan bound
to these, or nothing. Buffers that share an address at some time form one *cluster* and keep their
distances, so whatever is free, alive or overwritten there stays so wherever the cluster lies. A
cluster goes where what it begins with lies now, or where a program wants it, else to any hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from stitch.machine import room_per_bank
from stitch.memory import Allocator
from stitch.planner.clusters import addresses_in, moved_in
from stitch.planner.leaving import leaving_for
from stitch.planner.plan import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Resident,
    Step,
    waiting_desc,
)
from stitch.planner.plan_picture import needed_regions, taken_in
from stitch.program import Space
from stitch.tasks import NumberedTask

#: Number of a buffer in the known plan → its number, or its address, in the one that is made.
Numbers = dict[int, int]


def placed(
    known: Plan, request: PlanRequest, taken: Mapping[Space, Allocator] | None = None
) -> Plan | None:
    """The steps of a known plan for a request of the same tasks on values of the same forms, None
    where they do not serve it or find no place.

    Moves inside a space depend on what lies where: only those are placed that clear what programs
    name, in one transfer each, to any hole. What leaves a space leaves it by the same rules, be it
    another tensor now (`leaving_for`). `taken`: what lies in the spaces, where the request tells
    only of those in which something leaves or moves (`gives_way_in`), and of what is in it as well.
    """
    before = known.request
    if request.machine is not before.machine or request.tasks != before.tasks:
        return None
    if not may_be_placed(known):
        return None
    others = leaving_for(known, request)
    if others is None:
        return None
    values = {value: value for value in _used(request.tasks)} | others
    numbers = _numbers(known, request, values)
    if numbers is None:
        return None
    taken = taken or taken_in(request)
    if _passes_by_room(known, taken):
        return None
    places = addresses_in(request, known, numbers, _given_up(known), taken)
    return None if places is None else _bound(known, request, numbers, values, *places)


def _passes_by_room(known: Plan, taken: Mapping[Space, Allocator]) -> bool:
    """Whether something leaves L1 for the host, as DRAM had no room, though it has some now."""
    dram = taken.get(Space.DRAM)
    if dram is None:
        return False
    shape = known.request.machine.shape
    return any(
        isinstance(step, Copy)
        and step.kind == "evict"
        and step.source.desc.layout.space is Space.L1
        and step.target.desc.layout.space is Space.HOST
        and room_per_bank(waiting_desc(step.source.desc), shape) <= dram.largest_hole
        for step in known.steps
    )


def may_be_placed(known: Plan) -> bool:
    """Whether a plan may serve where things lie otherwise than in its own request: it moves
    nothing, or simply."""
    return _moves_simply(known)


def _moves_simply(known: Plan) -> bool:
    """Whether what it moves was there before and is moved once, in one transfer, and that is all
    that gives way."""
    moves = [step for step in known.steps if isinstance(step, Relocate)]
    targets = [target for step in moves for target in step.targets]
    is_direct = len(moved_in(known)) == len(targets) and all(
        step.stage is None
        and step.certificate is None
        and sorted(t.target_address for t in step.transfers) == sorted(at for _, at in step.targets)
        for step in moves
    )
    return not moves or (is_direct and not _gives_way(known))


def _gives_way(known: Plan) -> bool:
    """Whether anything that is needed yet is evicted or dropped, or comes back."""
    tasks, done = known.request.tasks, 0
    needed = {value: t for t, task in enumerate(tasks) for value in task.inputs}
    needed |= dict.fromkeys([r.value for r in known.final_values], len(tasks))
    lying: dict[int, set[int]] = {}
    for resident in known.request.residents:
        for instance in resident.instances:
            lying.setdefault(instance.buffer, set()).add(resident.value)
    for step in known.steps:
        if isinstance(step, Copy):
            if step.kind != "copy":
                return True
            lying.setdefault(step.target.buffer, set()).add(step.made)
        elif isinstance(step, Execute):
            done = step.task + 1
            for value, instance in zip(tasks[step.task].outputs, step.outputs, strict=True):
                lying[instance.buffer] = {value}
        elif isinstance(step, Free) and any(
            needed.get(value, -1) >= done for value in lying.get(step.buffer, ())
        ):
            return True
    return False


def _used(tasks: tuple[NumberedTask, ...]) -> set[int]:
    return {value for task in tasks for value in (*task.inputs, *task.outputs)}


def _numbers(known: Plan, request: PlanRequest, values: Numbers) -> Numbers | None:
    """The buffers of the tasks' sources and of what leaves, by their numbers in the known plan;
    None where forms differ, or the plan touches more than these."""
    used = _used(request.tasks)
    if known.request.kept & used != request.kept & used:
        return None
    here = {r.value: r.instances for r in request.residents}
    numbers: Numbers = {}
    for resident in known.request.residents:
        if resident.value not in values:
            continue
        now = here.get(values[resident.value], ())
        if len(now) != len(resident.instances):
            return None
        for a, b in zip(resident.instances, now, strict=True):
            is_same = (a.offset_nbytes, a.desc) == (b.offset_nbytes, b.desc)
            if not is_same or numbers.setdefault(a.buffer, b.buffer) != b.buffer:
                return None
    # Whatever lies where it did and is moved: it need not be a task's.
    there = {(b.space, b.address): b.number for b in request.buffers}
    for number, (buffer, _) in moved_in(known).items():
        now_there = there.get((buffer.space, buffer.address))
        if number in known.touched and number not in numbers and now_there is not None:
            numbers[number] = now_there
    if len(set(numbers.values())) < len(numbers) or not known.touched <= numbers.keys():
        return None
    old, new = _by_number(known.request), _by_number(request)
    if any(_form(old[a]) != _form(new[b]) for a, b in numbers.items()):
        return None
    idle = values.keys() - used
    leaving = {i.buffer for r in known.request.residents if r.value in idle for i in r.instances}
    if any(old[a].origin != new[numbers[a]].origin for a in leaving):
        return None
    # What else lies in a buffer may have kept it alive, so the same ones are shared, but for those
    # that are given up or overwritten: that would follow them, or be lost.
    others, others_now = _shared(known.request, values), _shared(request, values.values())
    passing = used - request.kept
    dying = {i.buffer for r in known.request.residents if r.value in passing for i in r.instances}
    shared = {number for number in known.touched | dying if number in others}
    if shared != {n for n in known.touched | dying if numbers[n] in others_now}:
        return None
    donated = {t.inputs[at] for t in request.tasks for at in t.transformation.donated}
    taken = {i.buffer for r in known.request.residents if r.value in donated for i in r.instances}
    if shared & (_given_up(known) | taken):
        return None
    return numbers


def _shared(request: PlanRequest, values: Iterable[int]) -> set[int]:
    """The buffers in which other values than these lie."""
    known = {*values}
    return {i.buffer for r in request.residents if r.value not in known for i in r.instances}


def _form(buffer: Buffer) -> tuple[object, ...]:
    is_outside = buffer.address is None
    return buffer.space, buffer.size_per_bank, buffer.desc, buffer.pinned, buffer.shared, is_outside


def _by_number(request: PlanRequest) -> dict[int, Buffer]:
    return {buffer.number: buffer for buffer in request.buffers}


def _given_up(known: Plan) -> frozenset[int]:
    """The buffers of before that are gone when it has run."""
    return known.touched - {buffer.number for buffer in known.final_buffers}


# -- steps --------------------------------------------------------------------------------------


def _bound(
    known: Plan, request: PlanRequest, numbers: Numbers, values: Numbers, addresses: Numbers,
    targets: Numbers,
) -> Plan:  # fmt: skip
    fresh = max([b.number for b in request.buffers], default=-1) + 1
    made: dict[int, Buffer] = {}
    for step in known.steps:
        if isinstance(step, Allocate):
            b = step.buffer
            number = numbers[b.number] = fresh + len(made)
            if number != b.number or addresses[b.number] != b.address:
                b = replace(b, number=number, address=addresses[b.number])
            made[number] = b
    steps = tuple(_steps(known, numbers, values, made, addresses, targets))
    claimed = [(b.space, b.address or 0, b.size_per_bank) for b in made.values()]
    present = _by_number(request)
    for number, (buffer, _) in moved_in(known).items():
        address, now = targets[number], numbers[number]
        claimed.append((buffer.space, address, buffer.size_per_bank))
        those = present if now in present else made
        those[now] = replace(those[now], address=address)
    claimed += [
        step.scratch for step in steps if isinstance(step, Execute) and step.scratch is not None
    ]
    touched = frozenset([numbers[number] for number in known.touched])
    holders = [b for b in request.buffers if b.number in touched]
    return Plan(
        request=request,
        steps=steps,
        final_buffers=_final_buffers(known, present, numbers, made),
        final_values=_final_values(known, request, numbers, values),
        free_regions=needed_regions(claimed, holders),
        touched=touched,
        least_seconds=known.least_seconds,
        fewest_bytes=known.fewest_bytes,
    )


def _steps(
    known: Plan, numbers: Numbers, values: Numbers, made: Mapping[int, Buffer], addresses: Numbers,
    targets: Numbers,
) -> Iterator[Step]:  # fmt: skip
    is_same = all(a == b for those in (numbers, values) for a, b in those.items())
    #: Where what was allocated at an address lies now.
    lies: dict[tuple[Space, int | None], int] = {}
    for step in known.steps:
        if isinstance(step, Allocate):
            buffer = made[numbers[step.buffer.number]]
            lies[buffer.space, step.buffer.address] = buffer.address or 0
            yield step if buffer is step.buffer else Allocate(buffer)
        elif isinstance(step, Execute):
            scratch = step.scratch
            if scratch is not None:
                space, at, size = scratch
                scratch = space, at if space is Space.L1 else lies[space, at], size
            if is_same and scratch == step.scratch:
                yield step
                continue
            inputs = tuple([_instance(i, numbers) for i in step.inputs])
            outputs = tuple([_instance(i, numbers) for i in step.outputs])
            yield Execute(step.task, inputs, outputs, scratch)
        elif isinstance(step, Relocate):
            moved = {at: number for number, at in step.targets}
            yield replace(
                step,
                targets=tuple([(numbers[n], targets[n]) for n in moved.values()]),
                transfers=tuple(
                    replace(t, source_address=addresses[n], target_address=targets[n])
                    for t, n in ((t, moved[t.target_address]) for t in step.transfers)
                ),
            )
        elif is_same:
            yield step
        elif isinstance(step, Free):
            yield Free(numbers[step.buffer])
        else:
            yield replace(
                step,
                value=values[step.value],
                made=values[step.made],
                source=_instance(step.source, numbers),
                target=_instance(step.target, numbers),
            )


def _instance(instance: Instance, numbers: Numbers) -> Instance:
    return Instance(numbers[instance.buffer], instance.offset_nbytes, instance.desc)


def _final_buffers(
    known: Plan, present: Mapping[int, Buffer], numbers: Numbers, made: Mapping[int, Buffer]
) -> tuple[Buffer, ...]:
    old, final = _by_number(known.request), dict(present)
    for number in _given_up(known):
        del final[numbers[number]]
    for buffer in known.final_buffers:
        now = numbers.get(buffer.number)
        if now is None:
            continue
        here = made.get(now) or present[now]
        was = old.get(buffer.number)
        is_renamed = was is None or was.origin != buffer.origin
        final[now] = replace(here, origin=buffer.origin) if is_renamed else here
    return tuple([buffer for _, buffer in sorted(final.items())])


def _final_values(
    known: Plan, request: PlanRequest, numbers: Numbers, values: Numbers
) -> tuple[Resident, ...]:
    here = {*values.values()}
    final = {
        r.value: Resident(r.value, r.instances) for r in request.residents if r.value not in here
    }
    for resident in known.final_values:
        value = values.get(resident.value)
        if value is not None:
            instances = tuple([_instance(i, numbers) for i in resident.instances])
            final[value] = Resident(value, instances)
    return tuple([resident for _, resident in sorted(final.items())])

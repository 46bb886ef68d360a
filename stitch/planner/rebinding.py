"""Rebind a known plan: the same steps for the same tasks, with tensors at other addresses.

Buffers that share an address at some time form one *cluster* and keep their distances, so whatever
is free, alive or overwritten in it stays so at any address. A cluster goes to the current address
of its resident buffers, or to the one that a program requires, else to any hole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stitch.machine import room_per_bank
from stitch.memory import LENT_ADDRESSES, Allocator
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
    evicted_desc,
)
from stitch.planner.plan_state import allocators_of, needed_regions
from stitch.program import Space
from stitch.tasks import NumberedTask


class _Part(NamedTuple):
    """Bytes `[start, end)` that the known plan uses at some time.

    `wanted`: the required start now (None: any). `number`: the buffer there, None for scratch.
    """

    space: Space
    start: int
    end: int
    wanted: int | None
    number: int | None


@dataclass(slots=True)
class _Cluster:
    """Overlapping parts; `shift`: the required distance to the new address (None: any)."""

    space: Space
    start: int
    end: int
    parts: list[_Part]
    shift: int | None = None


def new_addresses(
    request: PlanRequest, plan: Plan, numbers: Mapping[int, int], freed: Collection[int],
    taken: Mapping[Space, Allocator],
) -> dict[int, int] | None:  # fmt: skip
    """Return the new addresses of the buffers that a known plan uses, by their numbers there; None
    if they do not fit.

    Args:
        request: The request to rebind to.
        plan: The plan.
        numbers: The request's buffer for each buffer of the known plan's request.
        freed: Buffers that the plan frees.
        taken: Allocators of the spaces, including buffers that the request does not list.
    """
    old = {b.number: b for b in plan.request.buffers}
    new = {b.number: b for b in request.buffers}
    fixed = plan.fixed
    if any(n in fixed and old[n].address != new[b].address for n, b in numbers.items()):
        return None
    there = [
        _Part(b.space, b.address, b.address + b.size_per_bank, now, None)
        for n in freed
        if (b := old[n]).address is not None and (now := new[numbers[n]].address) is not None
    ]
    clusters = _clusters([*there, *_new_parts(plan, fixed)])
    if clusters is None:
        return None
    free = {space: taken[space].clone() for space in {cluster.space for cluster in clusters}}
    for n in freed:
        space, address = old[n].space, new[numbers[n]].address
        if space in free and address is not None and address < LENT_ADDRESSES:
            free[space].free(address)
    if not _assign_addresses(free, clusters):
        return None
    return {
        part.number: part.start + (cluster.shift or 0)
        for cluster in clusters
        for part in cluster.parts
        if part.number is not None
    }


def _new_parts(plan: Plan, fixed: Mapping[int, Collection[int]]) -> Iterator[_Part]:
    for step in plan.steps:
        if isinstance(step, Allocate):
            b, at = step.buffer, step.buffer.address
            assert at is not None
            wanted = at if at in fixed.get(b.number, ()) else None
            yield _Part(b.space, at, at + b.size_per_bank, wanted, b.number)
        elif isinstance(step, Execute) and step.scratch is not None:
            space, at, size = step.scratch
            # In L1 it has a fixed address, elsewhere a buffer of its own.
            yield _Part(space, at, at + size, at if space is Space.L1 else None, None)


def _clusters(parts: list[_Part]) -> list[_Cluster] | None:
    """Merge overlapping parts; None if one would need two addresses."""
    clusters: list[_Cluster] = []
    for part in sorted(parts, key=lambda p: (p.space.value, p.start)):
        cluster = clusters[-1] if clusters else None
        if cluster is None or cluster.space is not part.space or part.start >= cluster.end:
            cluster = _Cluster(part.space, part.start, part.end, [])
            clusters.append(cluster)
        cluster.end = max(cluster.end, part.end)
        cluster.parts.append(part)
        if part.wanted is not None:
            shift = part.wanted - part.start
            if cluster.shift not in (None, shift):
                return None
            cluster.shift = shift
    return clusters


def _assign_addresses(allocators: Mapping[Space, Allocator], clusters: list[_Cluster]) -> bool:
    """Assign an address to every cluster, its old one if possible; False if they do not fit."""
    late: list[_Cluster] = []
    for cluster in sorted(clusters, key=lambda b: b.shift is None):
        allocator, size = allocators[cluster.space], cluster.end - cluster.start
        at = cluster.start + (cluster.shift or 0)
        if allocator.is_free(at, size):
            allocator.alloc_at(at, size)
            cluster.shift = at - cluster.start
        elif cluster.shift is None:
            late.append(cluster)
        else:
            return False
    for cluster in sorted(late, key=lambda b: b.start - b.end):
        address = allocators[cluster.space].try_alloc(cluster.end - cluster.start)
        if address is None:
            return False
        cluster.shift = address - cluster.start
    return True


#: What ranking for eviction depends on, except the idle time.
_Form = tuple[object, ...]
#: Eviction candidates, the least recently used first: form, buffer, values.
_Order = list[tuple[_Form, int, list[int]]]


def map_evictions(plan: Plan, request: PlanRequest) -> dict[int, int] | None:
    """Map the values that a known plan evicts to those that the same rules evict now.

    Sizes alone decide whether something must be evicted, so the candidates of the space must have
    the same sizes. Among those alike in size, next use and other copies the least recently used is
    evicted first, so the order must be the same up to the last one evicted.

    Returns:
        Values by those of the known plan, without the tasks' own; None if the rules may choose
            differently.
    """
    before = plan.request
    leaving = plan.leaving
    spaces = {space for space, _ in leaving}
    if not spaces:
        return {}
    used = _used(request.tasks)
    if _later(before, used) != _later(request, used):
        return None
    gone = {number for _, number in leaving}
    values: dict[int, int] = {}
    for space in spaces:
        (then, fixed), (now, fixed_now) = (_order(r, space, used) for r in (before, request))
        count = 1 + max((at for at, entry in enumerate(then) if entry[1] in gone), default=-1)
        forms, forms_now = ([form for form, _, _ in entries] for entries in (then, now))
        if (
            fixed != fixed_now
            or forms[:count] != forms_now[:count]
            or Counter(forms[count:]) != Counter(forms_now[count:])
        ):
            return None
        for (_, number, users), (_, _, users_now) in zip(then[:count], now, strict=False):
            if number in gone:
                values |= zip(users, users_now, strict=True)
    return {value: now for value, now in values.items() if value not in used}


def _later(request: PlanRequest, used: Collection[int]) -> Counter[tuple[int, int]]:
    """Return the predicted uses; values that no task uses count as -1."""
    return Counter((value if value in used else -1, use) for value, use in request.later)


def _order(
    request: PlanRequest, space: Space, used: Collection[int]
) -> tuple[_Order, Counter[_Form]]:
    """Return the eviction candidates of a space in order, and its pinned buffers."""
    lying = {b.number: b for b in request.buffers if b.space is space}
    users: dict[int, list[Resident]] = {number: [] for number in lying}
    for resident in request.residents:
        for number in dict.fromkeys([instance.buffer for instance in resident.instances]):
            if number in users:
                users[number].append(resident)
    later = dict(request.later)
    fixed: Counter[_Form] = Counter()
    ranked = []
    for number, buffer in lying.items():
        at, values = buffer.address, users[number]
        if at is None or at >= LENT_ADDRESSES:
            continue
        if buffer.pinned:
            fixed[buffer.size_per_bank, at] += 1
            continue
        form = buffer.size_per_bank, buffer.desc, *_forms(buffer, values, request, later, used)
        idle = min((resident.idle for resident in values), default=0)
        entry = form, number, [resident.value for resident in values]
        ranked.append(((-idle, -buffer.size_per_bank, at), entry))
    ranked.sort(key=lambda pair: pair[0])
    return [entry for _, entry in ranked], fixed


def _forms(
    buffer: Buffer, values: Collection[Resident], request: PlanRequest, later: dict[int, int],
    used: Collection[int],
) -> Iterator[_Form]:  # fmt: skip
    """Describe the values of a buffer: task values, next uses and instances."""
    for resident in values:
        value = resident.value
        yield (
            value if value in used else -1, value in request.kept, later.get(value),
            *((i.buffer == buffer.number, i.offset_nbytes, i.desc) for i in resident.instances),
        )  # fmt: skip


#: Number of a buffer in the known plan → its number, or address, in the new one.
Numbers = dict[int, int]


def rebind_plan(
    plan: Plan, request: PlanRequest, taken: Mapping[Space, Allocator] | None = None
) -> Plan | None:
    """Return the steps of a known plan for another request, or None if they do not apply.

    The request must have the same tasks, on values in the same layouts. Moves inside a space depend
    on its contents, so a plan with moves is not rebound. Evictions follow the same rules and may
    choose other tensors.

    Args:
        plan: A plan for the same tasks.
        request: The new state; may list only the spaces in `plan.pressured_spaces`.
        taken: Allocators of all spaces; default: those of `request`.
    """
    before = plan.request
    if request.machine is not before.machine or request.tasks != before.tasks:
        return None
    if not is_rebindable(plan):
        return None
    others = map_evictions(plan, request)
    if others is None:
        return None
    values = {value: value for value in _used(request.tasks)} | others
    numbers = _numbers(plan, request, values)
    if numbers is None:
        return None
    taken = taken or allocators_of(request)
    if _bypasses_dram(plan, taken):
        return None
    addresses = new_addresses(request, plan, numbers, _freed(plan), taken)
    return None if addresses is None else _rebind(plan, request, numbers, values, addresses)


def _bypasses_dram(plan: Plan, taken: Mapping[Space, Allocator]) -> bool:
    """Whether the plan evicts from L1 to the host something that would fit into DRAM now."""
    dram = taken.get(Space.DRAM)
    if dram is None:
        return False
    shape = plan.request.machine.shape
    return any(
        isinstance(step, Copy)
        and step.kind == "evict"
        and step.source.desc.layout.space is Space.L1
        and step.target.desc.layout.space is Space.HOST
        and room_per_bank(evicted_desc(step.source.desc), shape) <= dram.largest_hole
        for step in plan.steps
    )


def is_rebindable(plan: Plan) -> bool:
    """Whether a plan moves nothing inside a space."""
    return not any(isinstance(step, Relocate) for step in plan.steps)


def _used(tasks: tuple[NumberedTask, ...]) -> set[int]:
    return {value for task in tasks for value in (*task.inputs, *task.outputs)}


def _numbers(plan: Plan, request: PlanRequest, values: Numbers) -> Numbers | None:
    """Map the touched buffers to those of the request; None if more than addresses differ."""
    used = _used(request.tasks)
    if plan.request.kept & used != request.kept & used:
        return None
    here = {r.value: r.instances for r in request.residents}
    numbers: Numbers = {}
    for resident in plan.request.residents:
        if resident.value not in values:
            continue
        now = here.get(values[resident.value], ())
        if len(now) != len(resident.instances):
            return None
        for a, b in zip(resident.instances, now, strict=True):
            is_same = (a.offset_nbytes, a.desc) == (b.offset_nbytes, b.desc)
            if not is_same or numbers.setdefault(a.buffer, b.buffer) != b.buffer:
                return None
    if len(set(numbers.values())) < len(numbers) or not plan.touched <= numbers.keys():
        return None
    old, new = _by_number(plan.request), _by_number(request)
    if any(_form(old[a]) != _form(new[b]) for a, b in numbers.items()):
        return None
    idle = values.keys() - used
    leaving = {i.buffer for r in plan.request.residents if r.value in idle for i in r.instances}
    if any(old[a].origin != new[numbers[a]].origin for a in leaving):
        return None
    # Other values in a buffer keep it alive, so the same buffers must be shared, and none that is
    # freed or overwritten.
    others, others_now = _shared(plan.request, values), _shared(request, values.values())
    passing = used - request.kept
    dying = {i.buffer for r in plan.request.residents if r.value in passing for i in r.instances}
    shared = {number for number in plan.touched | dying if number in others}
    if shared != {n for n in plan.touched | dying if numbers[n] in others_now}:
        return None
    donated = {t.inputs[at] for t in request.tasks for at in t.transformation.donated}
    taken = {i.buffer for r in plan.request.residents if r.value in donated for i in r.instances}
    if shared & (_freed(plan) | taken):
        return None
    return numbers


def _shared(request: PlanRequest, values: Iterable[int]) -> set[int]:
    excluded = {*values}
    return {i.buffer for r in request.residents if r.value not in excluded for i in r.instances}


def _form(buffer: Buffer) -> tuple[object, ...]:
    is_outside = buffer.address is None
    return buffer.space, buffer.size_per_bank, buffer.desc, buffer.pinned, buffer.shared, is_outside


def _by_number(request: PlanRequest) -> dict[int, Buffer]:
    return {buffer.number: buffer for buffer in request.buffers}


def _freed(plan: Plan) -> frozenset[int]:
    """Return the resident buffers that the plan frees."""
    return plan.touched - {buffer.number for buffer in plan.final_buffers}


def _rebind(
    plan: Plan, request: PlanRequest, numbers: Numbers, values: Numbers, addresses: Numbers
) -> Plan:
    fresh = max([b.number for b in request.buffers], default=-1) + 1
    made: dict[int, Buffer] = {}
    for step in plan.steps:
        if isinstance(step, Allocate):
            b = step.buffer
            number = numbers[b.number] = fresh + len(made)
            if number != b.number or addresses[b.number] != b.address:
                b = replace(b, number=number, address=addresses[b.number])
            made[number] = b
    steps = tuple(_steps(plan, numbers, values, made))
    claimed = [(b.space, b.address or 0, b.size_per_bank) for b in made.values()]
    claimed += [
        step.scratch for step in steps if isinstance(step, Execute) and step.scratch is not None
    ]
    touched = frozenset([numbers[number] for number in plan.touched])
    holders = [b for b in request.buffers if b.number in touched]
    return Plan(
        request=request,
        steps=steps,
        final_buffers=_final_buffers(plan, request, numbers, made),
        final_values=_final_values(plan, request, numbers, values),
        free_regions=needed_regions(claimed, holders),
        touched=touched,
        least_seconds=plan.least_seconds,
    )


def _steps(
    plan: Plan, numbers: Numbers, values: Numbers, made: Mapping[int, Buffer]
) -> Iterator[Step]:
    is_same = all(a == b for those in (numbers, values) for a, b in those.items())
    #: New addresses of buffers by their old ones.
    lies: dict[tuple[Space, int | None], int] = {}
    for step in plan.steps:
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
        elif is_same:
            yield step
        elif isinstance(step, Free):
            yield Free(numbers[step.buffer])
        else:
            assert isinstance(step, Copy), "a plan with moves is not rebound"
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
    plan: Plan, request: PlanRequest, numbers: Numbers, made: Mapping[int, Buffer]
) -> tuple[Buffer, ...]:
    old, present = _by_number(plan.request), _by_number(request)
    final = dict(present)
    for number in _freed(plan):
        del final[numbers[number]]
    for buffer in plan.final_buffers:
        now = numbers.get(buffer.number)
        if now is None:
            continue
        here = made.get(now) or present[now]
        was = old.get(buffer.number)
        is_renamed = was is None or was.origin != buffer.origin
        final[now] = replace(here, origin=buffer.origin) if is_renamed else here
    return tuple([buffer for _, buffer in sorted(final.items())])


def _final_values(
    plan: Plan, request: PlanRequest, numbers: Numbers, values: Numbers
) -> tuple[Resident, ...]:
    here = {*values.values()}
    final = {
        r.value: Resident(r.value, r.instances) for r in request.residents if r.value not in here
    }
    for resident in plan.final_values:
        value = values.get(resident.value)
        if value is not None:
            instances = tuple([_instance(i, numbers) for i in resident.instances])
            final[value] = Resident(value, instances)
    return tuple([resident for _, resident in sorted(final.items())])

"""Who leaves now, where a known plan made others leave: what is as idle, and alike.

Comes in: a known plan, and a request of the same tasks. Goes out: for each value that left then the
one that leaves now, or nothing where another would be chosen. Must not know: how plans are made.
The order is that of `victims_of` among what is alike: a change there is one here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from stitch.memory import LENT_ADDRESSES
from stitch.planner.plan import Buffer, Plan, PlanRequest, Resident
from stitch.program import Space

#: All that choosing depends on in a buffer but for how long it is idle.
_Form = tuple[object, ...]
#: What may leave a space, the first to leave of those that are alike elsewise first: how each looks
#: to who chooses, its number, and its values.
_Order = list[tuple[_Form, int, list[int]]]


def leaving_for(known: Plan, request: PlanRequest) -> dict[int, int] | None:
    """The values that leave their spaces now, by those that left in a known plan, the tasks' own
    left out; None where the same rules may choose otherwise.

    Sizes alone say whether anything must leave, so what lies in such a space must have the same
    ones; of those alike in size, next use and copies elsewhere the least recently used leaves. So
    as far as the last one that left, the order must be the same; what comes after it may change.
    """
    before = known.request
    leaving = known.leaving
    spaces = {space for space, _ in leaving}
    if not spaces:
        return {}
    used = {value for task in request.tasks for value in (*task.inputs, *task.outputs)}
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
    """The predicted uses, by value where it is the tasks'."""
    return Counter((value if value in used else -1, use) for value, use in request.later)


def _order(
    request: PlanRequest, space: Space, used: Collection[int]
) -> tuple[_Order, Counter[_Form]]:
    """What may leave a space, in order; and what lies there and may not."""
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
    """How the values in a buffer look: which of the tasks' they are, when they are read, and what
    copies there are of them."""
    for resident in values:
        value = resident.value
        yield (
            value if value in used else -1, value in request.kept, later.get(value),
            *((i.buffer == buffer.number, i.offset_nbytes, i.desc) for i in resident.instances),
        )  # fmt: skip

"""Who leaves a space first, and which copies can be dropped without a byte."""

from __future__ import annotations

from typing import TypeAlias

from stitch.planner.making_room.demand import RoomDemand
from stitch.planner.plan import Buffer
from stitch.planner.plan_state import NEVER, PlanState

#: What the rule says of it, the buffer, and whether it is spare.
Victim: TypeAlias = tuple[tuple[float, ...], Buffer, bool]


def victims_of(state: PlanState, demand: RoomDemand) -> list[Victim]:
    """Buffers that may leave, best by the rule first; then farthest next use, spare, idle, big."""
    ranked = []
    for buffer in state.in_space(demand.space):
        if buffer.pinned or buffer.number in demand.locked or buffer.number in demand.relocate:
            continue
        users = state.users[buffer.number]
        if not users:
            continue
        soonest = min((state.soonest(v, demand.space) for v in users), default=NEVER)
        spare = is_spare(state, buffer)
        idle = min((state.idle.get(v, 0) for v in users), default=0)
        # Known plans find who leaves by the end of this: see `leaving`.
        rank = (-soonest, not spare, -idle, -buffer.size_per_bank, buffer.address or 0)
        ranked.append(((*_price(state, demand, buffer, soonest, spare), *rank), buffer, spare))
    return sorted(ranked, key=lambda f: f[0])


def _price(
    state: PlanState, demand: RoomDemand, buffer: Buffer, soonest: int, spare: bool
) -> tuple[float, ...]:
    """What the rule looks at first: bytes to write now and to bring back later."""
    if state.rule == "farthest":
        return ()
    if state.rule == "chosen":
        end = len(state.request.tasks)
        uses = ((v, state.soonest(v, demand.space)) for v in state.users[buffer.number])
        return (not any((v, min(use, end)) in state.away for v, use in uses),)
    size = buffer.size_per_bank
    price = (0 if spare else size) + (0 if soonest == NEVER else size)
    away = min(soonest, len(state.request.tasks) + 1) - state.task
    if state.rule == "cheapest":
        return (price / max(1, away),)
    wanted = sum(n for _, n, _ in demand.fixed) + sum(n for n, _ in demand.floating)
    enough = size >= wanted - state.allocators[demand.space].free_nbytes
    return (not enough, price if enough else -soonest)


def is_spare(state: PlanState, buffer: Buffer) -> bool:
    """Whether every value in a buffer survives without it, as things are now."""
    users = state.users[buffer.number]
    return not _is_shared_home(state, buffer) and all(
        state.is_spare(v, i) for v in users for i in state.values[v] if i.buffer == buffer.number
    )


def _is_shared_home(state: PlanState, buffer: Buffer) -> bool:
    """Whether views lie here first of all: apart, they would no longer share what is written."""
    users = state.users[buffer.number]
    return len(users) > 1 and any(state.values[v][0].buffer == buffer.number for v in users)


def drop(state: PlanState, buffer: Buffer) -> None:
    for value in state.users[buffer.number]:
        for instance in [i for i in state.values[value] if i.buffer == buffer.number]:
            state.detach(value, instance)
            for other in state.values[value]:
                state.touch(other.buffer)


def drop_idle_copies(state: PlanState, demand: RoomDemand, needed: int) -> bool:
    """Drop spare copies that no task is known to want, at least as many bytes as are needed."""
    dropped, values = 0, state.values.items()
    if all(len(lies) < 2 or state.next_use(v, demand.space) != NEVER for v, lies in values):
        return False
    for _, buffer, _ in victims_of(state, demand):
        if dropped and dropped >= needed:
            break
        # What the task itself reads in place is locked: here it is read elsewhere.
        idle = all(state.next_use(v, demand.space) == NEVER for v in state.users[buffer.number])
        # Asked anew: of two copies that spare each other only one may go.
        if idle and is_spare(state, buffer):
            drop(state, buffer)
            dropped += buffer.size_per_bank
    return dropped > 0

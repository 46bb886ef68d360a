"""Free memory in a space for a task: move, drop or evict buffers, or prove that it cannot be done.

In order of cost: use a free hole; drop a copy that no task is known to need; move buffers inside
the space; evict the buffer that the plan's rule ranks first (without a copy if another instance
exists, else from L1 to DRAM or from DRAM to the host, with a certificate). A demand that does not
fit even into the empty space is refused before any step is added. Evicted buffers that turn out to
fit are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from stitch import plugins
from stitch.errors import LayoutError, OutOfMemoryError, UsageError
from stitch.machine import Policy, round_up
from stitch.memory import LENT_ADDRESSES, Allocator
from stitch.packing import pack
from stitch.planner.mover import Repacking, SpaceProblem, arrange, operation_size, relocation
from stitch.planner.plan import (
    Branches,
    Buffer,
    Certificate,
    Copy,
    Instance,
    copy_cost,
    evicted_desc,
)
from stitch.planner.plan_state import NEVER, RULES, PlanState
from stitch.program import Space


@dataclass(slots=True)
class SpaceDemand:
    """The demand of one task on one space, in bytes per bank.

    `fixed`: required regions (address, size, name). `floating`: (size, name) at any address.
    `locked`: buffers that must stay in the space. `relocate`: required addresses of buffers.
    `evicts`: whether buffers without another copy may be evicted.
    """

    space: Space
    purpose: str
    locked: set[int]
    fixed: list[tuple[int, int, str]] = field(default_factory=list)
    floating: list[tuple[int, str]] = field(default_factory=list)
    relocate: dict[int, int] = field(default_factory=dict)
    evicts: bool = True


def check_fixed(state: PlanState, demand: SpaceDemand) -> None:
    """Raise LayoutError if a required region is out of range, misaligned, pinned, or overlaps."""
    shape, allocator = state.shape(demand.space), state.allocators[demand.space]
    regions = sorted([(address, size, what, -1) for address, size, what in demand.fixed] + [
        (address, state.buffers[n].size_per_bank, state.buffers[n].origin, n)
        for n, address in demand.relocate.items()
    ])  # fmt: skip
    for address, size, what, number in regions:
        if address < shape.base or address + size > shape.limit or address % shape.granule:
            raise LayoutError(
                f"{what} cannot be allocated at {address:#x} in {demand.space.value}",
                where=demand.purpose,
                expected=f"a multiple of {shape.granule} with {size} B per bank "
                f"inside [{shape.base:#x}, {shape.limit:#x})",
                got=f"[{address:#x}, {address + size:#x})",
            )
        if number >= 0 and state.buffers[number].address == address:
            continue
        if allocator.is_free(address, size):
            continue
        for buffer in state.in_space(demand.space):
            if buffer.pinned and _overlap(address, size, buffer):
                raise LayoutError(
                    f"{what} needs [{address:#x}, {address + size:#x}) of {demand.space.value}, "
                    f"but {buffer.origin} is pinned there",
                    where=demand.purpose,
                    remedy="release the exported array or view that pins it, or move the tensor",
                )
    for (a, size, what, _), (b, _, other, _) in pairwise(regions):
        if a + size > b:
            raise LayoutError(
                f"{what} [{a:#x}, {a + size:#x}) and {other} (at {b:#x}) overlap in "
                f"{demand.space.value}",
                where=demand.purpose,
                remedy="compile one of them for another address",
            )


def _overlap(address: int, size: int, buffer: Buffer) -> bool:
    start = buffer.address or 0
    return start < address + size and address < start + buffer.size_per_bank


def sizes_of(demand: SpaceDemand, granule: int) -> list[int]:
    return [round_up(max(size, 1), granule) for size, _ in demand.floating]


def problem_of(state: PlanState, demand: SpaceDemand) -> SpaceProblem:
    shape = state.shape(demand.space)
    obstacles = [(address, size) for address, size, _ in demand.fixed]
    obstacles += [(a, state.buffers[n].size_per_bank) for n, a in demand.relocate.items()]
    promised = list(obstacles)
    movable: list[tuple[int, int, int]] = []
    displaced: list[tuple[int, int, int]] = []
    for buffer in state.in_space(demand.space):
        assert buffer.address is not None
        if buffer.number in demand.relocate:
            continue
        if buffer.pinned:
            obstacles.append((buffer.address, buffer.size_per_bank))
            continue
        entry = (buffer.number, buffer.address, buffer.size_per_bank)
        clash = any(_overlap(address, size, buffer) for address, size in promised)
        (displaced if clash else movable).append(entry)
    return SpaceProblem(
        shape.base,
        shape.limit,
        shape.granule,
        tuple(movable),
        tuple(displaced),
        tuple(sorted(obstacles)),
        tuple(sizes_of(demand, shape.granule)),
        operation_size(state.machine, demand.space),
    )


def certificate_of(problem: SpaceProblem) -> Certificate:
    """Prove that the pieces of a problem do not fit into its gaps."""
    pieces, gaps = problem.all_pieces, tuple(size for _, size in problem.gaps)
    if sum(pieces) > sum(gaps):
        return Certificate("capacity", pieces, gaps)
    packing = pack(pieces, gaps)
    if packing.refutation is None:
        return Certificate("undecided", pieces, gaps)
    steps = "".join("bfk"[step] for step in packing.refutation.steps)
    return Certificate("packing", pieces, gaps, Branches(steps, packing.refutation.by_sums))


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A buffer that may be evicted, as an eviction rule of a plugin sees it.

    Args:
        origin: What it holds, for messages.
        nbytes: Its bytes per bank.
        next_use: Tasks until its next use in this space; infinite if no known task reads it.
        idle: Tasks since its last use.
        is_spare: Whether every value has another copy, so that evicting it writes nothing.
        missing_nbytes: Bytes per bank by which free memory is too small for the current task.
    """

    origin: str
    nbytes: int
    next_use: float
    idle: int
    is_spare: bool
    missing_nbytes: int


#: Buffer, next use, and whether its values have other copies.
Victim: TypeAlias = tuple[Buffer, int, bool]


def eviction_candidates(state: PlanState, demand: SpaceDemand) -> list[Victim]:
    """Return the buffers that may be evicted, ranked by next use, copies, idle time and size."""
    ranked = []
    for buffer in state.buffers.values():
        number, users = buffer.number, state.users[buffer.number]
        if (
            buffer.space is not demand.space
            or buffer.pinned
            or not users
            or number in demand.locked
            or number in demand.relocate
            or buffer.address is None
            or buffer.address >= LENT_ADDRESSES
        ):
            continue
        soonest = min([state.soonest(v, demand.space) for v in users])
        spare = is_spare(state, buffer)
        idle = min([state.idle.get(v, 0) for v in users])
        # `map_evictions` relies on the order of these keys.
        rank = (-soonest, not spare, -idle, -buffer.size_per_bank, buffer.address)
        ranked.append((rank, (buffer, soonest, spare)))
    ranked.sort()
    return [victim for _, victim in ranked]


def _by_rule(
    state: PlanState, demand: SpaceDemand, candidates: Sequence[Victim]
) -> Sequence[Victim]:
    """Sort candidates by the rule's price: the bytes to write now and to bring back later."""
    end = len(state.request.tasks)
    wanted = sum(n for _, n, _ in demand.fixed) + sum(n for n, _ in demand.floating)
    missing = wanted - state.allocators[demand.space].free_nbytes
    if state.rule not in RULES:
        return sorted(candidates, key=lambda victim: _plugin_price(state, victim, missing))

    def price(victim: Victim) -> tuple[float, ...]:
        buffer, soonest, spare = victim
        if state.rule == "chosen":
            uses = ((v, state.soonest(v, demand.space)) for v in state.users[buffer.number])
            return (not any((v, min(use, end)) in state.away for v, use in uses),)
        size = buffer.size_per_bank
        price = (0 if spare else size) + (0 if soonest == NEVER else size)
        if state.rule == "cheapest":
            return (price / max(1, min(soonest, end + 1) - state.task),)
        return (size < missing, price if size >= missing else -soonest)

    # The sort is stable.
    return candidates if state.rule == "farthest" else sorted(candidates, key=price)


def _plugin_price(state: PlanState, victim: Victim, missing: int) -> float:
    """Return what a plugin's rule says of a buffer; the buffer of the lowest price is evicted."""
    name, (buffer, soonest, spare) = state.rule, victim
    rule: Callable[[EvictionCandidate], float] | None = plugins.find("residency", name)
    if rule is None:
        raise plugins.no_plugin("residency", name)
    candidate = EvictionCandidate(
        buffer.origin, buffer.size_per_bank,
        float("inf") if soonest == NEVER else soonest - state.task,
        min(state.idle.get(v, 0) for v in state.users[buffer.number]), spare, max(0, missing),
    )  # fmt: skip
    price = plugins.called("residency", name, rule, candidate)
    if not isinstance(price, int | float) or price != price:
        raise UsageError(
            f"the residency plugin {name!r} returned no price",
            where=buffer.origin, expected="a number; the buffer of the lowest one is evicted",
            got=repr(price)[:80],
        )  # fmt: skip
    return price


def is_spare(state: PlanState, buffer: Buffer) -> bool:
    """Whether every value of a buffer has another copy."""
    users = state.users[buffer.number]
    if any(len(state.values[v]) < 2 for v in users):
        return False
    return not _is_shared_home(state, buffer) and all(
        state.is_spare(v, i) for v in users for i in state.values[v] if i.buffer == buffer.number
    )


def _is_shared_home(state: PlanState, buffer: Buffer) -> bool:
    """Whether it is the primary buffer of several views, which must keep sharing writes."""
    users = state.users[buffer.number]
    return len(users) > 1 and any(state.values[v][0].buffer == buffer.number for v in users)


def drop(state: PlanState, buffer: Buffer) -> None:
    for value in state.users[buffer.number]:
        for instance in [i for i in state.values[value] if i.buffer == buffer.number]:
            state.detach(value, instance)
            for other in state.values[value]:
                state.touch(other.buffer)


def drop_idle_copies(state: PlanState, demand: SpaceDemand, needed: int) -> bool:
    """Drop at least `needed` bytes of redundant copies without known readers, if there are any."""
    dropped, values = 0, state.values.items()
    if all(
        len(instances) < 2 or state.next_use(v, demand.space) != NEVER for v, instances in values
    ):
        return False
    for buffer, *_ in _by_rule(state, demand, eviction_candidates(state, demand)):
        if dropped and dropped >= needed:
            break
        # Buffers that the task reads in place are locked, so only later uses count.
        idle = all(state.next_use(v, demand.space) == NEVER for v in state.users[buffer.number])
        # Test again: of two copies only one may be dropped.
        if idle and is_spare(state, buffer):
            drop(state, buffer)
            state.decide(buffer.number)
            dropped += buffer.size_per_bank
    return dropped > 0


def out_of_memory(
    state: PlanState, demand: SpaceDemand, certificate: Certificate
) -> OutOfMemoryError:
    """Return the error for a demand that does not fit, with the largest tensors and the proof."""
    space, allocator = demand.space, state.allocators[demand.space]
    wanted = ", ".join([w for _, _, w in demand.fixed] + [w for _, w in demand.floating])
    size = sum(s for _, s, _ in demand.fixed) + sum(s for s, _ in demand.floating)
    biggest = sorted(state.in_space(space), key=lambda b: -b.size_per_bank)[:5]
    listed = ", ".join(
        f"{b.origin} ({b.size_per_bank} B, {state.lifetime(b)})" for b in biggest
    )  # fmt: skip
    remedy = (
        "release unused tensors, place some in another space "
        "(--set input.NAME.space=dram; in Python placement=), or split the program"
    )
    capacity = state.shape(space).capacity
    if size > capacity:
        remedy = (
            f"{space.value} has {capacity} B per bank in total, so freeing memory does not "
            "help: place it in another space (--set input.NAME.space=dram; in Python placement=), "
            "shard it, or split the program"
        )
    if space is Space.DRAM and not state.outlets[space]:
        remedy += "; open_device(spill=True) allows evictions to the host"
    error = OutOfMemoryError(
        f"{space.value} cannot hold {wanted} of {demand.purpose}: {size} B per bank needed, "
        f"{allocator.free_nbytes} B free, largest hole {allocator.largest_hole} B",
        where=f"machine {state.machine.name!r}; biggest live tensors: {listed or 'none'}",
        remedy=remedy,
    )
    error.certificate = certificate
    return error


def find_addresses(state: PlanState, demand: SpaceDemand) -> list[int]:
    """Return addresses for the floating pieces; moves and evictions are appended as steps.

    Raises:
        OutOfMemoryError: No arrangement exists.
        LayoutError: Required regions overlap.
    """
    if not (demand.fixed or demand.floating or demand.relocate):
        return []
    check_fixed(state, demand)
    free = _free_holes(state, demand)
    if free is not None:
        return free
    undo: Callable[[], None] | None = None
    gone: list[int] = []
    problem = problem_of(state, demand)
    candidates: list[Victim] | None = None
    while True:
        missing = sum(problem.all_pieces) - sum(size for _, size in problem.gaps)
        arrangement = None if missing > 0 else _move_displaced(state, demand, problem)
        if arrangement is None and drop_idle_copies(state, demand, missing):
            problem, candidates = problem_of(state, demand), None
            continue
        arrangement = arrangement or (None if missing > 0 else _try_arrange(problem))
        if arrangement is not None:
            break
        if undo is None:
            _check_capacity(state, demand, problem)
            undo = state.checkpoint()
        state.pressed, steps = True, len(state.steps)
        if candidates is None:
            candidates = eviction_candidates(state, demand)
        gone.append(_evict_one(state, demand, candidates, problem, proves=not gone))
        problem = problem.without(gone[-1:])
        # If more than one tensor was evicted, or copies were dropped, others may be redundant now.
        is_simple = len(state.steps) == steps + 3
        candidates = [c for c in candidates if c[0].number != gone[-1]] if is_simple else None
    if undo is not None and len(gone) > 1:
        undo()
        before, problem = problem, _evict_together(state, demand, gone)
        if problem != before:
            arrangement = _move_displaced(state, demand, problem) or _try_arrange(problem)
            assert arrangement is not None
    return list(_relocate(state, demand, problem, arrangement).pieces)


def _try_arrange(problem: SpaceProblem, *, in_order: bool = False) -> Repacking | None:
    """Return the cheapest arrangement, or None."""
    try:
        return arrange(problem, in_order=in_order)
    except TimeoutError:
        return None


def _has_room(problem: SpaceProblem) -> bool:
    """Whether `_try_arrange` succeeds; searches only if packing is undecided."""
    pieces, gaps = problem.all_pieces, [size for _, size in problem.gaps]
    if sum(pieces) > sum(gaps):
        return False
    packing = pack(pieces, gaps, placements=0)
    return packing.chosen is not None if packing.ended else _try_arrange(problem) is not None


def _free_holes(state: PlanState, demand: SpaceDemand) -> list[int] | None:
    """Return addresses of free holes for the pieces without any move, or None; O(log n) each."""
    allocator, alignment = state.allocators[demand.space], state.shape(demand.space).granule
    if any(state.buffers[n].address != address for n, address in demand.relocate.items()):
        return None
    if not all(allocator.is_free(address, size) for address, size, _ in demand.fixed):
        return None
    taken: list[int] = []
    try:
        for address, size, _ in demand.fixed:
            allocator.alloc_at(address, size)
            taken.append(address)
        return _allocate_all(allocator, sizes_of(demand, alignment), taken)
    finally:
        for address in taken:
            allocator.free(address)


def _allocate_all(allocator: Allocator, sizes: Sequence[int], taken: list[int]) -> list[int] | None:
    """Return addresses for `sizes`, or None; appends them to `taken`.

    Best fit places the largest first, other policies in order.
    """
    places = [0] * len(sizes)
    is_best = allocator.policy is Policy.BEST_FIT
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i] if is_best else 0):
        address = allocator.try_alloc(sizes[i])
        if address is None:
            return None
        taken.append(address)
        places[i] = address
    return places


def _move_displaced(
    state: PlanState, demand: SpaceDemand, problem: SpaceProblem
) -> Repacking | None:
    """Return an arrangement in which only displaced buffers move, or None."""
    allocator = state.allocators[demand.space].clone()
    stays = {*problem.obstacles, *((a, size) for _, a, size in problem.movable)}
    instances = {*allocator.buffers()}
    for address, _ in instances - stays:
        allocator.free(address)
    for address, size in stays - instances:
        allocator.alloc_at(address, size)
    displaced = sorted(problem.displaced)
    sizes = [size for _, _, size in displaced]
    places = _allocate_all(allocator, (*sizes, *problem.pieces), [])
    if places is None:
        return None
    moves = zip((number for number, _, _ in displaced), places, strict=False)
    return Repacking(tuple(moves), tuple(places[len(sizes) :]), sum(sizes))


def _check_capacity(state: PlanState, demand: SpaceDemand, problem: SpaceProblem) -> None:
    """Raise OutOfMemoryError if the demand does not fit even with every candidate evicted."""
    if not demand.evicts:
        return
    buffers = {number for number, *_ in (*problem.movable, *problem.displaced)}
    left = problem.without({n for n in buffers if n not in demand.locked and state.users[n]})
    certificate = certificate_of(left)
    if certificate.kind != "undecided":
        raise out_of_memory(state, demand, certificate)


def _evict_together(state: PlanState, demand: SpaceDemand, gone: Sequence[int]) -> SpaceProblem:
    """Evict those of `gone` that are needed, each with its certificate; return the rest."""
    whole = problem_of(state, demand)

    leaving = list(gone)
    for number in gone:
        others = [other for other in leaving if other != number]
        left = whole.without(others)
        if others and _has_room(left):
            leaving = others
    for number in leaving:
        buffer, rest = state.buffers[number], whole.without([n for n in leaving if n != number])
        _evict_one(state, demand, [(buffer, 0, is_spare(state, buffer))], rest)
    return whole.without(leaving)


def _evict_one(
    state: PlanState,
    demand: SpaceDemand,
    candidates: Sequence[Victim],
    problem: SpaceProblem,
    *,
    proves: bool = True,
) -> int:
    """Evict the first candidate that fits elsewhere, or drop it if redundant; return its number.

    `proves`: add the certificate that the problem has no solution without an eviction.
    """
    victims = _by_rule(state, demand, candidates)
    certificate = certificate_of(problem) if proves and demand.evicts else None
    why = "" if certificate is None else _reason(demand, certificate), certificate
    refused: OutOfMemoryError | None = None
    outlets = state.outlets[demand.space] if demand.evicts else ()
    nearer = tuple(space for space in outlets if space is not Space.HOST)
    # Use the host only if nothing can be evicted without it.
    for spills, spaces in ((False, nearer), (True, outlets)):
        refused = None
        #: The least size that a space cannot hold.
        too_large: dict[Space, int] = {}
        for buffer, _, spare in victims:
            if spare:
                drop(state, buffer)
                state.decide(buffer.number)
                return buffer.number
            for space in spaces:
                size = state.size_of(evicted_desc(buffer.desc, space))
                if space in too_large and size >= too_large[space]:
                    continue
                undo = state.checkpoint()
                try:
                    _evict(state, buffer, space, why, spills)
                except OutOfMemoryError as error:
                    # It does not fit there; a smaller or redundant one may.
                    undo()
                    refused, too_large[space] = refused or error, size
                else:
                    state.decide(buffer.number)
                    return buffer.number
    if not demand.evicts:
        # Every caller that allows no evictions discards the error.
        raise OutOfMemoryError(f"{demand.space.value} has no free range without evictions")
    try:
        raise refused or out_of_memory(state, demand, certificate or certificate_of(problem))
    finally:
        # Its traceback references this frame, and the callers' with all that they hold.
        del refused


def _reason(demand: SpaceDemand, certificate: Certificate) -> str:
    pieces, gaps = sum(certificate.pieces), sum(certificate.gaps)
    why = {
        "capacity": f"{pieces} B per bank would have to lie in {gaps} B",
        "packing": "regions that cannot move split the space, and the rest packs into no gaps",
        "undecided": "no arrangement was found within the search limit",
    }[certificate.kind]
    return f"room for {demand.purpose}: {why}"


def _evict(
    state: PlanState, buffer: Buffer, to: Space, why: tuple[str, Certificate | None], spills: bool
) -> None:
    demand = SpaceDemand(to, f"the eviction of {buffer.origin}", set(state.locked), evicts=spills)
    demand.floating.append((state.size_of(evicted_desc(buffer.desc, to)), buffer.origin))
    (address,) = find_addresses(state, demand)
    desc = evicted_desc(buffer.desc, to)
    new = state.allocate(to, address, state.size_of(desc), desc, buffer.origin)
    carry(state, "evict", buffer, new, why)
    number, users = buffer.number, state.users[buffer.number]
    for user in users:
        state.values[user] = tuple([
            replace(i, buffer=new, desc=evicted_desc(i.desc, to)) if i.buffer == number else i
            for i in state.values[user]
        ])  # fmt: skip
    state.users[new] = users
    state.free(number)


def carry(
    state: PlanState,
    kind: Literal["evict", "return"],
    buffer: Buffer,
    new: int,
    why: tuple[str, Certificate | None],
) -> None:
    """Append the copy of a whole buffer into a new one of another space."""
    desc = state.buffers[new].desc
    source, target = Instance(buffer.number, 0, buffer.desc), Instance(new, 0, desc)
    value = min(state.users[buffer.number])
    nbytes, seconds = copy_cost(state.machine, buffer.desc, desc)
    state.touch(buffer.number)
    state.steps.append(Copy(kind, value, value, source, target, nbytes, seconds, *why))


def _relocate(
    state: PlanState, demand: SpaceDemand, problem: SpaceProblem, arrangement: Repacking
) -> Repacking:
    """Append the cheaper moves: of `arrangement`, or of one that keeps the order; return which."""
    targets = dict(arrangement.moves)
    targets |= {
        number: address
        for number, address in demand.relocate.items()
        if state.buffers[number].address != address
    }
    if not targets:
        return arrangement
    candidates = [arrangement]

    def in_order() -> dict[int, int] | None:
        if demand.relocate or problem.displaced:
            return None
        other = _try_arrange(problem, in_order=True)
        candidates.extend([other] if other is not None else [])
        return None if other is None else dict(other.moves)

    def take_room(space: Space, size: int) -> int:
        staging = SpaceDemand(space, f"a bounce for {demand.purpose}", set(state.locked))
        staging.floating.append((size, "staging"))
        undo = state.checkpoint()
        try:
            (address,) = find_addresses(state, staging)
        except OutOfMemoryError:
            undo()
            raise
        state.claimed.append((space, address, size))
        return address

    step = relocation(state, demand.space, targets, demand.purpose, take_room, in_order)
    targets = dict(step.targets)
    state.moved(targets)
    state.steps.append(step)
    return next(
        candidate for candidate in candidates if dict(candidate.moves).items() <= targets.items()
    )

"""Free memory in a space for a task: move, drop or evict buffers, or prove that it cannot be done.

The order of remedies is the order of their cost: a free hole; dropping a copy that no task is known
to need; moving buffers inside the space; evicting the buffer that the plan's rule ranks first
(without a copy where another instance exists, else by a copy from L1 to DRAM or from DRAM to the
host, with its certificate). A demand that does not fit even into the empty space is refused before
any step is added. Evicted buffers that could have stayed are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import Policy, round_up
from stitch.memory import Allocator
from stitch.packing import PLACEMENTS, pack
from stitch.planner.mover import Repacking, SpaceProblem, arrange, operation_size, relocation
from stitch.planner.plan import (
    Branches,
    Buffer,
    Certificate,
    Copy,
    Instance,
    copy_cost,
    waiting_desc,
)
from stitch.planner.plan_state import NEVER, PlanState
from stitch.program import Space

# Demand of one task on one space


@dataclass(slots=True)
class RoomDemand:
    """What one task needs of one space, in bytes per bank.

    `fixed`: regions (address, size, what) it must have. `floating`: (size, what) that may lie
    anywhere. `locked`: buffers that must stay in the space. `relocate`: buffers that must go to a
    given address. `evicts`: whether what lies nowhere else may leave.
    """

    space: Space
    purpose: str
    locked: set[int]
    fixed: list[tuple[int, int, str]] = field(default_factory=list)
    floating: list[tuple[int, str]] = field(default_factory=list)
    relocate: dict[int, int] = field(default_factory=dict)
    evicts: bool = True


def check_fixed(state: PlanState, demand: RoomDemand) -> None:
    shape, allocator = state.shape(demand.space), state.allocators[demand.space]
    regions = sorted([(address, size, what, -1) for address, size, what in demand.fixed] + [
        (address, state.buffers[n].size_per_bank, state.buffers[n].origin, n)
        for n, address in demand.relocate.items()
    ])  # fmt: skip
    for address, size, what, number in regions:
        if address < shape.base or address + size > shape.limit or address % shape.granule:
            raise LayoutError(
                f"{what} cannot lie at {address:#x} in {demand.space.value}",
                where=demand.purpose,
                expected=f"a multiple of {shape.granule} with room for {size} B per bank "
                f"in [{shape.base:#x}, {shape.limit:#x})",
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
                    f"where {buffer.origin} is pinned",
                    where=demand.purpose,
                    remedy="release the exported array or view that pins it, or move the tensor",
                )
    for (a, size, what, _), (b, _, other, _) in pairwise(regions):
        if a + size > b:
            raise LayoutError(
                f"{what} [{a:#x}, {a + size:#x}) and {other} (at {b:#x}) clash in "
                f"{demand.space.value}",
                where=demand.purpose,
                remedy="compile one of them for another address",
            )


def _overlap(address: int, size: int, buffer: Buffer) -> bool:
    start = buffer.address or 0
    return start < address + size and address < start + buffer.size_per_bank


def sizes_of(demand: RoomDemand, granule: int) -> list[int]:
    return [round_up(max(size, 1), granule) for size, _ in demand.floating]


def problem_of(state: PlanState, demand: RoomDemand) -> SpaceProblem:
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
    """Why the pieces of a space were given no room in it, however they are moved."""
    pieces, gaps = problem.all_pieces, tuple(size for _, size in problem.gaps)
    if sum(pieces) > sum(gaps):
        return Certificate("capacity", pieces, gaps)
    packing = pack(pieces, gaps)
    if packing.refutation is None:
        return Certificate("undecided", pieces, gaps)
    steps = "".join("bfk"[step] for step in packing.refutation.steps)
    return Certificate("packing", pieces, gaps, Branches(steps, packing.refutation.by_sums))


# Candidates for eviction

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


# Out of memory: the error and its proof


def out_of_memory(
    state: PlanState, demand: RoomDemand, problem: SpaceProblem, certificate: Certificate
) -> OutOfMemoryError:
    """The error where nothing can leave: bytes needed and free, the biggest tensors, the proof."""
    space, allocator = demand.space, state.allocators[demand.space]
    wanted = ", ".join([w for _, _, w in demand.fixed] + [w for _, w in demand.floating])
    size = sum(s for _, s, _ in demand.fixed) + sum(s for s, _ in demand.floating)
    biggest = sorted(state.in_space(space), key=lambda b: -b.size_per_bank)[:5]
    listed = ", ".join(
        f"{b.origin} ({b.size_per_bank} B, {state.lifetime(b)})" for b in biggest
    )  # fmt: skip
    remedy = (
        "drop tensors that are not needed, place some in another space "
        "(--set input.NAME.space=dram), or split the program"
    )
    capacity = state.shape(space).capacity
    if size > capacity:
        remedy = (
            f"{space.value} has {capacity} B per bank in all, so freeing helps nothing: place "
            "it in another space (--set input.NAME.space=dram), shard it, or split the program"
        )
    remedy += _least_change(state, demand, problem)
    if space is Space.DRAM and not state.outlets(space):
        remedy += "; open_device(spill=True) lets tensors wait on the host"
    error = OutOfMemoryError(
        f"{space.value} cannot hold {wanted} of {demand.purpose}: {size} B per bank needed, "
        f"{allocator.free_nbytes} B free, largest hole {allocator.largest_hole} B",
        where=f"machine {state.machine.name!r}; biggest live tensors: {listed or 'none'}",
        remedy=remedy,
    )
    error.certificate = certificate
    return error


def _least_change(state: PlanState, demand: RoomDemand, problem: SpaceProblem) -> str:
    """The smallest tensor without which there is room, in words; nothing where no one will do."""
    stays = {number for number, *_ in (*problem.movable, *problem.displaced)}
    #: Bytes, whose, and the region that has to be theirs; None: any will do.
    tensors: list[tuple[int, str, tuple[int, int] | None]] = [
        (size, what, (address, size)) for address, size, what in demand.fixed
    ]
    wanted = zip(problem.pieces, demand.floating, strict=True)
    tensors += [(size, what, None) for size, (_, what) in wanted]
    for buffer in state.in_space(demand.space):
        size, address = buffer.size_per_bank, buffer.address or 0
        if buffer.number in stays:
            tensors.append((size, buffer.origin, None))
        elif buffer.pinned or buffer.number in demand.relocate:
            address = demand.relocate.get(buffer.number, address)
            tensors.append((size, buffer.origin, (address, size)))
    pieces, budget, tried = problem.all_pieces, PLACEMENTS, set[int]()
    over = sum(pieces) - sum(size for _, size in problem.gaps)
    for size, what, region in sorted(tensors, key=lambda tensor: tensor[0]):
        if size < over or what == "scratch" or (region is None and size in tried):
            continue
        left, gaps = pieces, problem.gaps
        if region is None:
            tried.add(size)
            at = pieces.index(size)
            left = (*pieces[:at], *pieces[at + 1 :])
        else:
            others = tuple(obstacle for obstacle in problem.obstacles if obstacle != region)
            gaps = replace(problem, obstacles=others).gaps
        packing = pack(left, [room for _, room in gaps], placements=max(0, budget))
        budget -= packing.placements
        if packing.chosen is not None:
            missing = f"{over} B per bank are missing" if over > 0 else "what is left would pack"
            return f"; {what} ({size} B) elsewhere would do: {missing}"
    return ""


def make_room(state: PlanState, demand: RoomDemand) -> list[int]:
    """Addresses for the floating pieces, after moves and evictions that are recorded as steps.

    Raises `OutOfMemoryError` where no arrangement exists, `LayoutError` where fixed regions clash.
    """
    if not (demand.fixed or demand.floating or demand.relocate):
        return []
    check_fixed(state, demand)
    free = _free_places(state, demand)
    if free is not None:
        return free
    take_back: Callable[[], None] | None = None
    gone: list[int] = []
    while True:
        problem = problem_of(state, demand)
        arrangement = _elsewhere(state, demand, problem)
        missing = sum(problem.all_pieces) - sum(size for _, size in problem.gaps)
        if arrangement is None and drop_idle_copies(state, demand, missing):
            continue
        arrangement = arrangement or _arranged(problem)
        if arrangement is not None:
            break
        if take_back is None:
            _refuse_the_hopeless(state, demand, problem)
            take_back = state.attempt()
        state.pressed = True
        certificate, victims = certificate_of(problem), victims_of(state, demand)
        gone.append(_leave(state, demand, victims, problem, certificate))
    if take_back is not None and len(gone) > 1:
        take_back()
        problem = _evict_together(state, demand, gone)
        arrangement = _elsewhere(state, demand, problem) or _arranged(problem)
        assert arrangement is not None
    return list(_relocate(state, demand, problem, arrangement).pieces)


def _arranged(problem: SpaceProblem, *, in_order: bool = False) -> Repacking | None:
    """The cheapest arrangement, None where none was found."""
    try:
        return arrange(problem, in_order=in_order)
    except TimeoutError:
        return None


def _has_room(problem: SpaceProblem) -> bool:
    """Whether `_arranged` gives an arrangement; the cheapest is searched only where that tells."""
    packing = pack(problem.all_pieces, [size for _, size in problem.gaps], placements=0)
    return packing.chosen is not None if packing.ended else _arranged(problem) is not None


def _free_places(state: PlanState, demand: RoomDemand) -> list[int] | None:
    """Where the pieces fit with nothing moved, None where they do not; O(log n) for each."""
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
    """Places for `sizes`, in their order; None where one finds none. By best fit the largest is
    placed first; devices place each as it comes.

    What was allocated is added to `taken`.
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


def _elsewhere(state: PlanState, demand: RoomDemand, problem: SpaceProblem) -> Repacking | None:
    """The arrangement in which only displaced buffers move, None where best fit finds none."""
    allocator = state.allocators[demand.space].clone()
    stays = {*problem.obstacles, *((a, size) for _, a, size in problem.movable)}
    lies = {*allocator.buffers()}
    for address, _ in lies - stays:
        allocator.free(address)
    for address, size in stays - lies:
        allocator.alloc_at(address, size)
    displaced = sorted(problem.displaced)
    sizes = [size for _, _, size in displaced]
    places = _allocate_all(allocator, (*sizes, *problem.pieces), [])
    if places is None:
        return None
    moves = zip((number for number, _, _ in displaced), places, strict=False)
    return Repacking(tuple(moves), tuple(places[len(sizes) :]), sum(sizes))


def _refuse_the_hopeless(state: PlanState, demand: RoomDemand, problem: SpaceProblem) -> None:
    """Raises `OutOfMemoryError` where there is no room without all that may leave: so nothing
    leaves in vain, one after the other."""
    stay = {n for n, *_ in (*problem.movable, *problem.displaced)
            if n in demand.locked or not state.users[n]}  # fmt: skip
    left = replace(
        problem,
        movable=tuple(m for m in problem.movable if m[0] in stay),
        displaced=tuple(d for d in problem.displaced if d[0] in stay),
    )
    certificate = certificate_of(left)
    if certificate.kind != "undecided":
        raise out_of_memory(state, demand, left, certificate)


def _evict_together(state: PlanState, demand: RoomDemand, gone: Sequence[int]) -> SpaceProblem:
    """Those of some buffers leave without which there is no room; gives what is left to arrange.

    Each one's certificate says that it may not stay where all the others leave.
    """
    whole = problem_of(state, demand)

    def without(numbers: Collection[int]) -> SpaceProblem:
        staying = ([b for b in buffers if b[0] not in numbers]
                   for buffers in (whole.movable, whole.displaced))  # fmt: skip
        movable, displaced = staying
        return replace(whole, movable=tuple(movable), displaced=tuple(displaced))

    leaving = list(gone)
    for number in gone:
        others = [other for other in leaving if other != number]
        left = without(others)
        if others and _has_room(left):
            leaving = others
    for number in leaving:
        certificate = certificate_of(without([other for other in leaving if other != number]))
        buffer = state.buffers[number]
        victim = (), buffer, is_spare(state, buffer)
        _leave(state, demand, [victim], whole, certificate)
    return without(leaving)


def _leave(
    state: PlanState,
    demand: RoomDemand,
    victims: Sequence[Victim],
    problem: SpaceProblem,
    certificate: Certificate,
) -> int:
    """One of the victims leaves, the first that finds room elsewhere; gives its number."""
    why = _reason(demand, certificate), certificate
    refused: OutOfMemoryError | None = None
    outlets = state.outlets(demand.space) if demand.evicts else ()
    nearer = tuple(space for space in outlets if space is not Space.HOST)
    # Nothing goes to the host while there is room without that.
    for spills, spaces in ((False, nearer), (True, outlets)):
        refused = None
        for _, buffer, spare in victims:
            if spare:
                drop(state, buffer)
                return buffer.number
            for space in spaces:
                take_back = state.attempt()
                try:
                    _evict(state, buffer, space, why, spills)
                except OutOfMemoryError as error:
                    # This one finds no room there; a smaller one may, or one that lies there too.
                    take_back()
                    refused = refused or error
                else:
                    return buffer.number
    raise refused or out_of_memory(state, demand, problem, certificate)


def _reason(demand: RoomDemand, certificate: Certificate) -> str:
    """The reason of an eviction, in words."""
    pieces, gaps = sum(certificate.pieces), sum(certificate.gaps)
    why = {
        "capacity": f"{pieces} B per bank would have to lie in {gaps} B",
        "packing": "regions that cannot move split the space, and the rest packs into no gaps",
        "undecided": "no arrangement was found within the search limit",
    }[certificate.kind]
    return f"room for {demand.purpose}: {why}"


def _evict(
    state: PlanState,
    buffer: Buffer,
    to: Space,
    why: tuple[str, Certificate | None],
    spills: bool,
) -> None:
    """Copy a buffer to a larger space; all values in it follow."""
    room = RoomDemand(to, f"the eviction of {buffer.origin}", set(state.locked), evicts=spills)
    room.floating.append((state.size_of(waiting_desc(buffer.desc, to)), buffer.origin))
    (address,) = make_room(state, room)
    desc = waiting_desc(buffer.desc, to)
    new = state.allocate(to, address, state.size_of(desc), desc, buffer.origin)
    carry(state, "evict", buffer, new, why)
    number, users = buffer.number, state.users[buffer.number]
    for user in users:
        state.values[user] = tuple([
            replace(i, buffer=new, desc=waiting_desc(i.desc, to)) if i.buffer == number else i
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
    """Copy a whole buffer into a new one of another space."""
    desc = state.buffers[new].desc
    source, target = Instance(buffer.number, 0, buffer.desc), Instance(new, 0, desc)
    value = min(state.users[buffer.number])
    nbytes, seconds = copy_cost(state.machine, buffer.desc, desc)
    state.touch(buffer.number)
    state.steps.append(Copy(kind, value, value, source, target, nbytes, seconds, *why))


def _relocate(
    state: PlanState, demand: RoomDemand, problem: SpaceProblem, arrangement: Repacking
) -> Repacking:
    """Moves what an arrangement moves, or where that forms cycles what one does in which buffers
    keep their order, if it takes less; gives which."""
    targets = dict(arrangement.moves)
    targets |= {
        number: address
        for number, address in demand.relocate.items()
        if state.buffers[number].address != address
    }
    if not targets:
        return arrangement
    ways = [arrangement]

    def in_order() -> dict[int, int] | None:
        if demand.relocate or problem.displaced:
            return None
        other = _arranged(problem, in_order=True)
        ways.extend([other] if other is not None else [])
        return None if other is None else dict(other.moves)

    def take_room(space: Space, size: int) -> int:
        staging = RoomDemand(space, f"a bounce for {demand.purpose}", set(state.locked))
        staging.floating.append((size, "staging"))
        take_back = state.attempt()
        try:
            (address,) = make_room(state, staging)
        except OutOfMemoryError:
            take_back()
            raise
        state.claimed.append((space, address, size))
        return address

    step = relocation(state, demand.space, targets, demand.purpose, take_room, in_order)
    targets = dict(step.targets)
    state.moved(targets)
    state.steps.append(step)
    return next(way for way in ways if dict(way.moves).items() <= targets.items())

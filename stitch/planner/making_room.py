"""Making room in a space: move what can move, drop what exists elsewhere, evict as a last resort.

The order of remedies is the order of their cost: a free hole; dropping a spare copy that no task is
known to want; moving buffers inside the space; giving up the buffer whose next use is farthest
(without a byte where another copy exists, else by a copy to the next larger space, from L1 to DRAM
and from DRAM to the host, with its certificate).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import round_up
from stitch.memory import Allocator
from stitch.packing import PLACEMENTS, pack
from stitch.planner.certificate import Branches, Certificate
from stitch.planner.copy_cost import copy_cost
from stitch.planner.mover import Repacking, SpaceProblem, arrange, operation_size, relocation
from stitch.planner.plan import (
    Buffer,
    Copy,
    Instance,
    waiting_desc,
)
from stitch.planner.plan_picture import NEVER, Residency
from stitch.program import Space


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


def make_room(state: Residency, demand: RoomDemand) -> list[int]:
    """Addresses for the floating pieces, after moves and evictions that are recorded as steps.

    Raises `OutOfMemoryError` where no arrangement exists, `LayoutError` where fixed regions clash.
    """
    if not (demand.fixed or demand.floating or demand.relocate):
        return []
    _check_fixed(state, demand)
    free = _free_places(state, demand)
    if free is not None:
        return free
    take_back: Callable[[], None] | None = None
    gone: list[int] = []
    while True:
        problem = _problem(state, demand)
        arrangement = _elsewhere(problem)
        if arrangement is None and _drop_idle_copies(state, demand, sum(problem.pieces)):
            continue
        arrangement = arrangement or _arranged(problem)
        if arrangement is not None:
            break
        if take_back is None:
            _refuse_the_hopeless(state, demand, problem)
            take_back = state.attempt()
        gone.append(_evict_farthest(state, demand, problem))
    if take_back is not None and len(gone) > 1:
        take_back()
        problem = _evict_together(state, demand, gone)
        arrangement = _elsewhere(problem) or _arranged(problem)
        assert arrangement is not None
    _relocate(state, demand, arrangement)
    return list(arrangement.pieces)


def _arranged(problem: SpaceProblem) -> Repacking | None:
    """The cheapest arrangement, None where none was found."""
    try:
        return arrange(problem)
    except TimeoutError:
        return None


def _certificate(problem: SpaceProblem) -> Certificate:
    """Why the pieces of a space were given no room in it, however they are moved."""
    pieces, gaps = problem.all_pieces, tuple(size for _, size in problem.gaps)
    if sum(pieces) > sum(gaps):
        return Certificate("capacity", pieces, gaps)
    packing = pack(pieces, gaps)
    if packing.refutation is None:
        return Certificate("undecided", pieces, gaps)
    steps = "".join("bfk"[step] for step in packing.refutation.steps)
    return Certificate("packing", pieces, gaps, Branches(steps, packing.refutation.by_sums))


def _free_places(state: Residency, demand: RoomDemand) -> list[int] | None:
    """Where the pieces fit with nothing moved, None where they do not; O(log n) for each."""
    allocator, alignment = state.allocators[demand.space], state.shape(demand.space).alignment
    if any(state.buffers[n].address != address for n, address in demand.relocate.items()):
        return None
    if not all(allocator.is_free(address, size) for address, size, _ in demand.fixed):
        return None
    taken: list[int] = []
    try:
        for address, size, _ in demand.fixed:
            allocator.alloc_at(address, size)
            taken.append(address)
        return _allocate_all(allocator, _sizes(demand, alignment), taken)
    finally:
        for address in taken:
            allocator.free(address)


def _sizes(demand: RoomDemand, alignment: int) -> list[int]:
    return [round_up(max(size, 1), alignment) for size, _ in demand.floating]


def _allocate_all(allocator: Allocator, sizes: Sequence[int], taken: list[int]) -> list[int] | None:
    """Places by best fit, the largest first, in the order of `sizes`; None where one finds none.

    What was allocated is added to `taken`.
    """
    places = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        address = allocator.try_alloc(sizes[i])
        if address is None:
            return None
        taken.append(address)
        places[i] = address
    return places


def _elsewhere(problem: SpaceProblem) -> Repacking | None:
    """The arrangement in which only displaced buffers move, None where best fit finds none."""
    allocator = Allocator(problem.base, problem.limit, problem.alignment)
    for address, size in (*problem.obstacles, *((a, size) for _, a, size in problem.movable)):
        allocator.alloc_at(address, size)
    displaced = sorted(problem.displaced)
    sizes = [size for _, _, size in displaced]
    places = _allocate_all(allocator, (*sizes, *problem.pieces), [])
    if places is None:
        return None
    moves = zip((number for number, _, _ in displaced), places, strict=False)
    return Repacking(tuple(moves), tuple(places[len(sizes) :]), sum(sizes))


def _check_fixed(state: Residency, demand: RoomDemand) -> None:
    shape, allocator = state.shape(demand.space), state.allocators[demand.space]
    regions = sorted([(address, size, what, -1) for address, size, what in demand.fixed] + [
        (address, state.buffers[n].size_per_bank, state.buffers[n].origin, n)
        for n, address in demand.relocate.items()
    ])  # fmt: skip
    for address, size, what, number in regions:
        if address < shape.base or address + size > shape.limit or address % shape.alignment:
            raise LayoutError(
                f"{what} cannot lie at {address:#x} in {demand.space.value}",
                where=demand.purpose,
                expected=f"a multiple of {shape.alignment} with room for {size} B per bank "
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


def _problem(state: Residency, demand: RoomDemand) -> SpaceProblem:
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
        shape.alignment,
        tuple(movable),
        tuple(displaced),
        tuple(sorted(obstacles)),
        tuple(_sizes(demand, shape.alignment)),
        operation_size(state.machine, demand.space),
    )


# -- dropping and evicting ----------------------------------------------------------------------


#: What the rule says of it, the buffer, and whether it is spare.
_Victim: TypeAlias = tuple[tuple[float, ...], Buffer, bool]


def _victims(state: Residency, demand: RoomDemand) -> list[_Victim]:
    """Buffers that may leave, best by the rule first; then farthest next use, spare, idle, big."""
    ranked = []
    for buffer in state.in_space(demand.space):
        if buffer.pinned or buffer.number in demand.locked or buffer.number in demand.relocate:
            continue
        users = state.users[buffer.number]
        if not users:
            continue
        soonest = min((state.soonest(v) for v in users), default=NEVER)
        spare = _is_spare(state, buffer)
        idle = min((state.idle.get(v, 0) for v in users), default=0)
        rank = (-soonest, not spare, -idle, -buffer.size_per_bank, buffer.address or 0)
        ranked.append(((*_price(state, demand, buffer, soonest, spare), *rank), buffer, spare))
    return sorted(ranked, key=lambda f: f[0])


def _price(
    state: Residency, demand: RoomDemand, buffer: Buffer, soonest: int, spare: bool
) -> tuple[float, ...]:
    """What the rule looks at first: bytes to write now and to bring back later."""
    if state.rule == "farthest":
        return ()
    if state.rule == "chosen":
        end = len(state.request.tasks)
        uses = ((v, state.soonest(v)) for v in state.users[buffer.number])
        return (not any((v, min(use, end)) in state.away for v, use in uses),)
    size = buffer.size_per_bank
    price = (0 if spare else size) + (0 if soonest == NEVER else size)
    away = min(soonest, len(state.request.tasks) + 1) - state.task
    if state.rule == "cheapest":
        return (price / max(1, away),)
    wanted = sum(n for _, n, _ in demand.fixed) + sum(n for n, _ in demand.floating)
    enough = size >= wanted - state.allocators[demand.space].free_nbytes
    return (not enough, price if enough else -soonest)


def _is_spare(state: Residency, buffer: Buffer) -> bool:
    """Whether every value in a buffer survives without it, as things are now."""
    users = state.users[buffer.number]
    return not _is_shared_home(state, buffer) and all(
        state.is_spare(v, i) for v in users for i in state.values[v] if i.buffer == buffer.number
    )


def _is_shared_home(state: Residency, buffer: Buffer) -> bool:
    """Whether views lie here first of all: apart, they would no longer share what is written."""
    users = state.users[buffer.number]
    return len(users) > 1 and any(state.values[v][0].buffer == buffer.number for v in users)


def _drop(state: Residency, buffer: Buffer) -> None:
    for value in list(state.users[buffer.number]):
        for instance in [i for i in state.values[value] if i.buffer == buffer.number]:
            state.detach(value, instance)
            for other in state.values[value]:
                state.touch(other.buffer)


def _drop_idle_copies(state: Residency, demand: RoomDemand, needed: int) -> bool:
    """Drop spare copies that no task is known to want, at least as many bytes as are needed."""
    dropped = 0
    for _, buffer, _ in _victims(state, demand):
        if dropped and dropped >= needed:
            break
        # What the task itself reads in place is locked: here it is read elsewhere.
        idle = all(state.next_use(v) == NEVER for v in state.users[buffer.number])
        # Asked anew: of two copies that spare each other only one may go.
        if idle and _is_spare(state, buffer):
            _drop(state, buffer)
            dropped += buffer.size_per_bank
    return dropped > 0


def _refuse_the_hopeless(state: Residency, demand: RoomDemand, problem: SpaceProblem) -> None:
    """Raises `OutOfMemoryError` where there is no room without all that may leave: so nothing
    leaves in vain, one after the other."""
    stay = {n for n, *_ in (*problem.movable, *problem.displaced)
            if n in demand.locked or not state.users[n]}  # fmt: skip
    left = replace(
        problem,
        movable=tuple(m for m in problem.movable if m[0] in stay),
        displaced=tuple(d for d in problem.displaced if d[0] in stay),
    )
    try:
        hopeless = bool(left.pieces or left.displaced) and arrange(left) is None
    except TimeoutError:
        return
    if hopeless:
        raise _out_of_memory(state, demand, left, _certificate(left))


def _evict_farthest(state: Residency, demand: RoomDemand, problem: SpaceProblem) -> int:
    """The number of the buffer that left."""
    state.pressed = True
    state.crowded |= state.views
    return _leave(state, demand, _victims(state, demand), problem, _certificate(problem))


def _evict_together(state: Residency, demand: RoomDemand, gone: Sequence[int]) -> SpaceProblem:
    """Those of some buffers leave without which there is no room; gives what is left to arrange.

    Each one's certificate says that it may not stay where all the others leave.
    """
    whole = _problem(state, demand)

    def without(numbers: Collection[int]) -> SpaceProblem:
        staying = ([b for b in buffers if b[0] not in numbers]
                   for buffers in (whole.movable, whole.displaced))  # fmt: skip
        movable, displaced = staying
        return replace(whole, movable=tuple(movable), displaced=tuple(displaced))

    leaving = list(gone)
    for number in gone:
        others = [other for other in leaving if other != number]
        left = without(others)
        if others and (_elsewhere(left) or _arranged(left)) is not None:
            leaving = others
    for number in leaving:
        certificate = _certificate(without([other for other in leaving if other != number]))
        buffer = state.buffers[number]
        victim = (), buffer, _is_spare(state, buffer)
        _leave(state, demand, [victim], whole, certificate)
    return without(leaving)


def _leave(
    state: Residency,
    demand: RoomDemand,
    victims: Sequence[_Victim],
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
                _drop(state, buffer)
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
    raise refused or _out_of_memory(state, demand, problem, certificate)


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
    state: Residency,
    buffer: Buffer,
    to: Space,
    why: tuple[str, Certificate | None],
    spills: bool,
) -> None:
    """Copy a buffer to a larger space; all values in it follow."""
    room = RoomDemand(to, f"the eviction of {buffer.origin}", set(state.locked), evicts=spills)
    room.floating.append((state.size_of(waiting_desc(buffer.desc, to)), buffer.origin))
    new = _carry(state, "evict", buffer, to, make_room(state, room), why)
    for user in list(state.users[buffer.number]):
        for i, instance in enumerate(state.values[user]):
            if instance.buffer == buffer.number:
                moved = replace(instance, buffer=new, desc=waiting_desc(instance.desc, to))
                state.values[user][i] = moved
        state.users[new].add(user)
        state.users[buffer.number].discard(user)
    state.free(buffer.number)


def bring_back(
    state: Residency, buffer: Buffer, to: Space, addresses: Sequence[int], reader: str
) -> int:
    """Copy a buffer whole to where room was made for it; what lies in it then lies there as well.

    Gives the number of the new buffer.
    """
    reason = f"{reader} reads values of one block, which takes less room than they do apart"
    new = _carry(state, "return", buffer, to, addresses, (reason, None))
    for user in list(state.users[buffer.number]):
        for i in [i for i in state.values[user] if i.buffer == buffer.number]:
            state.attach(user, replace(i, buffer=new, desc=waiting_desc(i.desc, to)))
    return new


def _carry(
    state: Residency,
    kind: Literal["evict", "return"],
    buffer: Buffer,
    to: Space,
    addresses: Sequence[int],
    why: tuple[str, Certificate | None],
) -> int:
    """Copy a whole buffer into a new one of another space; the new one's number."""
    desc, (address,) = waiting_desc(buffer.desc, to), addresses
    new = state.allocate(to, address, state.size_of(desc), desc, buffer.origin)
    source, target = Instance(buffer.number, 0, buffer.desc), Instance(new, 0, desc)
    value = min(state.users[buffer.number])
    nbytes, seconds = copy_cost(state.machine, buffer.desc, desc)
    state.touch(buffer.number)
    state.steps.append(Copy(kind, value, value, source, target, nbytes, seconds, *why))
    return new


def _out_of_memory(
    state: Residency, demand: RoomDemand, problem: SpaceProblem, certificate: Certificate
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


def _least_change(state: Residency, demand: RoomDemand, problem: SpaceProblem) -> str:
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


# -- moving -------------------------------------------------------------------------------------


def _relocate(state: Residency, demand: RoomDemand, arrangement: Repacking) -> None:
    targets = dict(arrangement.moves)
    targets |= {
        number: address
        for number, address in demand.relocate.items()
        if state.buffers[number].address != address
    }
    if not targets:
        return

    def take_room(space: Space, size: int) -> int:
        staging = RoomDemand(space, f"a bounce for {demand.purpose}", set(state.locked))
        staging.floating.append((size, "staging"))
        (address,) = make_room(state, staging)
        state.claimed.append((space, address, size))
        return address

    step = relocation(state, demand.space, targets, demand.purpose, take_room)
    state.moved(targets)
    state.steps.append(step)

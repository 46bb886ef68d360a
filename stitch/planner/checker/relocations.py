"""Check moves: follow raw transfers by byte ranges, as memmove does, and bound their cost."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.machine import Machine, footprint
from stitch.planner.checker.proof import Defect, listed
from stitch.planner.checker.symbolic_memory import Inspection, gaps
from stitch.planner.plan import Certificate, CostCertificate, Relocate, Transfer
from stitch.program import Space

#: Source, target, bytes per bank.
Part = tuple[int, int, int]
Region = tuple[int, int]
#: Addresses from here on are outside the space.
OUTSIDE = 1 << 60
#: Ratio of piece sizes tried, and the least one in granules.
LADDER, LEAST_GRANULES = 0.8, 8
#: Holes narrower than a piece by these factors are widened.
NARROW = (1.0, 4.0)
#: Sets of whole tensors are tried with at most so many.
MOST_WHOLE = 8
#: Work limit, in comparisons of parts with free regions.
WORK_LIMIT = 2_000_000


class TransferCosts:
    """Simulated seconds of transfers inside a space and to the space beside; sizes are per bank."""

    def __init__(self, machine: Machine, space: Space = Space.L1, beside: Space = Space.DRAM):
        self._machine, self.space, self.beside = machine, space, beside
        self._banks = machine.shape.space(space).banks
        self._known: dict[tuple[Space, Space, int], float] = {}

    def inside(self, size: int) -> float:
        return self._seconds(self.space, self.space, size)

    def out(self, size: int) -> float:
        return self._seconds(self.space, self.beside, size)

    def back(self, size: int) -> float:
        return self._seconds(self.beside, self.space, size)

    def seconds(self, transfers: Iterable[Part]) -> float:
        return sum(
            self.out(size) if target >= OUTSIDE
            else self.back(size) if source >= OUTSIDE
            else self.inside(size)
            for source, target, size in transfers
        )  # fmt: skip

    def _seconds(self, source: Space, target: Space, size: int) -> float:
        key = source, target, size
        if key not in self._known:
            self._known[key] = self._machine.seconds(source, target, size * self._banks, size)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """An option to carry out moves: its transfers in order, and their seconds."""

    name: str
    seconds: float
    transfers: tuple[Part, ...]


def cheaper_inside(
    core: Sequence[Part], free: Sequence[Region], granule: int, curves: TransferCosts, most: float
) -> MoveSequence | None:
    """Search for moves inside the space that carry out cycles in less than `most` seconds.

    Raises TimeoutError at the work limit.

    >>> from stitch.machine import load_machine
    >>> curves = TransferCosts(load_machine("tiny"))
    >>> swap = [(0, 64, 64), (64, 0, 64)]
    >>> cheaper_inside(swap, [(128, 256)], 16, curves, 1.0).transfers
    ((0, 128, 64), (64, 0, 64), (128, 64, 64))
    >>> cheaper_inside(swap, [(128, 256)], 16, curves, 1e-9)
    """
    best: MoveSequence | None = None
    work = [WORK_LIMIT]
    few = core if len(core) <= MOST_WHOLE else ()
    for name, transfers in whole_tensors(few, free, away=False):
        seconds = curves.seconds(transfers)
        if seconds < most:
            best, most = MoveSequence(name, seconds, tuple(transfers)), seconds
    for size in ladder(core, granule):
        nbytes = sum(size for _, _, size in core)
        if nbytes / size * curves.inside(size) >= most:
            break
        for narrow in NARROW:
            done = by_pieces(core, (), free, size, narrow, curves, most, away=False, work=work)
            if done is not None:
                best = MoveSequence(f"pieces of {size} B", curves.seconds(done), tuple(done))
                most = best.seconds
    return best


def ladder(core: Sequence[Part], granule: int) -> Iterator[int]:
    """Yield piece sizes, from all bytes down."""
    piece = float(sum(size for _, _, size in core))
    while piece >= granule * LEAST_GRANULES:
        yield int(piece) // granule * granule
        piece *= LADDER


def whole_tensors(
    core: Sequence[Part], spare: Sequence[Region], *, away: bool
) -> Iterator[tuple[str, list[Part]]]:
    """Yield every set of whole tensors whose staging breaks all cycles (`away`: also outside)."""
    waits = [
        sum(1 << j for j, other in enumerate(core) if i != j and waits_for(move, other))
        for i, move in enumerate(core)
    ]
    for _, target, size in core:
        spare = without(spare, target, target + size)
    for aside in range(1, 1 << len(core)):
        left, going = (1 << len(core)) - 1 & ~aside, list[int]()
        while ready := [i for i, mask in enumerate(waits) if left >> i & 1 and not mask & left]:
            left &= ~(1 << ready[0])
            going.append(ready[0])
        if left:
            continue
        stays = [core[i] for i in going]
        chosen = [move for i, move in enumerate(core) if aside >> i & 1]
        for name, regions in (("inside", spare), ("outside", ()))[: 1 + away]:
            places = _places([size for _, _, size in chosen], regions)
            if not away and max(places) >= OUTSIDE:
                continue
            out = [(move[0], at, move[2]) for move, at in zip(chosen, places, strict=True)]
            home = [(at, move[1], move[2]) for move, at in zip(chosen, places, strict=True)]
            yield f"whole tensors set aside {name}", [*out, *stays, *home]


def waits_for(move: Part, other: Part) -> bool:
    """Whether the target of a move overlaps the source of another."""
    return move[1] < other[0] + other[2] and other[0] < move[1] + move[2]


def _places(sizes: Sequence[int], regions: Sequence[Region]) -> list[int]:
    """Return an address for each size: the largest first, in the smallest hole, or outside."""
    left, places = list(regions), [OUTSIDE * (i + 1) for i, _ in enumerate(sizes)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [region for region in left if region[1] - region[0] >= sizes[i]]
        if fitting:
            places[i] = min(fitting, key=lambda region: region[1] - region[0])[0]
            left = without(left, places[i], places[i] + sizes[i])
    return places


def by_pieces(
    core: Sequence[Part],
    after: Sequence[Part],
    free: Sequence[Region],
    piece: int,
    narrow: float,
    curves: TransferCosts,
    most: float,
    *,
    away: bool,
    work: list[int] | None = None,
) -> list[Part] | None:
    """Fill the widest hole repeatedly; None once that takes `most` seconds.

    If the widest hole is narrower than a piece by the factor `narrow`, bytes beside it are staged
    first, in free regions outside the targets or (`away`) outside the space. `work` holds the
    remaining work; raises TimeoutError if it is used up.
    """
    parts, free, seconds, done = list(core), list(free), 0.0, list[Part]()
    left = sum(size for _, _, size in parts)
    while parts:
        if work is not None:
            work[0] -= len(parts) * (len(free) + 4)
            if work[0] < 0:
                raise TimeoutError
        at, start, end = _widest(parts, free)
        width = end - start
        widened = width * narrow < piece
        if widened:
            spare = free
            for _, target, size in (*parts, *after):
                spare = without(spare, target, target + size)
            region = max(spare, key=lambda region: region[1] - region[0], default=(0, 0))
            if away:
                region = OUTSIDE * (1 + len(done)), OUTSIDE * (1 + len(done)) + piece
            wanted = min(piece - width, region[1] - region[0])
            low, high = _beside(parts, (start, end), wanted) if wanted else (0, 0)
            widened = low < high
        if widened:
            shift = region[0] - low
            parts = [
                (source + shift if low <= source < high else source, target, size)
                for part in parts
                for source, target, size in _cut(part, low, high)
            ]
            free = joined(free, low, high)
            free = without(free, region[0], region[0] + high - low)
            done.append((low, region[0], high - low))
        elif not width:
            return None
        else:
            source, target, size = parts.pop(at)
            parts += [(source, target, start - target)] if target < start else []
            parts += (
                [(source + end - target, end, target + size - end)] if end < target + size else []
            )
            shift = source - target
            if source < OUTSIDE:
                free = joined(free, start + shift, end + shift)
            free = without(free, start, end)
            left -= width
            done.append((start + shift, start, width))
        seconds += curves.seconds(done[-1:])
        # Lower bound: the rest in a single transfer.
        if seconds + (curves.inside(left) if left else 0.0) >= most:
            return None
    return done


def _widest(parts: Sequence[Part], free: Sequence[Region]) -> tuple[int, int, int]:
    """Return the widest free region of a target: (part, start, end).

    A part that overlaps only itself may be moved whole.
    """
    best = 0, 0, 0
    widest = 0
    for i, (source, target, size) in enumerate(parts):
        stop = target + size
        if size <= widest:
            continue
        if abs(source - target) < size:
            for start, end in joined(free, source, source + size):
                if start <= target and stop <= end:
                    best, widest = (i, target, stop), size
        for start, end in free:
            start, end = max(start, target), min(end, stop)
            if end - start > widest:
                best, widest = (i, start, end), end - start
    return best


def _beside(parts: Sequence[Part], hole: Region, size: int) -> Region:
    """Return at most `size` bytes beside a hole that are source and target, else a longest run."""
    lying = _union([(at, at + length) for at, _, length in parts if at < OUTSIDE])
    going = _union([(at, at + length) for _, at, length in parts])
    both = [(max(a, c), min(b, d)) for a, b in lying for c, d in going if a < d and c < b]
    for start, end in both:
        if start == hole[1]:
            return start, min(end, start + size)
    for start, end in both:
        if end == hole[0]:
            return max(start, end - size), end
    start, end = max(both, key=lambda region: region[1] - region[0], default=(0, 0))
    return start, min(end, start + size)


def _cut(part: Part, low: int, high: int) -> Iterator[Part]:
    """Split a part where its source crosses `low` or `high`."""
    source, target, size = part
    cuts = [source, *(at for at in (low, high) if source < at < source + size), source + size]
    for start, end in pairwise(cuts):
        yield start, target + start - source, end - start


def _union(regions: Sequence[Region]) -> list[Region]:
    apart: list[Region] = []
    for start, end in sorted(regions):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart


def without(regions: Sequence[Region], start: int, end: int) -> list[Region]:
    """Return regions minus one.

    >>> without([(0, 10), (20, 30)], 5, 25)
    [(0, 5), (25, 30)]
    """
    left: list[Region] = []
    for a, b in regions:
        if b <= start or end <= a:
            left.append((a, b))
            continue
        if a < start:
            left.append((a, start))
        if end < b:
            left.append((end, b))
    return left


def joined(regions: Sequence[Region], start: int, end: int) -> list[Region]:
    """Return regions plus one, merging adjacent ones.

    >>> joined([(0, 10), (20, 30)], 10, 15)
    [(0, 15), (20, 30)]
    """
    return _union([*regions, (start, end)])


#: Moves inside a space must be cheaper by this factor to refute a `cost` certificate.
LESS = 1.15


def check_relocation(run: Inspection, step: Relocate) -> None:
    """Follow the transfers of a relocation, and check its result, cost and certificate."""
    state, moving = run.state, dict(step.targets)
    if len(moving) != len(step.targets) or any(n not in state.buffers for n in moving):
        run.report("buffer", "a moved buffer is not alive, or listed twice")
        return
    before = {b: bytes_of(run, b) for b in state.buffers}
    shape = run.machine.shape
    own = sum(footprint(state.buffers[n].desc, shape).own_nbytes for n in moving)
    if step.nbytes != own:
        run.report("bytes", f"it claims {step.nbytes} B, the tensors have {own} B")
    carried = sum(
        run.machine.seconds(
            t.source_space, t.target_space, t.nbytes, t.nbytes // shape.space(step.space).banks
        )
        for t in step.transfers
    )
    run.check_seconds(step.seconds, carried)
    _stage(run, step)
    homes = [(b.address or 0, b.size_per_bank) for n, b in state.buffers.items() if n in moving]
    homes += [(a, state.buffers[n].size_per_bank) for n, a in moving.items()]
    for transfer in step.transfers:
        _transfer(run, step, transfer, homes)
    for number, address in step.targets:
        buffer = state.buffers[number]
        run.reads(number)
        if buffer.pinned or buffer.address is None or buffer.space is not step.space:
            run.report("pinned", f"{buffer.origin} cannot be moved")
        run.region(buffer.origin, step.space, address, buffer.size_per_bank)
        run.used.append((step.space, address, address + buffer.size_per_bank))
        state.set_address(number, address)
    for number in moving:
        buffer, stop = state.buffers[number], moving[number]
        others = state.live_in(buffer.space, stop, stop + buffer.size_per_bank)
        if len(others) > 1:
            run.report("overlap", f"{buffer.origin} is moved onto another buffer")
    for number, held in before.items():
        if not held <= bytes_of(run, number):
            run.report("content", f"{state.buffers[number].origin} is not complete after the moves")
    _erase_leftovers(run, step.space, homes)
    if step.stage is not None:
        _erase_leftovers(run, step.stage_space, [step.stage])


def bytes_of(run: Inspection, number: int) -> set[tuple[int, int, int, int]]:
    """Return the contents of a buffer, relative to its start."""
    place, start, end = run.state.span(run.state.buffers[number])
    return {p._replace(start=p.start - start, end=p.end - start)
            for p in run.state.memory(place).read(start, end)}  # fmt: skip


def _erase_leftovers(run: Inspection, space: Space, regions: list[tuple[int, int]]) -> None:
    """Erase what the moves left outside all buffers."""
    if space not in run.machine.shape.spaces:
        return
    banks, memory = run.machine.shape.space(space).banks, run.state.memory(space)
    buffers = run.state.live_in(space, 0, run.machine.shape.space(space).limit)
    live = sorted((b.address or 0, (b.address or 0) + b.size_per_bank) for b in buffers)
    for address, size in regions:
        for start, end in gaps(live, address, address + size):
            memory.erase(start * banks, end * banks)


def _stage(run: Inspection, step: Relocate) -> None:
    leaves = any(step.space is not s for t in step.transfers
                 for s in (t.source_space, t.target_space))  # fmt: skip
    if leaves and step.stage is None:
        run.report("stage", "bytes leave the space without a stage")
    if step.stage is not None:
        address, size = step.stage
        run.region("the stage", step.stage_space, address, size)
        if run.state.live_in(step.stage_space, address, address + size):
            run.report("stage", "the stage overlaps a live buffer")
        run.used.append((step.stage_space, address, address + size))
    if leaves:
        _justify(run, step, step.certificate)


def _justify(
    run: Inspection, step: Relocate, certificate: Certificate | CostCertificate | None
) -> None:
    shape = run.machine.shape.space(step.space)
    live = run.state.live_in(step.space, 0, shape.limit)
    free = shape.capacity - sum(buffer.size_per_bank for buffer in live)
    if certificate is None:
        run.report("uncertified", "bytes pass through another space without a certificate")
        return
    aside = [t.nbytes // shape.banks for t in step.transfers if t.target_space is not step.space]
    defect: str | None = None
    kind = "certificate"
    if certificate.kind == "no_path":
        if run.machine.path(step.space, step.space) is not None:
            defect = f"the machine has a path inside {step.space.value}"
        aside = [run.state.buffers[n].size_per_bank for n, _ in step.targets]
    elif isinstance(certificate, CostCertificate):
        kind, defect = _cost_defect(run, step, certificate, free) or (kind, None)
    elif certificate.kind != "cycle":
        defect = f"{certificate.kind!r} is no reason to bounce"
    elif free:
        defect = f"{free} B of {step.space.value} are free"
    else:
        defect = _amount_defect(run, step, sum(aside))
    if sorted(certificate.pieces) != sorted(aside):
        kind = "certificate"
        defect = f"it lists pieces {listed(certificate.pieces)}, expected {listed(aside)}"
    if isinstance(certificate, Certificate) and any(certificate.gaps):
        kind, defect = "certificate", f"it lists gaps {listed(certificate.gaps)}, but none is free"
    if defect is not None:
        run.report(kind, defect)
    staged = (step.stage or (0, 0))[1] * run.machine.shape.space(step.stage_space).banks
    if certificate.kind != "no_path" and step.bounced_nbytes > staged:
        run.report("certificate", f"{step.bounced_nbytes} B leave {step.space.value}, but "
                               f"{staged} B are staged")  # fmt: skip


def _amount_defect(run: Inspection, step: Relocate, aside: int) -> str | None:
    """Check how much of a full space is staged outside.

    One granule is enough. More is right if it is faster than moves of one granule each, plus one
    transfer inside for each further cycle of granules.
    """
    shape = run.machine.shape.space(step.space)
    width, banks = shape.granule, shape.banks
    nbytes, inside, through = _prices(run, step, width)
    for source, target in ((step.space, step.stage_space), (step.stage_space, step.space)):
        inside += run.machine.seconds(source, target, width * banks, width)
    if aside <= width or through <= inside:
        return None
    if run.machine.path(step.space, step.space) is not None:
        further = _cycles_of_granules(_moves(run, step), width) - 1
        inside += further * run.machine.seconds(step.space, step.space, width * banks, width)
        if through <= inside:
            return None
    return f"staging {aside} B of {nbytes} B takes {through} s, one granule {inside} s"


def _cost_defect(
    run: Inspection, step: Relocate, certificate: CostCertificate, free: int
) -> Defect | None:
    """Check a `cost` certificate: its figures, and that no moves inside are clearly cheaper."""
    granule = run.machine.shape.space(step.space).granule
    nbytes, _, through = _prices(run, step, granule)
    if (certificate.cyclic_size, certificate.free_size) != (nbytes, free):
        return "certificate", (
            f"it claims {certificate.cyclic_size} B in cycles and {certificate.free_size} B free, "
            f"expected {nbytes} B and {free} B"
        )
    if not free or run.machine.path(step.space, step.space) is None:
        return "certificate", "no moves inside the space are possible"
    if not math.isclose(certificate.through_seconds, through, rel_tol=1e-9):
        claimed = certificate.through_seconds
        return "certificate", f"it claims {claimed} s, the transfers take {through} s"
    moves = _moves(run, step)
    curves = TransferCosts(run.machine, step.space, step.stage_space)
    try:
        found = cheaper_inside(
            sorted(_on_cycles(moves)), _unused(run, step, moves), granule, curves, through / LESS
        )
    except TimeoutError:
        return "undecided", "the search for cheaper moves inside reached its limit"
    if found is None:
        return None
    return "certificate", f"{found.name} take {found.seconds} s inside, leaving takes {through} s"


def _unused(run: Inspection, step: Relocate, moves: list[Part]) -> list[tuple[int, int]]:
    """Return the regions unused before and after the moves."""
    shape = run.machine.shape.space(step.space)
    live = run.state.live_in(step.space, 0, shape.limit)
    taken = [(b.address or 0, (b.address or 0) + b.size_per_bank) for b in live]
    taken += [(target, target + size) for _, target, size in moves]
    return gaps(taken, shape.base, shape.limit)


def _prices(run: Inspection, step: Relocate, width: int) -> tuple[int, float, float]:
    """Return the bytes on cycles, a bound on seconds inside, and the seconds of their transfers."""
    moves, banks = _moves(run, step), run.machine.shape.space(step.space).banks
    cyclic = _on_cycles(moves)
    nbytes, inside = sum(size for _, _, size in cyclic), 0.0
    if width and run.machine.path(step.space, step.space) is not None:
        most = min(nbytes, width)
        inside = nbytes / width * run.machine.seconds(step.space, step.space, most * banks, most)
    whole = {(a, b, size * banks) for a, b, size in moves if (a, b, size) not in cyclic}
    through = sum(
        run.machine.seconds(t.source_space, t.target_space, t.nbytes, t.nbytes // banks)
        for t in step.transfers
        if (t.source_address, t.target_address, t.nbytes) not in whole
    )
    return nbytes, inside, through


def _moves(run: Inspection, step: Relocate) -> list[Part]:
    targets, buffers = dict(step.targets), run.state.buffers
    return [(b.address or 0, targets[n], b.size_per_bank)
            for n, b in buffers.items() if n in targets]  # fmt: skip


def _cycles_of_granules(moves: list[Part], width: int) -> int:
    """Count the cycles that the moves form, granule by granule."""
    follows = {
        source + at: target + at
        for source, target, size in moves
        for at in range(0, size, width)
        if source != target
    }
    count = 0
    while follows:
        start, at = follows.popitem()
        while at in follows:
            at = follows.pop(at)
        count += at == start
    return count


def _on_cycles(moves: list[Part]) -> set[Part]:
    """Return the moves on or between cycles; all if any overlap."""
    left = sorted(move for move in moves if move[0] != move[1])
    starts = [source for source, _, _ in left]
    waits: dict[Part, set[Part]] = {move: set() for move in left}
    awaited: dict[Part, set[Part]] = {move: set() for move in left}
    pairs = 0
    for move in left:
        first = bisect_right(starts, move[1]) - 1
        for other in left[max(0, first) : bisect_left(starts, move[1] + move[2])]:
            if other is not move and other[0] + other[2] > move[1]:
                waits[move].add(other)
                awaited[other].add(move)
                pairs += 1
        if pairs >= 2 * len(left):
            # Disjoint sources and targets have fewer pairs.
            return set(left)
    for ahead, behind in ((waits, awaited), (awaited, waits)):
        ready = [move for move in ahead if not ahead[move]]
        while ready:
            move = ready.pop()
            del ahead[move]
            for other in behind.pop(move):
                ahead[other].discard(move)
                if not ahead[other]:
                    ready.append(other)
    return set(waits)


def _transfer(run: Inspection, step: Relocate, t: Transfer, homes: list[tuple[int, int]]) -> None:
    inside = t.source_space is t.target_space
    if inside and run.machine.path(t.source_space, t.target_space) is None:
        run.report("transfer", f"the machine has no path inside {t.source_space.value}")
    ends = ((t.source_space, t.source_address), (t.target_space, t.target_address))
    for space, address in ends:
        if space not in run.machine.shape.spaces:
            run.report("transfer", f"the machine has no {space.value}")
            return
        size = -(-t.nbytes // run.machine.shape.space(space).banks)
        if not run.region("a transfer", space, address, size):
            return
        if space is step.space:
            continue
        stage = step.stage or (0, 0)
        if address < stage[0] or address + size > sum(stage) or space is not step.stage_space:
            run.report("stage", "a transfer leaves the stage")
    banks = run.machine.shape.space(t.source_space).banks
    read = run.state.memory(t.source_space).read(
        t.source_address * banks, t.source_address * banks + t.nbytes
    )
    banks_there = run.machine.shape.space(t.target_space).banks
    start = t.target_address * banks_there
    run.state.memory(t.target_space).put(
        read, start, start + t.nbytes, start - t.source_address * banks
    )
    if t.target_space is step.space:
        end = t.target_address + t.nbytes // banks_there
        run.used.append((step.space, t.target_address, end))
        homes.append((t.target_address, end - t.target_address))

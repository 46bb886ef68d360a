"""The check of moves: raw transfers are followed byte range by byte range, as memmove does."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from stitch.machine import footprint
from stitch.planner.certificate import Certificate, CostCertificate
from stitch.planner.checker.byte_map import ByteMap
from stitch.planner.checker.exchanges import Curves, cheaper_inside
from stitch.planner.checker.inspection import Inspection
from stitch.planner.checker.proof import Defect, listed
from stitch.planner.plan import Relocate, Transfer
from stitch.program import Space

#: By what factor moves inside a space must take less, to be a reason against leaving it.
LESS = 1.15
#: Source, target, bytes per bank.
_Shift = tuple[int, int, int]


def check_relocation(run: Inspection, step: Relocate) -> None:
    symbolic_memory, moving = run.symbolic_memory, dict(step.targets)
    if len(moving) != len(step.targets) or any(n not in symbolic_memory.buffers for n in moving):
        run.say("buffer", "a buffer that is not alive, or one twice, is moved")
        return
    before = {b: bytes_of(run, b) for b in symbolic_memory.buffers}
    shape = run.machine.shape
    own = sum(footprint(symbolic_memory.buffers[n].desc, shape).own_nbytes for n in moving)
    if step.nbytes != own:
        run.say("bytes", f"{step.nbytes} B are claimed, the tensors have {own} B")
    carried = sum(
        run.machine.seconds(
            t.source_space, t.target_space, t.nbytes, t.nbytes // shape.space(step.space).banks
        )
        for t in step.transfers
    )
    run.check_seconds(step.seconds, carried)
    _stage(run, step)
    homes = [
        (b.address or 0, b.size_per_bank) for n, b in symbolic_memory.buffers.items() if n in moving
    ]
    homes += [(a, symbolic_memory.buffers[n].size_per_bank) for n, a in moving.items()]
    for transfer in step.transfers:
        _transfer(run, step, transfer, homes)
    for number, address in step.targets:
        buffer = symbolic_memory.buffers[number]
        run.reads(number)
        if buffer.pinned or buffer.address is None or buffer.space is not step.space:
            run.say("pinned", f"{buffer.origin} cannot move")
        run.region(buffer.origin, step.space, address, buffer.size_per_bank)
        run.used.append((step.space, address, address + buffer.size_per_bank))
        symbolic_memory.place_at(number, address)
    for number in moving:
        buffer, stop = symbolic_memory.buffers[number], moving[number]
        others = symbolic_memory.live_in(buffer.space, stop, stop + buffer.size_per_bank)
        if len(others) > 1:
            run.say("overlap", f"{buffer.origin} is moved onto another buffer")
    for number, held in before.items():
        if not held <= bytes_of(run, number):
            run.say(
                "content", f"{symbolic_memory.buffers[number].origin} is not whole after the moves"
            )
    _tidy(run, step.space, homes)
    if step.stage is not None:
        _tidy(run, step.stage_space, [step.stage])


def bytes_of(run: Inspection, number: int) -> set[tuple[int, int, int, int]]:
    """What a buffer holds, counted from its own start."""
    place, start, end = run.symbolic_memory.span(run.symbolic_memory.buffers[number])
    return {p._replace(start=p.start - start, end=p.end - start)
            for p in run.symbolic_memory.memory(place).read(start, end)}  # fmt: skip


def _tidy(run: Inspection, space: Space, regions: list[tuple[int, int]]) -> None:
    """What was left behind outside all buffers is garbage."""
    if space not in run.machine.shape.spaces:
        return
    banks, memory = run.machine.shape.space(space).banks, run.symbolic_memory.memory(space)
    buffers = run.symbolic_memory.live_in(space, 0, run.machine.shape.space(space).limit)
    kept = sorted((b.address or 0, b.size_per_bank) for b in buffers)
    for address, size in regions:
        at, end = address, address + size
        for start, length in kept:
            if at < start < end:
                memory.erase(at * banks, start * banks)
            if start < end:
                at = max(at, start + length)
        if at < end:
            memory.erase(at * banks, end * banks)


def _stage(run: Inspection, step: Relocate) -> None:
    leaves = any(step.space is not s for t in step.transfers
                 for s in (t.source_space, t.target_space))  # fmt: skip
    if leaves and step.stage is None:
        run.say("stage", "bytes leave the space and no stage is declared")
    if step.stage is not None:
        address, size = step.stage
        run.region("the stage", step.stage_space, address, size)
        if run.symbolic_memory.live_in(step.stage_space, address, address + size):
            run.say("stage", "the stage overlaps a live buffer")
        run.used.append((step.stage_space, address, address + size))
    if leaves:
        _justify(run, step, step.certificate)


def _justify(
    run: Inspection, step: Relocate, certificate: Certificate | CostCertificate | None
) -> None:
    shape = run.machine.shape.space(step.space)
    live = run.symbolic_memory.live_in(step.space, 0, shape.limit)
    free = shape.capacity - sum(buffer.size_per_bank for buffer in live)
    if certificate is None:
        run.say("uncertified", "bytes pass through another space without a certificate")
        return
    aside = [t.nbytes // shape.banks for t in step.transfers if t.target_space is not step.space]
    moved = [run.symbolic_memory.buffers[n].size_per_bank for n, _ in step.targets]
    defect: str | None = None
    kind = "certificate"
    if certificate.kind == "no_path":
        if run.machine.path(step.space, step.space) is not None:
            defect = f"the machine has a path inside {step.space.value}"
        aside = moved
    elif isinstance(certificate, CostCertificate):
        kind, defect = _cost_defect(run, step, certificate, free) or (kind, None)
    elif certificate.kind != "cycle":
        defect = f"{certificate.kind!r} is no reason to bounce"
    elif free:
        defect = f"{free} B of {step.space.value} are free"
    else:
        defect = _amount_defect(run, step, sum(aside))
    # Records of old name what moves, or nothing, where now is said what is set aside.
    if not certificate.pieces and defect is None:
        run.say("undecided", "it says nothing of the pieces that pass through another space")
    elif sorted(certificate.pieces) not in (sorted(aside), sorted(moved)):
        kind = "certificate"
        defect = f"it speaks of pieces {listed(certificate.pieces)}, there are {listed(aside)}"
    if isinstance(certificate, Certificate) and any(certificate.gaps):
        kind, defect = "certificate", f"it speaks of gaps {listed(certificate.gaps)}, none is free"
    if defect is not None:
        run.say(kind, defect)
    room = (step.stage or (0, 0))[1] * run.machine.shape.space(step.stage_space).banks
    if certificate.kind != "no_path" and step.bounced_nbytes > room:
        run.say("certificate", f"{step.bounced_nbytes} B leave {step.space.value}, not once "
                               f"the {room} B that are set aside")  # fmt: skip


def _amount_defect(run: Inspection, step: Relocate, aside: int) -> str | None:
    """What is wrong with how much of a full space is set aside; None where it is right.

    One granule would do. More is right where it takes less time than moves of a granule take: one
    for each, and one more for each cycle of granules but the first, which gives way by the other
    space.
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
    return f"{aside} B of {nbytes} B leave in {through} s, one granule would in {inside} s"


def _cost_defect(
    run: Inspection, step: Relocate, certificate: CostCertificate, free: int
) -> Defect | None:
    """What is wrong with leaving a space because that is cheaper; None where it is right.

    What leaving takes is counted; moves inside that take clearly less (`LESS`) are searched for.
    """
    granule = run.machine.shape.space(step.space).granule
    nbytes, _, through = _prices(run, step, granule)
    if (certificate.cyclic_size, certificate.free_size) != (nbytes, free):
        return "certificate", (
            f"it speaks of {certificate.cyclic_size} B in cycles and {certificate.free_size} B "
            f"free, there are {nbytes} B and {free} B"
        )
    if not free or run.machine.path(step.space, step.space) is None:
        return "certificate", "there are no moves inside the space that could be cheaper"
    if not math.isclose(certificate.through_seconds, through, rel_tol=1e-9):
        claimed = certificate.through_seconds
        return "certificate", f"it claims {claimed} s through, they are {through} s"
    moves = _moves(run, step)
    curves = Curves(run.machine, step.space, step.stage_space)
    try:
        way = cheaper_inside(
            sorted(_on_cycles(moves)), _unused(run, step, moves), granule, curves, through / LESS
        )
    except TimeoutError:
        return "undecided", "whether moves inside take less is too much work to tell"
    if way is None:
        return None
    return "certificate", f"{way.name} take {way.seconds} s inside, leaving takes {through} s"


def _unused(run: Inspection, step: Relocate, moves: list[_Shift]) -> list[tuple[int, int]]:
    """What nothing uses before the moves nor after them, and no move of its own in between."""
    shape = run.machine.shape.space(step.space)
    taken = ByteMap()
    for buffer in run.symbolic_memory.live_in(step.space, 0, shape.limit):
        taken.write(buffer.address or 0, (buffer.address or 0) + buffer.size_per_bank, 0)
    for _, target, size in moves:
        taken.write(target, target + size, 0)
    edges = [shape.base, *(x for p in taken.read(shape.base, shape.limit) for x in p[:2]),
             shape.limit]  # fmt: skip
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _prices(run: Inspection, step: Relocate, width: int) -> tuple[int, float, float]:
    """Bytes per bank on cycles, the least seconds of moves inside that fill `width` at a time, and
    the seconds of the transfers that carry out the cycles."""
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


def _moves(run: Inspection, step: Relocate) -> list[_Shift]:
    targets, buffers = dict(step.targets), run.symbolic_memory.buffers
    return [(b.address or 0, targets[n], b.size_per_bank)
            for n, b in buffers.items() if n in targets]  # fmt: skip


def _cycles_of_granules(moves: list[_Shift], width: int) -> int:
    """How many cycles the moves form, each granule taken by itself."""
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


def _on_cycles(moves: list[_Shift]) -> set[_Shift]:
    """The moves that wait, over others, for moves that wait for them; all, where any overlap."""
    left = sorted(move for move in moves if move[0] != move[1])
    starts = [source for source, _, _ in left]
    waits: dict[_Shift, set[_Shift]] = {move: set() for move in left}
    awaited: dict[_Shift, set[_Shift]] = {move: set() for move in left}
    pairs = 0
    for move in left:
        first = bisect_right(starts, move[1]) - 1
        for other in left[max(0, first) : bisect_left(starts, move[1] + move[2])]:
            if other is not move and other[0] + other[2] > move[1]:
                waits[move].add(other)
                awaited[other].add(move)
                pairs += 1
        if pairs >= 2 * len(left):
            # Disjoint sources and disjoint targets have fewer.
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
        run.say("transfer", f"the machine has no path inside {t.source_space.value}")
    ends = ((t.source_space, t.source_address), (t.target_space, t.target_address))
    for space, address in ends:
        if space not in run.machine.shape.spaces:
            run.say("transfer", f"the machine has no {space.value}")
            return
        size = -(-t.nbytes // run.machine.shape.space(space).banks)
        if not run.region("a transfer", space, address, size):
            return
        if space is step.space:
            continue
        stage = step.stage or (0, 0)
        if address < stage[0] or address + size > sum(stage) or space is not step.stage_space:
            run.say("stage", "a transfer goes beside the stage")
    banks = run.machine.shape.space(t.source_space).banks
    read = run.symbolic_memory.memory(t.source_space).read(
        t.source_address * banks, t.source_address * banks + t.nbytes
    )
    banks_there = run.machine.shape.space(t.target_space).banks
    start = t.target_address * banks_there
    run.symbolic_memory.memory(t.target_space).put(
        read, start, start + t.nbytes, start - t.source_address * banks
    )
    if t.target_space is step.space:
        end = t.target_address + t.nbytes // banks_there
        run.used.append((step.space, t.target_address, end))
        homes.append((t.target_address, end - t.target_address))

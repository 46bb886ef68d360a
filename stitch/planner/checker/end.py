"""The end of a plan's check: what it leaves behind, and what it says that it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stitch.planner.checker.byte_map import ByteMap
from stitch.planner.checker.symbolic_memory import SymbolicMemory
from stitch.planner.plan import Buffer, Plan, PlanRequest
from stitch.program import Space

Found = tuple[str, str]
Region = tuple[Space, int, int]


def end_problems(
    plan: Plan, symbolic_memory: SymbolicMemory, read: frozenset[int], used: Sequence[Region]
) -> Iterator[Found]:
    """(kind, detail) of every disagreement between a plan's claims and its steps.

    `read`: resident buffers that steps read, moved or freed. `used`: regions (space, start, end)
    that steps took, in bytes per bank.
    """
    yield from _final_buffers(plan, symbolic_memory)
    yield from _final_values(plan, symbolic_memory)
    yield from _kept(plan, symbolic_memory)
    yield from _free_regions(plan, used)
    yield from _later(plan.request)
    if not 0 <= plan.least_seconds <= plan.seconds * (1 + 1e-9):
        least, taken = plan.least_seconds * 1e6, plan.seconds * 1e6
        yield "bound", f"{least:g} us are claimed to be the least, and this plan takes {taken:g} us"
    if plan.fewest_bytes is not None:
        nbytes, seconds = plan.fewest_bytes
        if not (0 <= nbytes < plan.carried_nbytes and seconds >= plan.seconds):
            yield (
                "bound",
                (
                    f"a plan of {nbytes} B in {seconds * 1e6:g} us is no trade for this one's "
                    f"{plan.carried_nbytes} B in {plan.seconds * 1e6:g} us"
                ),
            )
    for number in sorted(read - plan.touched):
        yield "touched", f"resident buffer {number} is used and not listed"
    for number in sorted(plan.touched - {b.number for b in plan.request.buffers}):
        yield "touched", f"buffer {number} is listed and no resident"


def _final_buffers(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    said = {b.number: b for b in plan.final_buffers}
    in_spaces = {n: b for n, b in symbolic_memory.buffers.items() if b.address is not None}
    for number in sorted({n for n, b in said.items() if b.address is not None} | set(in_spaces)):
        ends, wanted = in_spaces.get(number), said.get(number)
        if ends is not wanted and _nameless(ends) != _nameless(wanted):
            yield "final", f"buffer {number} ends as {_nameless(ends)}, not {_nameless(wanted)}"
    held = {i.buffer for r in plan.final_values for i in r.instances}
    held |= {b.number for b in plan.request.buffers if b.pinned}
    # What no value used when the plan began is not the plan's to explain.
    began = {i.buffer for r in plan.request.residents for i in r.instances}
    held |= {b.number for b in plan.request.buffers} - began
    for number in sorted(set(said) - held):
        yield "final", f"buffer {number} stays alive and holds no value"


def _nameless(buffer: Buffer | None) -> Buffer | None:
    return None if buffer is None else replace(buffer, origin="")


def _final_values(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    for resident in plan.final_values:
        if not resident.instances:
            yield "final", f"value {resident.value} is said to be alive and lies nowhere"
            continue
        for instance in resident.instances:
            if not symbolic_memory.holds(instance, resident.value):
                where = f"buffer {instance.buffer} as {instance.desc.text()}"
                yield "final", f"value {resident.value} does not lie in {where}"
        primary = resident.instances[0].desc.layout.data_type
        if primary is not symbolic_memory.made_in.get(resident.value):
            yield "lossy", f"the primary instance of value {resident.value} lost precision"


def _kept(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    request = plan.request
    known = {r.value for r in request.residents if r.instances}
    known |= {v for task in request.tasks for v in task.outputs}
    final = {r.value: r.instances for r in plan.final_values}
    for value in sorted(request.kept & known):
        whole = [
            i
            for i in final.get(value, ())
            if i.desc.layout.data_type is symbolic_memory.made_in[value]
            and symbolic_memory.holds(i, value)
        ]
        if not whole:
            yield "kept", f"value {value} must survive and does not"


def _later(request: PlanRequest) -> Iterator[Found]:
    """The first prediction that cannot be one for this request; whether it comes true, nobody
    knows."""
    known = {r.value for r in request.residents}.union(*(task.outputs for task in request.tasks))
    end, before = len(request.tasks), -1
    for value, use in request.later:
        if value not in request.kept or value not in known:
            yield "later", f"value {value} is predicted to be read, and no such value lives on"
        elif value <= before:
            yield "later", f"a use of value {value} is predicted behind one of value {before}"
        elif use < end:
            yield "later", f"value {value} is predicted to be read by task {use}, before task {end}"
        else:
            before = value
            continue
        return


def _free_regions(plan: Plan, used: Sequence[Region]) -> Iterator[Found]:
    starts = [b for b in plan.request.buffers if b.address is not None]
    declared: dict[Space, ByteMap] = {}
    for space, address, size in plan.free_regions:
        declared.setdefault(space, ByteMap()).write(address, address + size, 0)
        for buffer in starts:
            at = buffer.address or 0
            if (
                buffer.space is space
                and at < address + size
                and address < at + buffer.size_per_bank
            ):
                yield "free_region", f"{buffer.origin} lies where the plan wants nothing"
    taken: dict[Space, ByteMap] = {}
    for space, start, end in used:
        taken.setdefault(space, ByteMap()).write(start, end, 0)
    for space in plan.request.machine.shape.spaces:
        yield from _compare(plan, space, declared.get(space), taken.get(space))


def _compare(
    plan: Plan, space: Space, declared: ByteMap | None, taken: ByteMap | None
) -> Iterator[Found]:
    limit = plan.request.machine.shape.space(space).limit
    needed, said = ByteMap(), declared or ByteMap()
    for piece in (taken or ByteMap()).read(0, limit):
        needed.write(piece.start, piece.end, 0)
    for buffer in plan.request.buffers:
        if buffer.space is space and buffer.address is not None and buffer.number in plan.touched:
            needed.erase(buffer.address, buffer.address + buffer.size_per_bank)
    for piece in said.read(0, limit):
        needed_here = sum(p.end - p.start for p in needed.read(piece.start, piece.end))
        if needed_here != piece.end - piece.start:
            yield "free_region", f"{space.value} [{piece.start:#x}, {piece.end:#x}) is not needed"
    for piece in needed.read(0, limit):
        if sum(p.end - p.start for p in said.read(piece.start, piece.end)) != piece.end - (
            piece.start
        ):
            yield "free_region", f"{space.value} [{piece.start:#x}, {piece.end:#x}) is not declared"

"""What an eviction must be justified by: everything that had to lie in the space at that moment.

Found in the steps themselves: the buffers alive, and what is about to be put beside them.
"""

from __future__ import annotations

from itertools import islice, pairwise

from stitch.planner.certificate import Certificate
from stitch.planner.checker.byte_map import ByteMap
from stitch.planner.checker.inspection import Inspection
from stitch.planner.checker.proof import certificate_defect
from stitch.planner.plan import Allocate, Buffer, Copy, Execute, Free, Relocate
from stitch.program import Space


def eviction_defect(
    run: Inspection, buffer: Buffer, certificate: Certificate
) -> tuple[str, str] | None:
    """What is wrong with the certificate of an eviction that is due; None where it is confirmed.

    All that leave a space for one need are justified at once: with this one in its place, and the
    others gone, there must be no room.
    """
    pieces, gaps = _wanted_in(run, buffer.space)
    others = _leaving_with(run, buffer)
    before = sorted(pieces)
    for other in others:
        pieces.remove(other)
    if others and sorted(certificate.pieces) == before:
        # So it was said of old: one of them had to go.
        return "undecided", f"{len(others) + 1} leave {buffer.space.value}; whether all had to"
    return certificate_defect(certificate, pieces, gaps)


def _leaving_with(run: Inspection, buffer: Buffer) -> list[int]:
    """The sizes of what leaves a space after this buffer, before anything else happens there."""
    there = {
        n: b.size_per_bank
        for n, b in run.symbolic_memory.buffers.items()
        if b.space is buffer.space and not b.pinned and b is not buffer
    }
    sizes: list[int] = []
    for step in islice(run.plan.steps, run.index + 1, None):
        if isinstance(step, Free) and step.buffer in there:
            sizes.append(there.pop(step.buffer))
        elif (
            isinstance(step, Execute)
            or (isinstance(step, Allocate) and step.buffer.space is buffer.space)
            or (isinstance(step, Relocate) and buffer.space in (step.space, step.stage_space))
            or (isinstance(step, Copy) and step.made != step.value)
        ):
            break
    return sizes


def _wanted_in(run: Inspection, space: Space) -> tuple[list[int], list[int]]:
    """The pieces that are wanted in a space beside what is there, and the gaps.

    Wanted is what comes next: what comes into the space whole, or bounces through it, or else all
    that the coming task is given there.
    """
    shape = run.machine.shape.space(space)
    buffers = [b for b in run.symbolic_memory.buffers.values() if b.space is space]
    pieces: list[int] = []
    fixed: dict[int, int] = {}
    stuck: list[tuple[int, int]] = []
    passing = _passing(run, space)
    if passing is None:
        allocated, fixed, stuck = _given(run, space)
        buffers += [step.buffer for step in allocated]
    else:
        pieces.append(passing)
    pieces += [b.size_per_bank for b in buffers if not b.pinned and b.number not in fixed]
    stuck += [
        (fixed.get(b.number, b.address or 0), b.size_per_bank)
        for b in buffers
        if b.number in fixed or b.pinned
    ]
    taken = ByteMap()
    for address, size in stuck:
        taken.write(address, address + size, 0)
    edges = [shape.base, *(x for p in taken.read(shape.base, shape.limit) for x in p[:2]),
             shape.limit]  # fmt: skip
    return pieces, [b - a for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _passing(run: Inspection, space: Space) -> int | None:
    """Bytes per bank of what comes from another space next, None where a task is next."""
    for step, after in pairwise(islice(run.plan.steps, run.index + 1, None)):
        if isinstance(step, Allocate) and step.buffer.space is space:
            is_carried = isinstance(after, Copy) and after.kind == "evict"
            return step.buffer.size_per_bank if is_carried else None
        if isinstance(step, Relocate) and step.space is not space and step.stage is not None:
            return step.stage[1] if step.stage_space is space else None
        if isinstance(step, Execute):
            return None
    return None


def _given(
    run: Inspection, space: Space
) -> tuple[list[Allocate], dict[int, int], list[tuple[int, int]]]:
    """What the coming task is given in a space: new buffers, addresses that it asks for, scratch
    at a promised place."""
    allocated: list[Allocate] = []
    tasks = run.plan.request.tasks
    fixed: dict[int, int] = {}
    stuck: list[tuple[int, int]] = []
    for step in islice(run.plan.steps, run.index + 1, None):
        if isinstance(step, Allocate) and step.buffer.space is space:
            allocated.append(step)
        elif isinstance(step, Copy) and step.made != step.value:
            for task in tasks[run.next_task : run.next_task + 1]:
                address = task.transformation.outputs[0].layout.address
                if address is not None:
                    fixed[step.target.buffer] = address
            break
        elif isinstance(step, Execute) and step.task < len(tasks):
            asked = tasks[step.task].transformation
            for instance, desc in (
                *zip(step.inputs, asked.inputs, strict=False),
                *zip(step.outputs, asked.outputs, strict=False),
            ):
                if desc.layout.address is not None:
                    fixed[instance.buffer] = desc.layout.address
            if step.scratch is not None and step.scratch[0] is space is Space.L1:
                stuck.append(step.scratch[1:])
            break
    return allocated, fixed, stuck

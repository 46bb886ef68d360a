"""What an eviction must be justified by: everything that had to lie in L1 at that moment.

Found in the steps themselves: the buffers alive, and what the coming task is about to be given.
"""

from __future__ import annotations

from stitch.planner.checker.byte_map import ByteMap
from stitch.planner.checker.inspection import Inspection
from stitch.planner.plan import Allocate, Copy, Execute
from stitch.program import Space


def wanted_in_l1(run: Inspection) -> tuple[list[int], list[int]]:
    """The pieces that the coming task wants in L1 beside what is there, and the gaps."""
    shape = run.machine.shape.space(Space.L1)
    allocated: list[Allocate] = []
    tasks = run.plan.request.tasks
    fixed: dict[int, int] = {}
    stuck: list[tuple[int, int]] = []
    for step in run.plan.steps[run.index + 1 :]:
        if isinstance(step, Allocate) and step.buffer.space is Space.L1:
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
            if step.scratch is not None and step.scratch[0] is Space.L1:
                stuck.append(step.scratch[1:])
            break
    buffers = [b for b in run.symbolic_memory.buffers.values() if b.space is Space.L1]
    pieces = [b.size_per_bank for b in buffers if not b.pinned and b.number not in fixed]
    pieces += [s.buffer.size_per_bank for s in allocated if s.buffer.number not in fixed]
    stuck += [
        (fixed.get(b.number, b.address or 0), b.size_per_bank)
        for b in (*buffers, *(s.buffer for s in allocated))
        if b.number in fixed or b.pinned
    ]
    taken = ByteMap()
    for address, size in stuck:
        taken.write(address, address + size, 0)
    edges = [shape.base, *(x for p in taken.read(shape.base, shape.limit) for x in p[:2]),
             shape.limit]  # fmt: skip
    return pieces, [b - a for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]

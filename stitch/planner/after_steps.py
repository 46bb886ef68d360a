"""What a plan leaves behind, also when it stops half-way."""

from __future__ import annotations

from dataclasses import replace

from stitch.planner.plan import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    waiting_desc,
)

Values = dict[int, list[Instance]]


def after_steps(plan: Plan, steps_done: int) -> tuple[dict[int, Buffer], Values]:
    """The buffers, and the instances of each value, after the first `steps_done` steps.

    Values are listed while a buffer of theirs is alive; whether a handle can still read them is
    not looked at (a dead value that shares its buffer is listed).
    """
    buffers = {buffer.number: buffer for buffer in plan.request.buffers}
    values: Values = {r.value: list(r.instances) for r in plan.request.residents}
    for step in plan.steps[:steps_done]:
        if isinstance(step, Allocate):
            buffers[step.buffer.number] = step.buffer
        elif isinstance(step, Free):
            del buffers[step.buffer]
            _forget(values, step.buffer)
        elif isinstance(step, Copy):
            _copy(step, plan, buffers, values)
        elif isinstance(step, Relocate):
            for buffer, address in step.targets:
                buffers[buffer] = replace(buffers[buffer], address=address)
        else:
            _execute(step, plan, values)
    return buffers, values


def _forget(values: Values, buffer: int) -> None:
    for value in list(values):
        left = [i for i in values[value] if i.buffer != buffer]
        if left:
            values[value] = left
        else:
            del values[value]


def _copy(step: Copy, plan: Plan, buffers: dict[int, Buffer], values: Values) -> None:
    if step.kind == "copy":
        values.setdefault(step.made, []).append(step.target)
        return
    space = step.target.desc.layout.space
    for value, instances in values.items():
        kept = [] if step.kind == "evict" else instances
        carried = [
            replace(i, buffer=step.target.buffer, desc=waiting_desc(i.desc, space))
            if i.buffer == step.source.buffer
            else i
            for i in instances
        ]
        values[value] = [*kept, *(i for i in carried if i not in kept)]


def _execute(step: Execute, plan: Plan, values: Values) -> None:
    written = plan.request.tasks[step.task].outputs
    for instance in step.outputs:
        # A donated input whose buffer an output took is gone with this step.
        _forget(values, instance.buffer)
    for value, instance in zip(written, step.outputs, strict=True):
        values.setdefault(value, []).append(instance)

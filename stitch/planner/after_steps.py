"""What a plan leaves behind, also when it stops half-way."""

from __future__ import annotations

from dataclasses import replace

from stitch.planner.plan import (
    Allocate,
    Block,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    waiting_desc,
)

Values = dict[int, list[Instance]]


def after_steps(plan: Plan, steps_done: int) -> tuple[dict[int, Block], Values]:
    """The blocks, and the instances of each value, after the first `steps_done` steps.

    Values are listed while a block of theirs is alive; that somebody can still read them is not
    looked at (a dead value that shares its block is listed).
    """
    blocks = {block.number: block for block in plan.request.blocks}
    values: Values = {r.value: list(r.instances) for r in plan.request.residents}
    for step in plan.steps[:steps_done]:
        if isinstance(step, Allocate):
            blocks[step.block.number] = step.block
        elif isinstance(step, Free):
            del blocks[step.block]
            _forget(values, step.block)
        elif isinstance(step, Copy):
            _copy(step, plan, blocks, values)
        elif isinstance(step, Relocate):
            for block, address in step.targets:
                blocks[block] = replace(blocks[block], address=address)
        else:
            _execute(step, plan, values)
    return blocks, values


def _forget(values: Values, block: int) -> None:
    for value in list(values):
        left = [i for i in values[value] if i.block != block]
        if left:
            values[value] = left
        else:
            del values[value]


def _copy(step: Copy, plan: Plan, blocks: dict[int, Block], values: Values) -> None:
    if step.kind == "copy":
        values.setdefault(step.made, []).append(step.target)
        return
    for value, instances in values.items():
        values[value] = [
            replace(i, block=step.target.block, desc=waiting_desc(i.desc))
            if i.block == step.source.block
            else i
            for i in instances
        ]


def _execute(step: Execute, plan: Plan, values: Values) -> None:
    made = plan.request.tasks[step.task].outputs
    for instance in step.outputs:
        # A donated input whose buffer an output took is gone with this step.
        _forget(values, instance.block)
    for value, instance in zip(made, step.outputs, strict=True):
        values.setdefault(value, []).append(instance)

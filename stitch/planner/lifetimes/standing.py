"""StaticLayout: where a plan's tensors are made, and to where they move, such that most of them
stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stitch.planner.lifetimes.layouts import search
from stitch.planner.lifetimes.lives import lives_in
from stitch.planner.plan import Allocate, Free, Plan, Relocate
from stitch.program import Space


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """Addresses in a space, chosen with all lifetimes in view.

    `allocations`: by task and the how manieth of its buffers there it is. `moves`: by task, the
    (buffer, from, to) that move before it.
    """

    space: Space
    allocations: Mapping[tuple[int, int], int]
    moves: Mapping[int, Sequence[tuple[int, int, int]]]


def standing_for(plan: Plan) -> StaticLayout | None:
    """Where the tensors of a plan had better lie; None where what moves in it moves no less."""
    if not _may_stand(plan):
        return None
    lives = lives_in(plan, Space.L1)
    layouts = search(lives)
    if layouts is None:
        return None
    allocations, moves = {}, {}
    for i, life in enumerate(lives.lives):
        if life.made is not None:
            allocations[life.made] = layouts[life.first][i]
    before = {i: life.before for i, life in enumerate(lives.lives) if life.before is not None}
    for task, last, layout in zip(lives.begins, (before, *layouts), layouts, strict=False):
        moved = [
            (lives.lives[i].number, was, now)
            for i, now in layout.items()
            if (was := last.get(i, now)) != now
        ]
        if moved:
            moves[task] = tuple(moved)
    return StaticLayout(Space.L1, allocations, moves)


def _may_stand(plan: Plan) -> bool:
    """Whether something moves in L1 after something that the plan has made there is gone: else
    lifetimes say nothing that was not known."""
    made, gone = set(), False
    for step in plan.steps:
        if isinstance(step, Allocate) and step.buffer.space is Space.L1:
            made.add(step.buffer.number)
        elif isinstance(step, Free) and step.buffer in made:
            gone = True
        elif gone and isinstance(step, Relocate) and step.space is Space.L1:
            return True
    return False

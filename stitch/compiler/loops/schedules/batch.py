"""`batch`: a loop without states is one computation for all its rounds, by the operators' batching
rules; an operator without one is a loop of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.compiler.loops.lanes import elements_in_order, in_lanes, results_in_order
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import lift


def batch(loop: Loop, around: Surroundings) -> Candidate | None:
    """None for loops with states."""
    body, form = loop.body, loop.form
    if form.states:
        return None

    def write(builder: Any, operands: Sequence[Any]) -> WrittenLoop:
        ordered = elements_in_order(builder, form, operands)
        shared = operands[form.sequences :]
        flags = [*[True] * len(ordered), *[False] * len(shared)]
        lifted = lift(body, [*ordered, *shared], flags, form.count, builder, around.written)
        results = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in lifted.results]
        return WrittenLoop(
            tuple(results_in_order(builder, form, results)),
            tuple(sorted({o.op for o in lifted.without_rule if o.body < 0})),
        )

    takes = body.inputs[: form.sequences]
    return Candidate(around.estimate.round(body, form.count, takes, loop.fixed), write)

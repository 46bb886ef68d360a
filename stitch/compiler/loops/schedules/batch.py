"""`batch`: a loop without states is one computation for all its rounds, by the operators' batching
rules; an operator without one is a loop of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.compiler.loops.lanes import from_last_to_first, in_lanes
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import lift


def batch(loop: Loop, around: Surroundings) -> Candidate | None:
    """None for loops with states."""
    body, form = loop.body, loop.form
    if form.states:
        return None

    def write(builder: Any, operands: Sequence[Any]) -> WrittenLoop:
        sequences, shared = operands[: form.sequences], operands[form.sequences :]
        ordered = [
            from_last_to_first(builder, s) if back else s
            for s, back in zip(sequences, form.taken_backward, strict=True)
        ]
        flags = [*[True] * len(ordered), *[False] * len(shared)]
        lifted = lift(body, [*ordered, *shared], flags, form.count, builder, around.written)
        results = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in lifted.results]
        return WrittenLoop(
            tuple(
                from_last_to_first(builder, r) if back else r
                for r, back in zip(results, form.given_backward, strict=True)
            ),
            tuple(sorted({o.op for o in lifted.without_rule if o.body < 0})),
        )

    takes = body.inputs[: form.sequences]
    return Candidate(around.estimate.round(body, form.count, takes, loop.fixed), write)

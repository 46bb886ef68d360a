"""`hoisted`: what does not read the states is computed before the loop, for all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.compiler.loops.hoisting import Hoisted, hoisted, hoisted_form
from stitch.compiler.loops.lanes import from_last_to_first, in_lanes
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.compiler.loops.schedules.rounds import written_rounds
from stitch.graph import lift
from stitch.program import ScanForm


def hoisted_before(loop: Loop, around: Surroundings) -> Candidate | None:
    """None where no product reads no state."""
    form, estimate = loop.form, around.estimate
    if not form.states or form.count < 2 or not form.sequences:
        return None
    parts = hoisted(loop.body, form)
    if parts is None:
        return None
    takes = parts.before.inputs[: form.sequences]
    return Candidate(
        estimate.round(parts.before, form.count, takes, loop.fixed)
        + estimate.scan(parts.rest, hoisted_form(parts, form), fixed=loop.fixed),
        lambda builder, operands: WrittenLoop(_written(builder, parts, form, operands, around)),
    )


def _written(
    builder: Any, parts: Hoisted, form: ScanForm, operands: Sequence[Any], around: Surroundings
) -> tuple[Any, ...]:
    """What reads no state beforehand, for all rounds, and then the rest."""
    states, first = operands[: form.states], form.states + form.sequences
    sequences, shared = operands[form.states : first], operands[first:]
    ordered = [
        from_last_to_first(builder, s) if back else s
        for s, back in zip(sequences, form.taken_backward, strict=True)
    ]
    flags = [*[True] * len(ordered), *[False] * len(shared)]
    before = lift(
        parts.before, [*ordered, *shared], flags, form.count, builder, around.written
    ).results
    passed = [in_lanes(builder, r.tensor, r.is_batched, form.count) for r in before]
    taken = [*states, *ordered, *passed, *shared]
    return written_rounds(builder, parts.rest, hoisted_form(parts, form), taken, around)

"""`rounds`: a loop as it is, the loops in its body scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.compiler.loops.lanes import in_rounds
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import BodyBuilder, lift
from stitch.program import Body, ScanForm


def rounds(loop: Loop, around: Surroundings) -> Candidate:
    """Every loop can run so."""
    return Candidate(
        around.estimate.scan(loop.body, loop.form, fixed=loop.fixed),
        lambda builder, operands: WrittenLoop(
            written_rounds(builder, loop.body, loop.form, operands, around)
        ),
    )


def written_rounds(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], around: Surroundings
) -> tuple[Any, ...]:
    """The results of a loop that stays one."""

    def written(given: Sequence[Any], inside: BodyBuilder) -> Sequence[Any]:
        results = lift(body, given, [False] * len(given), 1, inside, around.written).results
        return [r.tensor for r in results]

    return tuple(in_rounds(builder, body, form, operands, written))

"""`rounds`: a loop as it is, the loops in its body scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import BodyBuilder, lift, scan_in_body
from stitch.program import Body, ScanForm


def rounds(loop: Loop, around: Surroundings) -> Candidate:
    """Every loop can run so."""
    form, estimate = loop.form, around.estimate
    return Candidate(
        estimate.rounds(loop.body, form.count, fixed=loop.fixed)
        if form.states
        else estimate.scan(loop.body, form, fixed=loop.fixed),
        lambda builder, operands: WrittenLoop(
            written_rounds(builder, loop.body, loop.form, operands, around)
        ),
    )


def written_rounds(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], around: Surroundings
) -> tuple[Any, ...]:
    """The results of a loop that stays one."""
    first = form.states + form.sequences
    shared = list(operands[first:])
    if not form.count and not first:
        kinds = [form.whole(kind) for kind in body.output_types]
        return tuple(builder.constant(np.empty(k.shape, k.data_type.dtype)) for k in kinds)

    def round_(inside: BodyBuilder, states: Sequence[Any], elements: Sequence[Any]) -> Any:
        given = [*states, *elements, *shared]
        results = lift(body, given, [False] * len(given), 1, inside, around.written).results
        tensors = [r.tensor for r in results]
        return tensors[: form.states], tensors[form.states :]

    last, collected = scan_in_body(
        builder, round_, operands[: form.states], operands[form.states : first],
        count=form.count, taken_backward=form.taken_backward,
        given_backward=form.given_backward,
    )  # fmt: skip
    return (*last, *collected)

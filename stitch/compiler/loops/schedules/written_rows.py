"""`rows`: a short loop around loops is written out, a loop for each of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import lift
from stitch.program import ScanForm, is_scan

#: A loop of more rounds than that, those of loops around it that are written out counted with
#: them, is not written out.
MOST_ROWS = 64
#: Nor is a loop whose rows would be more operations than that, loops in it counted as one.
MOST_WRITTEN = 2048


def rows(loop: Loop, around: Surroundings) -> Candidate | None:
    """None for loops that are around none, are too long, or have no states."""
    body, form = loop.body, loop.form
    copies = form.count * loop.copies
    if (
        not form.states or not 0 < copies <= MOST_ROWS
        or copies * len(body.operations) > MOST_WRITTEN
        or not any(is_scan(o) for o in body.operations)
    ):  # fmt: skip
        return None
    return Candidate(
        form.count * _row_seconds(loop, copies, around),
        lambda builder, operands: WrittenLoop(_written(builder, loop, operands, around)),
    )


def _row_seconds(loop: Loop, copies: int, around: Surroundings) -> float:
    """What one round of a loop around loops costs, these as they will be, on weights that are
    constants."""
    body = loop.body
    beside = replace(body, operations=tuple(o for o in body.operations if not is_scan(o)))
    seconds = around.estimate.round(beside, fixed=body.inputs[1:])
    for operation in body.operations:
        if is_scan(operation):
            inner, form = around.bodies[operation.body], ScanForm.of(operation)
            shared = inner.inputs[form.states + form.sequences :]
            seconds += around.least_seconds(Loop(inner, form, shared, copies))
    return seconds


def _written(
    builder: Any, loop: Loop, operands: Sequence[Any], around: Surroundings
) -> tuple[Any, ...]:
    """A loop written out, one round after the other."""
    form = loop.form
    states, first = list(operands[: form.states]), form.states + form.sequences
    sequences, shared = operands[form.states : first], list(operands[first:])
    known = [builder.known_data(sequence) for sequence in sequences]
    given: list[list[Any]] = []
    with around.copied(form.count):
        for round_ in range(form.count):
            elements = []
            for sequence, data, back in zip(sequences, known, form.taken_backward, strict=True):
                at = form.count - 1 - round_ if back else round_
                # What is constant stays so, at the place where it is.
                elements.append(
                    builder.index(sequence, at) if data is None
                    else builder.parameter(f"{sequence.name}_{at}", data[at])
                )  # fmt: skip
            inside = [*states, *elements, *shared]
            made = lift(
                loop.body, inside, [False] * len(inside), 1, builder, around.written
            ).results
            tensors = [result.tensor for result in made]
            states = tensors[: form.states]
            given.append(tensors[form.states :])
    collected = [
        builder.stack([each[i] for each in (given[::-1] if back else given)])
        for i, back in enumerate(form.given_backward)
    ]
    return (*states, *collected)

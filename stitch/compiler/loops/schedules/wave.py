"""`wave`: the anti-diagonals of a loop in a loop are one loop."""

from __future__ import annotations

from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.compiler.loops.waves import can_fail, wave_of, written_wave


def wave(loop: Loop, around: Surroundings) -> Candidate | None:
    """None for loops that are no wave."""
    found = wave_of(loop.body, loop.form)
    if found is None:
        return None
    cell, depth = around.bodies[found.inner.body], loop.form.count
    if can_fail(cell, found.form, around.bodies):
        return None
    a_round = around.estimate.rates.round_seconds + around.estimate.round(cell, depth)
    return Candidate(
        (found.form.count + depth - 1) * a_round,
        lambda builder, operands: WrittenLoop(
            tuple(written_wave(builder, found, cell, loop.form, operands, around.written))
        ),
    )

"""`wave`: the anti-diagonals of a loop in a loop are one loop."""

from __future__ import annotations

from dataclasses import replace

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
    diagonals = replace(found.form, count=found.form.count + depth - 1)
    return Candidate(
        around.estimate.scan(cell, diagonals, depth),
        lambda builder, operands: WrittenLoop(
            tuple(written_wave(builder, found, cell, loop.form, operands, around.written))
        ),
    )

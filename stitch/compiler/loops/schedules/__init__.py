"""Schedules: each is one file, which tells whether a loop can run so, what that costs, and how it
is written; the table holds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stitch.compiler.loops.schedules.batch import batch
from stitch.compiler.loops.schedules.blocks import blocks
from stitch.compiler.loops.schedules.hoisted import hoisted_before
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.compiler.loops.schedules.rounds import rounds, written_rounds
from stitch.compiler.loops.schedules.wave import wave
from stitch.compiler.loops.schedules.written_rows import rows

#: What of a loop is a candidate, None where it cannot run so.
Schedule = Callable[[Loop, Surroundings], Candidate | None]
TABLE: Mapping[str, Schedule] = MappingProxyType(
    {
        "batch": batch,
        "blocks": blocks,
        "hoisted": hoisted_before,
        "rounds": rounds,
        "rows": rows,
        "wave": wave,
    }
)  # fmt: skip


def candidates_for(loop: Loop, around: Surroundings) -> dict[str, Candidate]:
    """The schedules that a loop may have, by name. Where data end it, nothing that it would not
    have computed is computed beforehand."""
    if loop.form.has_condition:
        return {"rounds": rounds(loop, around)}
    found = {name: schedule(loop, around) for name, schedule in TABLE.items()}
    return {name: candidate for name, candidate in found.items() if candidate is not None}


def least_seconds(loop: Loop, around: Surroundings) -> float:
    """What a loop costs that is scheduled as it costs least."""
    return min(candidate.seconds for candidate in candidates_for(loop, around).values())


__all__ = [
    "TABLE", "Candidate", "Loop", "Surroundings", "WrittenLoop", "candidates_for", "least_seconds",
    "written_rounds",
]  # fmt: skip

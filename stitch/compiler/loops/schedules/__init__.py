"""Schedules: each is one file, which tells whether a loop can run so, what that costs, and how it
is written; the table holds them by name.

Comes in: a loop, the graph around it. Goes out: the ways in which it may run, with their costs.
Must not know: how a graph is gone through, which way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stitch.compiler.loops.schedules.batch import batch
from stitch.compiler.loops.schedules.hoisted import hoisted_before
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.compiler.loops.schedules.rounds import rounds, written_rounds
from stitch.compiler.loops.schedules.wave import wave
from stitch.compiler.loops.schedules.written_rows import rows

#: What of a loop is a candidate, None where it cannot run so.
Schedule = Callable[[Loop, Surroundings], Candidate | None]
TABLE: Mapping[str, Schedule] = MappingProxyType(
    {"batch": batch, "hoisted": hoisted_before, "rounds": rounds, "rows": rows, "wave": wave}
)

__all__ = ["TABLE", "Candidate", "Loop", "Surroundings", "WrittenLoop", "written_rounds"]

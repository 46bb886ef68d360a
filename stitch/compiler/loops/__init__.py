"""Loops: how the scans of a graph run, chosen by what their schedules cost on a machine.

Comes in: a graph, a machine, perhaps the name of a schedule. Goes out: a graph that computes the
same, and a note for each loop. Must not know: executors, programs.
"""

from stitch.compiler.loops.loop_notes import LoopNote
from stitch.compiler.loops.loop_schedules import (
    SCHEDULES,
    ScheduledLoops,
    check_schedule,
    schedule_loops,
)

__all__ = ["SCHEDULES", "LoopNote", "ScheduledLoops", "check_schedule", "schedule_loops"]

"""Loop schedules: how the scans of a graph run, chosen by their estimated cost on a machine."""

from stitch.compiler.loops.loop_costs import (
    RATED_EXECUTORS,
    check_executor,
    rated_executor,
)
from stitch.compiler.loops.loop_schedules import (
    SCHEDULES,
    LoopNote,
    ScheduledLoops,
    check_schedule,
    schedule_loops,
)

__all__ = [
    "RATED_EXECUTORS", "SCHEDULES", "LoopNote", "ScheduledLoops", "check_executor",
    "check_schedule", "rated_executor", "schedule_loops",
]  # fmt: skip

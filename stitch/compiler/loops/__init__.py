"""Loop schedules: how the scans of a graph run, by their estimated cost on a machine."""

from stitch.compiler.loops.loop_costs import RATED_EXECUTORS, check_executor, rated_executor
from stitch.compiler.loops.loop_schedules import SCHEDULES, check_schedule, schedule_loops
from stitch.compiler.loops.schedules import LoopNote

__all__ = [
    "check_executor", "check_schedule", "LoopNote", "rated_executor", "RATED_EXECUTORS",
    "schedule_loops", "SCHEDULES",
]  # fmt: skip

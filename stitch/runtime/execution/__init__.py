"""Executables: work that has been planned, bound and compiled to Python once, and is replayed."""

from stitch.runtime.execution.executable import Binding, Executable, PlanCache
from stitch.runtime.execution.generated_code import GeneratedRunner, Ran, Stopped
from stitch.runtime.execution.overwriting import BEGUN, COMPLETE, UNTOUCHED
from stitch.runtime.execution.planning import BatchPlanner
from stitch.runtime.execution.recovery import said_of, undo_donation
from stitch.runtime.execution.running import (
    leave_results,
    perform,
    run_binding,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.execution.task_batch import TaskBatch

__all__ = [
    "BEGUN", "COMPLETE", "UNTOUCHED", "Binding", "Ran", "Executable",
    "BatchPlanner", "PlanCache",
    "Stopped", "GeneratedRunner", "TaskBatch", "leave_results", "perform", "run_binding", "said_of",
    "stopped_by", "tell_run", "tell_stopped", "undo_donation",
]  # fmt: skip

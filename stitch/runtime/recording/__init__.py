"""Executables: work that has been planned, bound and compiled to Python once, and is replayed."""

from stitch.runtime.recording.executable import Binding, Executable, Recordings
from stitch.runtime.recording.generated_code import GeneratedRunner, Ran, Stopped
from stitch.runtime.recording.overwriting import BEGUN, COMPLETE, UNTOUCHED
from stitch.runtime.recording.planning import RecordingMaker
from stitch.runtime.recording.recovery import said_of, undo_donation
from stitch.runtime.recording.running import (
    leave_results,
    perform,
    run_binding,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.recording.task_batch import TaskBatch

__all__ = [
    "BEGUN", "COMPLETE", "UNTOUCHED", "Binding", "Ran", "Executable",
    "RecordingMaker", "Recordings",
    "Stopped", "GeneratedRunner", "TaskBatch", "leave_results", "perform", "run_binding", "said_of",
    "stopped_by", "tell_run", "tell_stopped", "undo_donation",
]  # fmt: skip

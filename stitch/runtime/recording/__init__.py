"""Recordings: work that has been planned, bound and written out once, and runs again.

Comes in: windows of tasks. Goes out: bindings that may run, and what their runs leave. Must not
know handles, or what a queue is.
"""

from stitch.runtime.recording.agent import Agent
from stitch.runtime.recording.code import Ran, Straight
from stitch.runtime.recording.forked import Stopped
from stitch.runtime.recording.overwriting import BEGUN, COMPLETE, UNTOUCHED
from stitch.runtime.recording.recording import Binding, Recording
from stitch.runtime.recording.recording_maker import RecordingMaker
from stitch.runtime.recording.recordings import Recordings
from stitch.runtime.recording.running import (
    leave_results,
    perform,
    run_binding,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.recording.site import Site
from stitch.runtime.recording.what_is_left import said_of, undo_donation
from stitch.runtime.recording.window import Window

__all__ = [
    "BEGUN", "COMPLETE", "UNTOUCHED", "Agent", "Binding", "Ran", "Recording",
    "RecordingMaker", "Recordings", "Site",
    "Stopped", "Straight", "Window", "leave_results", "perform", "run_binding", "said_of",
    "stopped_by", "tell_run", "tell_stopped", "undo_donation",
]  # fmt: skip

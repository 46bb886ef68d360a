"""Recordings: work that has been planned, bound and written out once, and runs again.

Comes in: windows of tasks. Goes out: bindings that may run, and what their runs leave. Must not
know handles, or what a queue is.
"""

from stitch.runtime.recording.code import Ran, Straight, straight_code
from stitch.runtime.recording.recording_maker import RecordingMaker
from stitch.runtime.recording.recordings import Binding, Recording, Recordings
from stitch.runtime.recording.running import perform, run_binding

__all__ = [
    "Binding", "Ran", "Recording", "RecordingMaker", "Recordings", "Straight", "perform",
    "run_binding", "straight_code",
]  # fmt: skip

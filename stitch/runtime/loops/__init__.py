"""Loops on a device: buffers that persist between runs, and executables that update them."""

from stitch.runtime.loops.cell_states import PersistentBuffers
from stitch.runtime.loops.loop_stage import StatefulExecutable

__all__ = ["PersistentBuffers", "StatefulExecutable"]

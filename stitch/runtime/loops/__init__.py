"""Loops on a device: task graphs that run between cells, which hold what lies between two runs."""

from stitch.runtime.loops.cell_states import PersistentBuffers
from stitch.runtime.loops.loop_stage import StatefulExecutable

__all__ = ["PersistentBuffers", "StatefulExecutable"]

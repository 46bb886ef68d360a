"""Loops on a device: task graphs that run between cells, which hold what lies between two runs.

Comes in: tables of task graphs, arrays of a call. Goes out: tensors of cells. Must not know what a
loop is for.
"""

from stitch.runtime.loops.cell_states import Cells
from stitch.runtime.loops.loop_stage import LoopStage

__all__ = ["Cells", "LoopStage"]

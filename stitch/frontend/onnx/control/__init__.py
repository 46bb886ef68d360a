"""Nodes with bodies: If, Loop, Scan, SequenceMap.

Comes in: a node whose attributes are graphs. Goes out: what its bodies make: branches are chosen,
loops unrolled. Must not know: files.
"""

from stitch.frontend.onnx.control.bodies import ControlCall
from stitch.frontend.onnx.control.control_nodes import CONTROL_OPERATORS, lower_control

__all__ = ["CONTROL_OPERATORS", "ControlCall", "lower_control"]

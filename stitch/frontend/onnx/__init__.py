"""ONNX models become computation graphs.

Comes in: a path or a `ModelProto`, example inputs, shapes. Goes out: a `ComputationGraph`. Needs
the package onnx (an optional extra). The way of the data: `protos` read the file, `graph_inputs`
get their shapes, `node_walk` goes through the nodes, whose operands are `values`; each becomes one
of the `calls` of plain operators, a body (`control_nodes`), or is said in plain operators
(`composed_operators`), or is a foreign operation (`foreign_nodes`). Must not know: machines.
"""

from stitch.frontend.onnx.translation import from_onnx

__all__ = ["from_onnx"]

"""ONNX models become computation graphs.

Needs the package onnx (an optional extra). The way of the data: `protos` read the file,
`graph_inputs` get their shapes, `node_walk` goes through the nodes, whose operands are `values`;
each becomes one of the `calls` of plain operators, a body (`control_nodes`), or is said in plain
operators (`composed_operators`), or is a foreign operation (`foreign_nodes`).
"""

from stitch.frontend.onnx.translation import from_onnx

__all__ = ["from_onnx"]

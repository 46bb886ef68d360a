"""ONNX models become computation graphs.

Needs the package onnx (an optional extra). `protos` reads the file, `translation` finds the
shapes of the inputs, `node_walk` visits the nodes, whose operands are `values`. Each node becomes a
call of a plain operator (`calls`), a loop or a branch (`control_flow`), several plain operators
(`composed_operators`) or a foreign operation (`foreign_nodes`).
"""

from stitch.frontend.onnx.translation import from_onnx, from_onnx_dynamic, input_dimensions

__all__ = ["from_onnx", "from_onnx_dynamic", "input_dimensions"]

"""One node as a call of an operator of opset 26."""

from stitch.frontend.onnx.calls.constant_nodes import constant_array, reference_results
from stitch.frontend.onnx.calls.function_nodes import Expansion, Functions
from stitch.frontend.onnx.calls.node_call import Lowering, NodeCall, to_one, to_several
from stitch.frontend.onnx.calls.upgrades import is_upgraded, upgraded

__all__ = [
    "Expansion", "Functions", "Lowering", "NodeCall", "constant_array", "is_upgraded",
    "reference_results", "to_one", "to_several", "upgraded",
]  # fmt: skip

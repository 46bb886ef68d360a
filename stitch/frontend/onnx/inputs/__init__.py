"""The inputs of an ONNX graph, with every dimension known.

Comes in: declared inputs, example inputs, shapes given by hand. Goes out: bound inputs that are all
tensors. Must not know: what the graph computes.
"""

from stitch.frontend.onnx.inputs.input_binding import (
    BoundInput,
    Examples,
    Shapes,
    batched_shapes,
    bind_inputs,
)
from stitch.frontend.onnx.inputs.input_structures import FlatInputs, flat_inputs, flat_output

__all__ = [
    "BoundInput", "Examples", "FlatInputs", "Shapes", "batched_shapes", "bind_inputs",
    "flat_inputs", "flat_output",
]  # fmt: skip

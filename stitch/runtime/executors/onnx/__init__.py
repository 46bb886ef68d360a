"""Run programs, or parts of them, as sessions of ONNX Runtime; look up foreign operators.

Needs the extra `onnx`; imported on first use.
"""

from stitch.runtime.executors.onnx.model_writer import (
    defining_version,
    draws_random_numbers,
    tensor_text,
)
from stitch.runtime.executors.onnx.onnxruntime_executor import OnnxRuntimeExecutor, Sessions
from stitch.runtime.executors.onnx.session import (
    InferredType,
    inferred_results,
)

__all__ = [
    "InferredType", "OnnxRuntimeExecutor", "Sessions", "defining_version",
    "draws_random_numbers", "inferred_results", "tensor_text",
]  # fmt: skip

"""Programs, or runs of their operations, as sessions of ONNX Runtime; and what it knows of foreign
operators. Needs the extra `onnx`; imported only when asked for."""

from stitch.runtime.executors.onnx.foreign_calls import Sessions
from stitch.runtime.executors.onnx.form_writer import tensor_text
from stitch.runtime.executors.onnx.onnxruntime_executor import OnnxRuntimeExecutor
from stitch.runtime.executors.onnx.operator_schemas import defining_version, draws_random_numbers
from stitch.runtime.executors.onnx.result_types import (
    InferredType,
    computed_results,
    inferred_results,
)

__all__ = [
    "InferredType", "OnnxRuntimeExecutor", "Sessions", "computed_results", "defining_version",
    "draws_random_numbers", "inferred_results", "tensor_text",
]  # fmt: skip

"""Programs, or runs of their operations, as sessions of ONNX Runtime. Needs the extra `onnx`.

Comes in: programs, regions of bytes. Goes out: steps to call. Imported only when asked for. Must
not know which operations come here, devices or plans.
"""

from stitch.runtime.executors.onnx.foreign_calls import Sessions
from stitch.runtime.executors.onnx.onnxruntime_executor import OnnxRuntimeExecutor

__all__ = ["OnnxRuntimeExecutor", "Sessions"]

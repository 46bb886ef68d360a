"""PyTorch's kernels beside NumPy's and ONNX Runtime's. Needs the extra `torch`.

Comes in: programs, operations, arrays. Goes out: steps to call. Imported only when asked for. Must
not know devices or plans.
"""

from stitch.runtime.executors.torch.torch_executor import AtenKernels, TorchExecutor

__all__ = ["AtenKernels", "TorchExecutor"]

"""Programs computed by kernels on the host's memory, NumPy's or a library's, and what they take.

Comes in: programs, regions of bytes, what is computed elsewhere in one call. Goes out: steps to
call, and bytes of the host's memory. Must not know ONNX Runtime, PyTorch, devices or plans.
"""

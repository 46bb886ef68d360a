"""Compute programs by kernels on host memory (NumPy's or a library's), and measure their memory."""

from stitch.runtime.executors.host.arrangement import MOVEMENTS, WINDOW
from stitch.runtime.executors.host.bindings import ForeignCall, KernelLibrary
from stitch.runtime.executors.host.chunks import chunked_sizes
from stitch.runtime.executors.host.host_bytes import (
    committed_nbytes,
    either_bytes,
    program_bytes,
    program_peak,
    session_bytes,
)
from stitch.runtime.executors.host.numpy_executor import (
    NumpyExecutor,
    OperationReferences,
    PartOfProgram,
    PreparedKernels,
    WholeProgram,
)
from stitch.runtime.executors.host.staging import (
    StagedRegions,
    StagingArrays,
    as_bytes,
    computable,
    compute_type,
    dense_view,
    is_direct,
)

__all__ = [
    "MOVEMENTS", "WINDOW", "ForeignCall", "KernelLibrary", "NumpyExecutor", "OperationReferences",
    "PartOfProgram", "PreparedKernels", "StagedRegions", "StagingArrays", "WholeProgram",
    "as_bytes", "chunked_sizes", "committed_nbytes", "computable", "compute_type", "dense_view",
    "either_bytes", "is_direct", "program_bytes", "program_peak", "session_bytes",
]  # fmt: skip

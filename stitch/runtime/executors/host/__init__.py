"""Programs computed by kernels on the host's memory, NumPy's or a library's, and what they take."""

from stitch.runtime.executors.host.chunks import chunked_sizes
from stitch.runtime.executors.host.host_bytes import (
    committed_nbytes,
    either_bytes,
    program_bytes,
    program_peak,
    repacked_nbytes,
    session_bytes,
)
from stitch.runtime.executors.host.kernels import KernelLibrary
from stitch.runtime.executors.host.movements import MOVEMENTS, WINDOW
from stitch.runtime.executors.host.numpy_executor import NumpyExecutor, PreparedKernels
from stitch.runtime.executors.host.operation_references import OperationReferences
from stitch.runtime.executors.host.program_parts import PartOfProgram, WholeProgram
from stitch.runtime.executors.host.staging import (
    StagedRegions,
    StagingArrays,
    as_bytes,
    computable,
    compute_type,
    dense_view,
)

__all__ = [
    "MOVEMENTS", "WINDOW", "KernelLibrary", "NumpyExecutor", "OperationReferences", "PartOfProgram",
    "PreparedKernels", "StagedRegions", "StagingArrays", "WholeProgram", "as_bytes",
    "chunked_sizes", "committed_nbytes", "computable", "compute_type", "dense_view", "either_bytes",
    "program_bytes", "program_peak", "repacked_nbytes", "session_bytes",
]  # fmt: skip

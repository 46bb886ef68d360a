"""Stitch joins independently compiled programs at run time."""

from stitch.api import (
    CompiledModel,
    Device,
    Pipeline,
    __version__,
    compile,
    device_of,
    forbid_copies,
    get_layout,
    has_layout,
    load,
    open_device,
    submit,
    to_layout,
    wait,
)
from stitch.errors import (
    CompileError,
    FormatError,
    LayoutError,
    LinkError,
    OutOfMemoryError,
    StitchError,
    TaskError,
)
from stitch.graph import ComputationGraphBuilder, trace
from stitch.program import DataType, Layout, MemoryLayout, ShardSpec, Space, TensorDesc
from stitch.runtime import LoadedProgram, Tensor
from stitch.training import (
    SGD,
    Adam,
    AdamW,
    LossTensor,
    TensorFuture,
    TrainingInstance,
    losses,
    schedules,
)

__all__ = [
    "Adam", "AdamW", "CompileError", "CompiledModel", "ComputationGraphBuilder", "DataType",
    "Device", "FormatError", "Layout", "LayoutError", "LinkError", "LoadedProgram", "LossTensor",
    "MemoryLayout", "OutOfMemoryError", "Pipeline", "SGD", "ShardSpec", "Space", "StitchError",
    "TaskError", "Tensor", "TensorDesc", "TensorFuture", "TrainingInstance", "__version__",
    "compile", "device_of", "forbid_copies", "get_layout", "has_layout", "load", "losses",
    "open_device", "schedules", "submit", "to_layout", "trace", "wait",
]  # fmt: skip

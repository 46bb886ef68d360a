"""Stitch joins independently compiled programs at run time."""

from stitch.installation import check_installation
from stitch.on_demand import names_on_demand

check_installation()

TYPE_CHECKING = False  # `typing` takes as long to import as all of this.
if TYPE_CHECKING:
    from stitch.api import (
        CompileCache,
        CompiledModel,
        Device,
        DynamicModel,
        LinkedModel,
        Pipeline,
        compile,
        device_of,
        forbid_copies,
        get_layout,
        has_layout,
        link,
        load,
        open_device,
        split,
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
    from stitch.mesh import MachineSpecification, Mesh, RemoteTensor, open_mesh
    from stitch.plugins import register
    from stitch.program import DataType, Dim, Layout, MemoryLayout, ShardSpec, Space, TensorDesc
    from stitch.runtime import LoadedProgram, Tensor
    from stitch.tasks import TaskGraph, aggregate, compose, task
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
    from stitch.version import __version__
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "api": "CompileCache CompiledModel Device DynamicModel LinkedModel Pipeline compile "
            "device_of forbid_copies get_layout has_layout link load open_device split submit "
            "to_layout wait",
            "errors": "CompileError FormatError LayoutError LinkError OutOfMemoryError StitchError "
            "TaskError",
            "graph": "ComputationGraphBuilder trace",
            "mesh": "MachineSpecification Mesh RemoteTensor open_mesh",
            "plugins": "register",
            "program": "DataType Dim Layout MemoryLayout ShardSpec Space TensorDesc",
            "runtime": "LoadedProgram Tensor",
            "tasks": "TaskGraph aggregate compose task",
            "training": "Adam AdamW LossTensor SGD TensorFuture TrainingInstance losses schedules",
            "version": "__version__",
        },
        modules="api argument_kinds budget cli compile_cache compiler documents dynamic_model "
        "errors files "
        "flatbuffer forms fractal frontend graph linker linking machine memory mesh model "
        "on_demand ops option_values packing planner plugins program report runtime tasks torch "
        "training ttb version",
    )

__all__ = [
    "Adam", "AdamW", "CompileCache", "CompileError", "CompiledModel", "ComputationGraphBuilder",
    "DataType", "Device", "Dim", "DynamicModel", "FormatError", "Layout", "LayoutError",
    "LinkError", "LinkedModel", "LoadedProgram", "LossTensor", "MachineSpecification",
    "MemoryLayout", "Mesh", "OutOfMemoryError", "Pipeline", "RemoteTensor", "SGD", "ShardSpec",
    "Space", "StitchError", "TaskError", "TaskGraph", "Tensor", "TensorDesc", "TensorFuture",
    "TrainingInstance", "__version__", "aggregate", "compile", "compose", "device_of",
    "forbid_copies", "get_layout", "has_layout", "link", "load", "losses", "open_device",
    "open_mesh", "register", "schedules", "split", "submit", "task", "to_layout", "trace",
    "wait",
]  # fmt: skip

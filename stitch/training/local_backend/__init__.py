"""FlexFlow's local backend: training as tasks, one for each operator and direction.

A task is a program on the device's queue. The terms are FlexFlow's.
"""

from stitch.training.local_backend.backend import LocalTaskBackend
from stitch.training.local_backend.signatures import (
    LayerTask,
    RuntimeArgument,
    SlotKind,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    TensorSlot,
    backward_binding,
    backward_signature,
    task_signature,
)
from stitch.training.local_backend.store import (
    ModelTrainingInstance,
    RuntimeBacking,
    TaskArgumentAccessor,
    TaskImplementation,
    TaskStore,
    TensorAccessor,
    execute,
)

__all__ = [
    "LayerTask", "LocalTaskBackend", "ModelTrainingInstance", "RuntimeArgument", "RuntimeBacking",
    "SlotKind", "TaskArgumentAccessor", "TaskBinding", "TaskImplementation", "TaskInvocation",
    "TaskSignature", "TaskStore", "TensorAccessor", "TensorSlot", "backward_binding",
    "backward_signature", "execute", "task_signature",
]  # fmt: skip

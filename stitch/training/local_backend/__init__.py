"""FlexFlow's local backend: a model in training as tasks, one for each operator and direction.

A task is a program on the device's queue. Words follow FlexFlow.
"""

from stitch.training.local_backend.backend import LocalTaskBackend
from stitch.training.local_backend.signatures import (
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
    LayerTask,
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

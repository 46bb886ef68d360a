"""FlexFlow's local backend: a model in training as tasks, one for each operator and direction.

A task is a program on the device's queue. Words follow FlexFlow.
"""

from stitch.training.local_backend.local_task_backend import LocalTaskBackend
from stitch.training.local_backend.runtime_backing import (
    LayerTask,
    ModelTrainingInstance,
    RuntimeBacking,
    TaskImplementation,
    execute,
)
from stitch.training.local_backend.task_arguments import TaskArgumentAccessor, TensorAccessor
from stitch.training.local_backend.task_binding import (
    RuntimeArgument,
    TaskBinding,
    TaskInvocation,
    backward_binding,
)
from stitch.training.local_backend.task_slots import (
    SlotKind,
    TaskSignature,
    TensorSlot,
    backward_signature,
    task_signature,
)
from stitch.training.local_backend.task_store import TaskStore

__all__ = [
    "LayerTask", "LocalTaskBackend", "ModelTrainingInstance", "RuntimeArgument", "RuntimeBacking",
    "SlotKind", "TaskArgumentAccessor", "TaskBinding", "TaskImplementation", "TaskInvocation",
    "TaskSignature", "TaskStore", "TensorAccessor", "TensorSlot", "backward_binding",
    "backward_signature", "execute", "task_signature",
]  # fmt: skip

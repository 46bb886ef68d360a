"""Training: forward, loss, backward and update as programs of their own, stitched in a loop.

Comes in: a graph with weights, a loss, an optimizer, a machine. Goes out: programs, and the
instance that runs them on a device. Must not know: front ends, the commands. Checkpoints are
loaded when they are asked for, as is FlexFlow's local backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.training import losses, schedules
from stitch.training.compiled import CompiledTraining, compile_model
from stitch.training.costs import CostEstimator, SimulatedTime
from stitch.training.futures import LossTensor, TensorFuture
from stitch.training.graphs import (
    Trainable,
    as_trainable,
    evaluation_form,
    graph_of,
    update_graph,
    with_weights,
)
from stitch.training.instance import TrainingInstance
from stitch.training.losses import (
    LOSS_KIND,
    LOSSES,
    BCEWithLogitsLoss,
    CategoricalCrossEntropyLoss,
    CrossEntropyLoss,
    IdentityLoss,
    Loss,
    MSELoss,
    loss_from_config,
)
from stitch.training.observing import LayerTime
from stitch.training.optimizers import (
    OPTIMIZER_KIND,
    SGD,
    Adam,
    AdamW,
    Optimizer,
    optimizer_from_config,
)
from stitch.training.programs import TrainingOptions, TrainingPrograms, home_space
from stitch.training.schedules import (
    ConstantLR,
    CosineAnnealingLR,
    Schedule,
    StepLR,
    WarmupLR,
    schedule_from_config,
)
from stitch.training.search import (
    ALGORITHMS,
    AlgorithmConfig,
    CostValues,
    SearchResult,
    SearchSolution,
    optimize,
)

if TYPE_CHECKING:
    from stitch.training.checkpoints import (
        Checkpoint,
        CheckpointFolder,
        differences,
        is_checkpoint,
        read_checkpoint,
        read_tensors,
        refuse_other,
        write_tensors,
    )
    from stitch.training.local_backend import (
        LayerTask,
        LocalTaskBackend,
        ModelTrainingInstance,
        RuntimeArgument,
        RuntimeBacking,
        SlotKind,
        TaskArgumentAccessor,
        TaskBinding,
        TaskImplementation,
        TaskInvocation,
        TaskSignature,
        TaskStore,
        TensorAccessor,
        TensorSlot,
        backward_binding,
        backward_signature,
        execute,
        task_signature,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "checkpoints": "Checkpoint CheckpointFolder differences is_checkpoint read_checkpoint "
            "read_tensors refuse_other write_tensors",
            "local_backend": "LayerTask LocalTaskBackend ModelTrainingInstance RuntimeArgument "
            "RuntimeBacking SlotKind TaskArgumentAccessor TaskBinding TaskImplementation "
            "TaskInvocation TaskSignature TaskStore TensorAccessor TensorSlot backward_binding "
            "backward_signature execute task_signature",
        },
    )

__all__ = [
    "ALGORITHMS", "LOSSES", "LOSS_KIND", "OPTIMIZER_KIND", "SGD", "Adam", "AdamW",
    "AlgorithmConfig", "BCEWithLogitsLoss",
    "CategoricalCrossEntropyLoss", "Checkpoint", "CheckpointFolder", "CompiledTraining",
    "ConstantLR", "CosineAnnealingLR", "CostEstimator", "CostValues", "CrossEntropyLoss",
    "IdentityLoss", "LayerTask", "LayerTime", "LocalTaskBackend", "Loss", "LossTensor", "MSELoss",
    "ModelTrainingInstance", "Optimizer", "RuntimeArgument", "RuntimeBacking",
    "Schedule", "SearchResult", "SearchSolution", "SimulatedTime", "SlotKind", "StepLR",
    "TaskArgumentAccessor",
    "TaskBinding", "TaskImplementation", "TaskInvocation", "TaskSignature", "TaskStore",
    "TensorAccessor", "TensorFuture", "TensorSlot", "Trainable", "TrainingInstance",
    "TrainingOptions", "TrainingPrograms", "WarmupLR", "as_trainable", "backward_binding",
    "backward_signature", "compile_model", "differences", "evaluation_form", "execute", "graph_of",
    "home_space", "is_checkpoint", "loss_from_config", "losses", "optimize",
    "optimizer_from_config", "read_checkpoint", "read_tensors", "refuse_other",
    "schedule_from_config", "schedules", "task_signature", "update_graph", "with_weights",
    "write_tensors",
]  # fmt: skip

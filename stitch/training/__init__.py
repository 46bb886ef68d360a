"""Training: forward, loss, backward and update as programs of their own, stitched in a loop.

Checkpoints are loaded when they are asked for, as is FlexFlow's local backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.training import losses, schedules
from stitch.training.compiled import CompiledTraining, ModelReader, compile_model, constants_of
from stitch.training.from_torch import (
    GIVEN_LOSS,
    GIVEN_OPTIMIZER,
    TorchOptimizer,
    is_loss_call,
    is_torch_optimizer,
    loss_of,
    loss_of_call,
    owner_of,
    parameter_names,
    replace_methods,
    weakly,
)
from stitch.training.graphs import (
    STEP,
    Parameter,
    Trainable,
    as_trainable,
    evaluation_form,
    graph_of,
    is_rate,
    rate_name,
    update_graph,
    with_weights,
)
from stitch.training.instance import TrainingInstance
from stitch.training.losses import (
    LOSS_KIND,
    LOSSES,
    BCELoss,
    BCEWithLogitsLoss,
    CategoricalCrossEntropyLoss,
    CrossEntropyLoss,
    HuberLoss,
    IdentityLoss,
    L1Loss,
    Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    loss_from_config,
)
from stitch.training.observing import LayerTime
from stitch.training.optimizers import (
    OPTIMIZER_KIND,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    optimizer_from_config,
)
from stitch.training.pending_values import LossTensor, PendingValue, TensorFuture
from stitch.training.programs import (
    TrainingGraphs,
    TrainingOptions,
    TrainingPrograms,
    home_space,
    slot_places,
)
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
    CostEstimator,
    CostValues,
    InferenceGraphs,
    SearchResult,
    SearchSolution,
    SimulatedTime,
    check_algorithm,
    optimize,
    place_inference,
)
from stitch.training.tensors import part_of, with_part

if TYPE_CHECKING:
    from stitch.training.checkpoints import (
        Checkpoint,
        CheckpointFolder,
        differences,
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
            "checkpoints": "Checkpoint CheckpointFolder differences read_checkpoint "
            "read_tensors refuse_other write_tensors",
            "local_backend": "LayerTask LocalTaskBackend ModelTrainingInstance RuntimeArgument "
            "RuntimeBacking SlotKind TaskArgumentAccessor TaskBinding TaskImplementation "
            "TaskInvocation TaskSignature TaskStore TensorAccessor TensorSlot backward_binding "
            "backward_signature execute task_signature",
        },
    )

__all__ = [
    "ALGORITHMS", "GIVEN_LOSS", "GIVEN_OPTIMIZER", "LOSSES", "LOSS_KIND", "OPTIMIZERS",
    "OPTIMIZER_KIND", "SGD", "STEP", "Adagrad", "Adam", "AdamW", "AlgorithmConfig", "BCELoss",
    "BCEWithLogitsLoss", "CategoricalCrossEntropyLoss", "Checkpoint", "CheckpointFolder",
    "CompiledTraining", "ConstantLR", "CosineAnnealingLR", "CostEstimator", "CostValues",
    "CrossEntropyLoss", "HuberLoss", "IdentityLoss", "InferenceGraphs", "L1Loss", "LayerTask",
    "LayerTime", "LocalTaskBackend", "Loss", "LossTensor", "MSELoss", "ModelReader",
    "ModelTrainingInstance",
    "NAdam", "NLLLoss", "Optimizer", "Parameter", "PendingValue", "RAdam", "RMSprop",
    "RuntimeArgument",
    "RuntimeBacking", "Schedule", "SearchResult", "SearchSolution", "SimulatedTime", "SlotKind",
    "SmoothL1Loss", "StepLR", "TaskArgumentAccessor", "TaskBinding", "TaskImplementation",
    "TaskInvocation", "TaskSignature", "TaskStore", "TensorAccessor", "TensorFuture",
    "TensorSlot", "TorchOptimizer", "Trainable", "TrainingGraphs", "TrainingInstance",
    "TrainingOptions", "TrainingPrograms", "WarmupLR", "as_trainable", "backward_binding",
    "backward_signature", "check_algorithm", "compile_model", "constants_of", "differences",
    "evaluation_form", "execute", "graph_of", "home_space", "is_rate",
    "is_loss_call", "is_torch_optimizer", "loss_from_config", "loss_of", "loss_of_call", "losses",
    "optimize",
    "optimizer_from_config", "owner_of", "parameter_names", "part_of", "place_inference",
    "rate_name", "read_checkpoint", "read_tensors", "refuse_other", "replace_methods",
    "schedule_from_config", "schedules", "slot_places", "task_signature", "update_graph",
    "weakly", "with_part", "with_weights", "write_tensors",
]  # fmt: skip

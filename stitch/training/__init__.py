"""Training: forward, loss, backward and update as separate programs, stitched in a loop.

Checkpoints and FlexFlow's local backend load on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.training import losses, schedules
from stitch.training.compiled import CompiledTraining, ModelReader, compile_model, constants_of
from stitch.training.from_torch import (
    ANY_LOSS,
    ANY_OPTIMIZER,
    TorchOptimizer,
    is_loss_call,
    is_torch_optimizer,
    loss_of,
    loss_of_call,
    owner_of,
    parameter_names,
    replace_methods,
    weak_method,
)
from stitch.training.graphs import (
    CLIP_FACTOR,
    GRADIENT_NORM,
    KEPT_KINDS,
    MASTER,
    MORE,
    STEP,
    Parameter,
    Trainable,
    accumulation_graph,
    as_trainable,
    graph_of,
    is_rate,
    rate_name,
    update_graph,
    with_weights,
)
from stitch.training.instance import TrainingInstance, micro_batches_of
from stitch.training.losses import (
    Loss,
    loss_from_config,
)
from stitch.training.observing import LayerTime
from stitch.training.optimizers import (
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
from stitch.training.pending_values import (
    LossTensor,
    PendingValue,
    Prediction,
    TensorFuture,
    live_training,
    refusing_backward,
)
from stitch.training.programs import (
    LABEL,
    LOSS,
    TrainingGraphs,
    TrainingOptions,
    TrainingPrograms,
    compilation,
    home_space,
    slot_places,
)
from stitch.training.schedules import (
    Schedule,
)
from stitch.training.search import (
    ALGORITHMS,
    PARALLEL_ALGORITHMS,
    AlgorithmConfig,
    CostEstimator,
    CostValues,
    PlacedSlots,
    PlacementResult,
    ProgramEstimator,
    SearchSolution,
    SimulatedTime,
    check_algorithm,
    place_inference,
    place_training,
)
from stitch.training.tensors import (
    COUNTS,
    Sharer,
    check_gradients,
    check_state,
    check_weights,
    part_of,
    random_key,
    with_part,
)
from stitch.training.views import keeps_examples, view_text

if TYPE_CHECKING:
    from stitch.training.checkpoints import (
        Checkpoint,
        CheckpointFolder,
        differences,
        read_checkpoint,
        refuse_other,
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
    from stitch.training.planning import ModelCompilationResult, SearchResult, optimize
    from stitch.training.stages import (
        PassedValue,
        Stage,
        StagedGraphs,
        compile_stage,
        stage_graph,
        stages_of,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "checkpoints": "Checkpoint CheckpointFolder differences read_checkpoint refuse_other",
            "local_backend": "LayerTask LocalTaskBackend ModelTrainingInstance RuntimeArgument "
            "RuntimeBacking SlotKind TaskArgumentAccessor TaskBinding TaskImplementation "
            "TaskInvocation TaskSignature TaskStore TensorAccessor TensorSlot backward_binding "
            "backward_signature execute task_signature",
            "planning": "ModelCompilationResult SearchResult optimize",
            "stages": "PassedValue Stage StagedGraphs compile_stage stage_graph stages_of",
        },
    )

__all__ = [
    "accumulation_graph", "check_gradients", "refusing_backward",
    "CLIP_FACTOR", "COUNTS", "GRADIENT_NORM", "KEPT_KINDS", "LABEL", "LOSS", "MASTER", "MORE",
    "PassedValue", "Stage", "StagedGraphs", "check_state", "check_weights", "compilation",
    "compile_stage",
    "micro_batches_of", "random_key", "stage_graph", "stages_of", "ALGORITHMS", "ANY_LOSS",
    "ANY_OPTIMIZER", "OPTIMIZERS", "SGD", "STEP", "Adagrad", "Adam", "AdamW", "AlgorithmConfig",
    "Checkpoint", "CheckpointFolder", "CompiledTraining", "CostEstimator", "CostValues",
    "LayerTask", "LayerTime", "LocalTaskBackend", "Loss", "LossTensor",
    "ModelCompilationResult", "ModelReader", "ModelTrainingInstance", "NAdam", "Optimizer",
    "Parameter", "PARALLEL_ALGORITHMS", "PendingValue", "PlacedSlots", "PlacementResult",
    "Prediction", "ProgramEstimator", "RAdam", "RMSprop", "RuntimeArgument", "RuntimeBacking",
    "Schedule", "keeps_examples", "view_text",
    "SearchResult", "SearchSolution", "Sharer", "SimulatedTime", "SlotKind", "TaskArgumentAccessor",
    "TaskBinding", "TaskImplementation", "TaskInvocation", "TaskSignature", "TaskStore",
    "TensorAccessor", "TensorFuture", "TensorSlot", "TorchOptimizer", "Trainable",
    "TrainingGraphs", "TrainingInstance", "TrainingOptions", "TrainingPrograms", "as_trainable",
    "backward_binding", "backward_signature", "check_algorithm", "compile_model",
    "constants_of", "differences", "execute", "graph_of", "home_space", "is_rate",
    "is_loss_call", "is_torch_optimizer", "loss_from_config", "loss_of", "loss_of_call",
    "live_training", "losses", "optimize", "optimizer_from_config", "owner_of",
    "parameter_names", "part_of", "place_inference", "place_training", "rate_name",
    "read_checkpoint", "refuse_other", "replace_methods", "schedules", "slot_places",
    "task_signature", "update_graph", "weak_method", "with_part", "with_weights",
]  # fmt: skip

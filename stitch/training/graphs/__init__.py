"""The graphs of a training: what is trained, evaluated, updated, and used when training is over."""

from stitch.training.graphs.graph_forms import (
    KEPT_KINDS,
    evaluation_form,
    graph_of,
    in_precision,
    splice,
    with_weights,
)
from stitch.training.graphs.trainable import Trainable, as_trainable
from stitch.training.graphs.update_graph import (
    GRADIENT_NORM,
    LEARNING_RATE,
    MASTER,
    MORE,
    STEP,
    Parameter,
    accumulation_graph,
    group_numbers,
    is_rate,
    rate_name,
    update_graph,
)

__all__ = [
    "GRADIENT_NORM", "KEPT_KINDS", "LEARNING_RATE", "MASTER", "MORE", "STEP", "Parameter",
    "Trainable", "accumulation_graph", "as_trainable", "evaluation_form", "graph_of",
    "group_numbers", "in_precision", "is_rate", "rate_name", "splice", "update_graph",
    "with_weights",
]  # fmt: skip

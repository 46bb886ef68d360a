"""Normalizations: by the statistics of rows, groups, batches, or of neighbours.

Knows the statistics of rows.
"""

from stitch.ops.definition import OpDef
from stitch.ops.normalization import (
    batch_normalization,
    batch_normalization_gradient_operator,
    layer_normalization,
    layer_normalization_gradient_operator,
)
from stitch.ops.normalization.batch_normalization_gradient_operator import (
    LastPass,
    batch_gradient_steps,
)

__all__ = ["OPERATORS", "LastPass", "batch_gradient_steps"]

OPERATORS: tuple[OpDef, ...] = (
    *batch_normalization.OPERATORS,
    *batch_normalization_gradient_operator.OPERATORS,
    *layer_normalization.OPERATORS,
    *layer_normalization_gradient_operator.OPERATORS,
)

"""Steps of optimizers as operators: Adagrad, Adam, Momentum.

Comes in: parameters, gradients, states. Goes out: `OPERATORS`. Must not know: other families.
"""

from stitch.ops.definition import OpDef
from stitch.ops.training import optimizer_steps

__all__ = ["OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (*optimizer_steps.OPERATORS,)

"""Activations: Relu, Gelu, Softmax and their kind, chains of steps over cache-sized chunks.

Knows the error function and the statistics of rows.
"""

from stitch.ops.activation import activation_functions, gelu, softmax
from stitch.ops.activation.gelu import GELU_CUBE, GELU_HEIGHT, GELU_RATE
from stitch.ops.definition import OpDef

__all__ = ["GELU_CUBE", "GELU_HEIGHT", "GELU_RATE", "OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (
    *activation_functions.OPERATORS, *gelu.OPERATORS, *softmax.OPERATORS,
)  # fmt: skip

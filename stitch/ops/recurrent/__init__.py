"""Recurrent layers: RNN, GRU, LSTM, in either direction or both.

Comes in: sequences, weights, states. Goes out: `OPERATORS`, their gradient rules inside them. Must
not know: other families.
"""

from stitch.ops.definition import OpDef
from stitch.ops.recurrent import recurrent_layers
from stitch.ops.recurrent.recurrent_layers import recurrent_activations

__all__ = ["OPERATORS", "recurrent_activations"]

OPERATORS: tuple[OpDef, ...] = (*recurrent_layers.OPERATORS,)

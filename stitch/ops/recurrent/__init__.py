"""Recurrent layers: RNN, GRU, LSTM, in either direction or both.

Comes in: sequences, weights, states. Goes out: `OPERATORS`, their gradient rules inside them. Must
not know: other families.
"""

from stitch.ops.definition import OpDef
from stitch.ops.recurrent import recurrent_layers

__all__ = ["OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (*recurrent_layers.OPERATORS,)

"""Recurrent layers: RNN, GRU, LSTM, in either direction or both."""

from stitch.ops.definition import OpDef
from stitch.ops.recurrent import recurrent_layers
from stitch.ops.recurrent.recurrent_layers import recurrent_activations

__all__ = ["OPERATORS", "recurrent_activations"]

OPERATORS: tuple[OpDef, ...] = (*recurrent_layers.OPERATORS,)

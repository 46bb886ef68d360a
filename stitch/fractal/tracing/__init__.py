"""Calls become graphs: functions over nests are loops there, user functions their bodies.

Comes in: calls of functions over nests, with data or over values of a graph under construction.
Goes out: graphs, what their inputs are given, what calls mean; and the way that writes functions
over nests down in a graph. Bodies are traced once for the types of what they are given. Must not
know devices.
"""

from stitch.fractal.tracing.call_inputs import CallInputs
from stitch.fractal.tracing.graph_tracing import GraphMeaning, GraphTracing, as_values
from stitch.fractal.tracing.nest_work import NestWork
from stitch.fractal.tracing.traced import LengthsOfDataError, Traced

__all__ = [
    "CallInputs", "GraphMeaning", "GraphTracing", "LengthsOfDataError", "NestWork",
    "Traced", "as_values",
]  # fmt: skip

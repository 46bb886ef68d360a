"""Calls become graphs: functions over nests are loops there, user functions their bodies.

Bodies are traced once for the types of what they are given.
"""

from stitch.fractal.tracing.call_inputs import CallInputs
from stitch.fractal.tracing.graph_tracing import GraphMeaning, GraphTracing, as_values
from stitch.fractal.tracing.nest_work import NestWork
from stitch.fractal.tracing.traced import LengthsOfDataError, Traced

__all__ = [
    "CallInputs", "GraphMeaning", "GraphTracing", "LengthsOfDataError", "NestWork",
    "Traced", "as_values",
]  # fmt: skip

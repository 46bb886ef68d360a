"""Gradients: forward and backward graphs from a graph, by the operators' rules, through scans too.

Comes in: a graph, inputs whose gradients are wanted, what may be computed again. Goes out: two
graphs that are stitched by the names of their slots. Must not know: losses, placement, machines.
"""

from stitch.compiler.gradients.autodiff import differentiate
from stitch.compiler.gradients.differentiated import Differentiated
from stitch.compiler.gradients.recomputing import Recomputation, Recompute

__all__ = ["Differentiated", "Recomputation", "Recompute", "differentiate"]

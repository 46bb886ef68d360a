"""Gradients: forward and backward graphs from a graph, by the operators' rules, through scans
too.
"""

from stitch.compiler.gradients.autodiff import differentiate
from stitch.compiler.gradients.differentiated import Differentiated
from stitch.compiler.gradients.recomputing import Recomputation, Recompute

__all__ = ["Differentiated", "Recomputation", "Recompute", "differentiate"]

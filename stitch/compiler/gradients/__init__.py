"""Gradients: forward and backward graphs from a graph, by the operators' rules, through scans
too.
"""

from stitch.compiler.gradients.autodiff import differentiate
from stitch.compiler.gradients.forward_values import Differentiated, Recomputation, Recompute

__all__ = ["Differentiated", "Recomputation", "Recompute", "differentiate"]

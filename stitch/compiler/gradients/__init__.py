"""Gradients: forward and backward graphs by the operators' rules, through scans too."""

from stitch.compiler.gradients.autodiff import differentiate
from stitch.compiler.gradients.forward_values import Differentiated, Recomputation, Recompute

__all__ = [
    "differentiate", "Differentiated", "Recomputation", "Recompute",
]  # fmt: skip

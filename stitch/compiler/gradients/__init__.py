"""Gradients: forward and backward graphs by the operators' rules, through scans too."""

from stitch.compiler.gradients.autodiff import (
    differentiate,
    differentiate_parts,
    prepare_for_parts,
)
from stitch.compiler.gradients.forward_values import Differentiated, Recompute, check_recompute

__all__ = [
    "check_recompute", "differentiate", "differentiate_parts", "Differentiated",
    "prepare_for_parts", "Recompute",
]  # fmt: skip

"""Passes: one rewriting of a computation graph each; what the graph computes stays.

Comes in: a computation graph. Goes out: a smaller one, or one whose operations cost less. A pass
knows the graph and the operators; it must not know placement, gradients or the other rooms' files.
"""

from stitch.compiler.passes.constant_folding import fold_constants
from stitch.compiler.passes.matrix_products import fold_transposes, turn_products
from stitch.compiler.passes.redundancy import merge_common_subexpressions, remove_identities
from stitch.compiler.passes.scan_bodies import optimize_bodies

__all__ = [
    "fold_constants", "fold_transposes", "merge_common_subexpressions", "optimize_bodies",
    "remove_identities", "turn_products",
]  # fmt: skip

"""Passes: one rewriting of a computation graph each; what the graph computes stays.

Comes in: a computation graph. Goes out: a smaller one, or one whose operations cost less. A pass
knows the graph and the operators; it must not know placement, gradients or the other rooms' files.
"""

from stitch.compiler.passes.axis_orders import axis_order, exchange
from stitch.compiler.passes.constant_folding import fold_constants, is_repeatable
from stitch.compiler.passes.matrix_products import fold_transposes, turn_products
from stitch.compiler.passes.parts_together import compute_parts_together
from stitch.compiler.passes.redundancy import merge_common_subexpressions, remove_identities
from stitch.compiler.passes.scan_bodies import optimize_bodies
from stitch.compiler.passes.smaller_activations import pool_first

__all__ = [
    "axis_order", "compute_parts_together", "exchange", "fold_constants", "fold_transposes",
    "is_repeatable", "merge_common_subexpressions", "optimize_bodies", "pool_first",
    "remove_identities", "turn_products",
]  # fmt: skip

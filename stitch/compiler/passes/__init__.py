"""Passes: one rewriting of a computation graph each; what the graph computes stays.

A pass uses the graph and the operators only, not placement or gradients.
"""

from stitch.compiler.passes.horizontal_fusion import horizontal_fusion
from stitch.compiler.passes.matrix_products import fold_transposes, turn_products
from stitch.compiler.passes.scan_bodies import optimize_bodies
from stitch.compiler.passes.simplification import (
    axis_order,
    exchange,
    fold_constants,
    is_repeatable,
    merge_common_subexpressions,
    remove_identities,
    sink_relu_below_max_pool,
)

__all__ = [
    "axis_order", "horizontal_fusion", "exchange", "fold_constants", "fold_transposes",
    "is_repeatable", "merge_common_subexpressions", "optimize_bodies", "sink_relu_below_max_pool",
    "remove_identities", "turn_products",
]  # fmt: skip

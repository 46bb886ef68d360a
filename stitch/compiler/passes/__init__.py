"""Passes: each rewrites a computation graph and preserves what it computes."""

from stitch.compiler.passes.horizontal_fusion import horizontal_fusion
from stitch.compiler.passes.matrix_products import fold_transposes, transpose_products
from stitch.compiler.passes.scan_bodies import optimize_bodies
from stitch.compiler.passes.simplification import (
    FOLD_GROWTH_NBYTES,
    SAMPLE,
    ConstantFolder,
    axis_order,
    chosen_operand,
    constant_digest,
    constant_sample,
    exchange,
    fold_constants,
    is_repeatable,
    keeps_order,
    merge_common_subexpressions,
    remove_identities,
    sink_relu_below_max_pool,
)

__all__ = [
    "FOLD_GROWTH_NBYTES", "SAMPLE", "ConstantFolder", "axis_order", "chosen_operand",
    "constant_digest", "constant_sample", "exchange", "fold_constants", "fold_transposes",
    "horizontal_fusion", "is_repeatable", "keeps_order", "merge_common_subexpressions",
    "optimize_bodies", "remove_identities", "sink_relu_below_max_pool", "transpose_products",
]  # fmt: skip

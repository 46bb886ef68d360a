"""Many elements become one: sums, means, extremes, norms, running totals, counts."""

from stitch.ops.definition import OpDef
from stitch.ops.reduction import counting, reducing, scanning
from stitch.ops.reduction.row_statistics import (
    SPREAD_FROM,
    inverse_deviation,
    row_chunks,
    row_means,
    standardize,
)

__all__ = [
    "OPERATORS", "SPREAD_FROM", "inverse_deviation", "row_chunks", "row_means", "standardize",
]  # fmt: skip

OPERATORS: tuple[OpDef, ...] = (*reducing.OPERATORS, *scanning.OPERATORS, *counting.OPERATORS)

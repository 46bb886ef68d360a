"""Pack pieces into gaps and intervals into arenas, by bounded searches with lower bounds.

Deterministic: every search has a budget in placements, not in time.
"""

from stitch.packing.bins import (
    PLACEMENTS,
    BinPacking,
    Refutation,
    Span,
    gaps_between,
    largest_sum,
    minus,
    pack,
    union,
)
from stitch.packing.interval_packing import (
    Interval,
    IntervalPacker,
    Packing,
    max_load,
    pack_intervals,
)

__all__ = [
    "PLACEMENTS", "BinPacking", "Interval", "IntervalPacker", "Packing", "Refutation", "Span",
    "gaps_between", "largest_sum", "max_load", "minus", "pack", "pack_intervals", "union",
]  # fmt: skip

"""Packing: where pieces go such that they fit, by bounded searches with bounds from below.

The same input gives the same output, on any machine: every search takes a budget in placements, and
says whether it ended. Serves compiler, linker, planner and executors; must not know values,
programs or spaces.
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
from stitch.packing.interval_packing import Interval, Packing, max_load, pack_intervals

__all__ = [
    "PLACEMENTS",
    "BinPacking",
    "Interval",
    "Packing",
    "Refutation",
    "Span",
    "gaps_between",
    "largest_sum",
    "max_load",
    "minus",
    "pack",
    "pack_intervals",
    "union",
]

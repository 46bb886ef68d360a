"""Packing: where pieces go such that they fit, by bounded searches with bounds from below.

Comes in: sizes, lifetimes, the gaps between what cannot move. Goes out: offsets and a peak, the gap
of each piece, or the proof that none will do. The same input gives the same output, on any
machine: every search takes a budget in placements, and says whether it ended. Serves compiler,
linker, planner and executors; must not know values, programs or spaces.
"""

from stitch.packing.bins import PLACEMENTS, BinPacking, Refutation, gaps_between, pack
from stitch.packing.interval_packing import pack_intervals
from stitch.packing.intervals import Interval, Packing, max_load

__all__ = [
    "PLACEMENTS",
    "BinPacking",
    "Interval",
    "Packing",
    "Refutation",
    "gaps_between",
    "max_load",
    "pack",
    "pack_intervals",
]

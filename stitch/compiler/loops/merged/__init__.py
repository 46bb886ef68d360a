"""Merged loops: scans of one cell that differ in how many rounds they run become few scans, of rows
that are still running.

Comes in: a graph in which what a map does for all its elements stands beside its scans. Goes out:
the graph with such scans merged where that costs less, and how. Must not know: other schedules.
"""

from stitch.compiler.loops.merged.merged_loops import (
    STRETCHES,
    MergedLoops,
    MergedRows,
    merge_loops,
)

__all__ = ["STRETCHES", "MergedLoops", "MergedRows", "merge_loops"]

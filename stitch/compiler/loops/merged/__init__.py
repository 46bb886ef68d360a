"""Merged loops: scans of one cell that differ in how many rounds they run become few scans, of rows
that are still running.
"""

from stitch.compiler.loops.merged.merged_loops import (
    STRETCHES,
    MergedLoops,
    MergedRows,
    merge_loops,
)

__all__ = ["STRETCHES", "MergedLoops", "MergedRows", "merge_loops"]

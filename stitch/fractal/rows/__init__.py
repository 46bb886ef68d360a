"""Rows: which row of its data each leaf of a nest is, and how long its lists are."""

from stitch.fractal.rows.data_rows import leaf_rows, looked_up
from stitch.fractal.rows.index_map import Affine, Indexed, IndexMap, Listed, Rows
from stitch.fractal.rows.index_tree import (
    IndexTree,
    Lengths,
    Numbers,
    check_count,
    runs,
    spread,
    strides_of,
)

__all__ = [
    "Affine", "IndexMap", "IndexTree", "Indexed", "Lengths", "Listed", "Numbers", "Rows",
    "check_count", "leaf_rows", "looked_up", "runs", "spread", "strides_of",
]  # fmt: skip

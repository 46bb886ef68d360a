"""Reading and writing at places that are data: Gather, Window, Scatter, TopK, OneHot."""

from stitch.ops.definition import OpDef
from stitch.ops.indexing import gathering, scattering, window_of_rows
from stitch.ops.indexing.window_of_rows import are_in_range, row_copies, windowed

__all__ = ["OPERATORS", "are_in_range", "row_copies", "windowed"]

OPERATORS: tuple[OpDef, ...] = (
    *gathering.OPERATORS,
    *window_of_rows.OPERATORS,
    *scattering.OPERATORS,
)

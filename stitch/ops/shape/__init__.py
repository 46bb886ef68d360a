"""Operators that move, repeat, drop, make or check elements, and compute nothing with them."""

from stitch.ops.definition import OpDef
from stitch.ops.shape import generating, padding, rearranging, reshaping
from stitch.ops.shape.rearranging import slices_of
from stitch.ops.shape.reshaping import RESHAPING, known_by_type

__all__ = ["OPERATORS", "RESHAPING", "known_by_type", "slices_of"]

OPERATORS: tuple[OpDef, ...] = (
    *reshaping.OPERATORS,
    *rearranging.OPERATORS,
    *padding.OPERATORS,
    *generating.OPERATORS,
)

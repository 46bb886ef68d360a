"""Operators that move, repeat, drop, make or check elements, and compute nothing with them.

Comes in: operands, and the constants that decide shapes. Goes out: `OPERATORS`, their gradient
rules inside them. Must not know: other families.
"""

from stitch.ops.definition import OpDef
from stitch.ops.shape import checking, generating, padding, rearranging, reshaping

OPERATORS: tuple[OpDef, ...] = (
    *reshaping.OPERATORS,
    *rearranging.OPERATORS,
    *padding.OPERATORS,
    *generating.OPERATORS,
    *checking.OPERATORS,
)

"""Reading and writing at places that are data: Gather, Scatter, TopK, OneHot.

Comes in: operands and indices, which are checked before anything is read. Goes out: `OPERATORS`,
their gradient rules inside them. Must not know: other families.
"""

from stitch.ops.definition import OpDef
from stitch.ops.indexing import gathering, scattering

__all__ = ["OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (*gathering.OPERATORS, *scattering.OPERATORS)

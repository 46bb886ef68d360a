"""Move buffers to new addresses inside one space.

`arrange` chooses the addresses; `order` and `cycles` choose the transfers; `relocation` makes the
plan's step.
"""

from stitch.planner.mover.arrange import Repacking, SpaceProblem, arrange
from stitch.planner.mover.order import operation_size
from stitch.planner.mover.relocation import relocation

__all__ = ["Repacking", "SpaceProblem", "arrange", "operation_size", "relocation"]

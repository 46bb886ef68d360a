"""The mover: new addresses inside one space, and the transfers that bring buffers there.

`holes` and `arrange` say what moves where; `order`, `cycles` and `cost` say how; `relocation` makes
the step.
"""

from stitch.planner.mover.arrange import Repacking, arrange
from stitch.planner.mover.cost import operation_size
from stitch.planner.mover.holes import SpaceProblem
from stitch.planner.mover.relocation import relocation

__all__ = ["Repacking", "SpaceProblem", "arrange", "operation_size", "relocation"]

"""Tasks: what is to be done, in which order, with which values; never where or how.

Comes in: transformations defined by agents (loaded programs, copies) and references to values.
Goes out: a `Stretch` of a queue, the same object for the same work. Must not know memory or
kernels. Words follow FlexFlow: an agent defines a task, a backend executes it.
"""

from stitch.tasks.stretch import NumberedTask, Stretch
from stitch.tasks.transformation import Transformation, TransformationKind

__all__ = ["NumberedTask", "Stretch", "Transformation", "TransformationKind"]

"""Values read between elements: Resize, GridSample, DeformConv, RoiAlign.

Knows windows: a deformed convolution has some.
"""

from stitch.ops.definition import OpDef
from stitch.ops.sampling import grid_sampling, region_sampling, resampling

__all__ = ["OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (
    *resampling.OPERATORS,
    *grid_sampling.OPERATORS,
    *region_sampling.OPERATORS,
)

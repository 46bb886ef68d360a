"""Images in blocks of channels, which ONNX Runtime computes convolutions on: what of a program is
in blocks, and what that costs.
"""

from stitch.runtime.executors.blocked.blocked_convolutions import blocked_part
from stitch.runtime.executors.blocked.blocked_form import (
    NO_BLOCKS,
    POOLS,
    REORDERED,
    BlockedConvolution,
    BlockedPart,
    filters_of,
    is_depthwise,
    is_narrow,
    is_whole,
)
from stitch.runtime.executors.blocked.blocked_gains import arranging_ns

__all__ = [
    "NO_BLOCKS", "POOLS", "REORDERED", "BlockedConvolution", "BlockedPart", "arranging_ns",
    "blocked_part", "filters_of", "is_depthwise", "is_narrow", "is_whole",
]  # fmt: skip

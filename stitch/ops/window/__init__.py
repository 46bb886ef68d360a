"""What slides: convolutions and pools of any rank, and what is put together from windows."""

from stitch.ops.definition import OpDef
from stitch.ops.window import convolution, pooling, unfolding
from stitch.ops.window.convolution import CONVOLUTION, bias_steps, check_output
from stitch.ops.window.windows import (
    check_window_attributes,
    pool_windows,
    sees_everywhere,
    transposed_windows,
    turned_windows,
    windows_of,
)

__all__ = [
    "CONVOLUTION", "OPERATORS", "bias_steps", "check_output", "check_window_attributes",
    "pool_windows", "sees_everywhere", "transposed_windows", "turned_windows", "windows_of",
]  # fmt: skip

OPERATORS: tuple[OpDef, ...] = (
    *convolution.OPERATORS, *pooling.OPERATORS, *unfolding.OPERATORS,
)  # fmt: skip

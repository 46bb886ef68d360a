"""Changes of data type: casts, and numbers kept as scaled integers."""

from stitch.ops.definition import OpDef
from stitch.ops.types import casting, quantization
from stitch.ops.types.conversions import conversion_steps, workspace_nbytes
from stitch.ops.types.quantization import REALS

__all__ = ["OPERATORS", "REALS", "conversion_steps", "workspace_nbytes"]

OPERATORS: tuple[OpDef, ...] = (*casting.OPERATORS, *quantization.OPERATORS)

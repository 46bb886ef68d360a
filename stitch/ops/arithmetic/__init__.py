"""Arithmetic, functions of one operand, comparisons, logic and choices: element by element."""

from stitch.ops.arithmetic import elementary, elementwise, error_function, logic
from stitch.ops.arithmetic.error_function import ERF_WORKSPACES, erf_steps
from stitch.ops.definition import OpDef

__all__ = ["ERF_WORKSPACES", "OPERATORS", "erf_steps"]

OPERATORS: tuple[OpDef, ...] = (
    *elementwise.OPERATORS,
    *elementary.OPERATORS,
    *error_function.OPERATORS,
    *logic.OPERATORS,
)

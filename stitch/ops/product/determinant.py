"""Determinants of square matrices: Det."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.ops.definition import KernelArguments, OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.workspaces import operands
from stitch.program import ValueType


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_rank(0, 2)
    if x.shape[-1] != x.shape[-2]:
        raise context.fail("Det takes square matrices", got=str(list(x.shape)))
    return (ValueType(x.shape[:-2], x.data_type),)


def _det(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]

    def run() -> None:
        out[...] = np.linalg.det(x)

    return (run,)


OPERATORS = (OpDef("Det", (1, 1), _infer, _det, workspace=operands(3, is_kept=False)),)

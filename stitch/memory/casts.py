"""Casts between element types as stages of a strip.

Comes in: two data types and a number of elements. Goes out: stages. Must not know: layouts.

A cast is what `Cast` computes, bit for bit: both go by way of the compute types and share
`stitch.ops.conversion_steps`. The rules are those of ONNX, with its undefined cases defined:
* float to float rounds to nearest even, once; too large becomes infinite; NaN stays NaN. A block
  format takes float32, which wider types reach rounded to odd: there, too, one rounding counts.
* integer to float rounds to nearest even, once; integer to integer keeps the low bits (wraps).
* float to integer truncates toward zero; out of range saturates; NaN becomes 0.
* to bool is `!= 0` (NaN is true); bool is 0 or 1.
* float8 and float4 saturate, float8_e8m0 rounds up; int4 and int2 keep the low bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.memory.cells import Bytes
from stitch.memory.stages import Call, Stage, typed
from stitch.ops import conversion_steps, workspace_nbytes
from stitch.program import DataType


def cast_stages(source: DataType, target: DataType, count: int) -> tuple[Stage, ...]:
    """The stages that cast `count` elements; the dense elements of block formats are float32."""
    if source is target:
        return ()
    before, after = source.compute_dtype, target.compute_dtype
    stages = []
    if not source.is_block and source.dtype != before:
        stages.append(_converting(source.dtype, before, count))
    if before != after:
        rounds_again = target.is_block or target.dtype != after
        stages.append(_converting(before, after, count, rounds_again))
    if not target.is_block and target.dtype != after:
        stages.append(_converting(after, target.dtype, count))
    return tuple(stages)


def _converting(
    before: np.dtype[Any], after: np.dtype[Any], count: int, rounds_again: bool = False
) -> Stage:
    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        ours, theirs = typed(source, before, count), typed(target, after, count)
        return [*conversion_steps(ours, theirs, scratch, rounds_again=rounds_again)]

    scratch_nbytes = count * workspace_nbytes(before, after, rounds_again)
    return Stage(count * after.itemsize, calls, scratch_nbytes)

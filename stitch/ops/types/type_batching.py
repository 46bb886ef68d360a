"""Batching of conversions and of quantization, whose scales may be one for each lane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stitch.ops.batching import BatchingContext


def cast_like(c: BatchingContext) -> Sequence[Any]:
    """Of the second operand only the type counts."""
    return c.again(c.broadcast(0), c.operands[1])


def quantized(c: BatchingContext) -> Sequence[Any]:
    """Quantize- and DequantizeLinear: one number, one for each place of an axis, or for a block."""
    scale, has_zero = c.shape(1), c.has(2)
    is_one = math.prod(scale) == 1 and len(scale) <= 1
    behind = 0 if is_one else c.axis_behind(c.int_of("axis"))
    zero = c.operands[2] if has_zero else None
    if not c.varies(1, 2):
        if c.int_of("block_size") and not is_one:
            return c.again(*c.all_broadcast(), axis=behind)
        return c.again(c.operands[0], c.operands[1], zero, axis=behind)
    if is_one:
        # A number for each lane: for each place of the first axis.
        numbers = [c.shaped(c.broadcast(i), (c.lanes,)) for i in (1, 2) if c.has(i)]
        return c.again(c.broadcast(0), *numbers, axis=0, block_size=0)
    if c.int_of("block_size"):
        return c.again(*c.all_broadcast(), axis=behind)
    axis = behind - 1
    numbers = [c.folded(i) for i in (1, 2) if c.has(i)]
    return (c.split(c.again(c.folded(0, axis), *numbers, axis=axis)[0], axis),)

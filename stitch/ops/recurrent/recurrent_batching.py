"""Batching of recurrent layers: lanes are sequences, where they share the weights.

Comes in: operations for many lanes (`stitch.ops.batching`). Goes out: the same, once; weights that
differ from lane to lane have no form of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.batching import BatchingContext

#: Weights, recurrent weights, biases, peepholes.
_WEIGHTS = (1, 2, 3, 7)


def recurrent(c: BatchingContext) -> Sequence[Any] | None:
    if c.varies(*_WEIGHTS):
        return None
    by_batch = bool(c.int_of("layout"))
    operands = [
        c.operands[i]
        if i in _WEIGHTS
        # Lengths have samples only; operand and states have them first, or second.
        else c.folded(i, 0 if by_batch or i == 4 else 1)
        for i in range(len(c.operands))
    ]
    results = c.again(*operands)
    # All states: steps, directions, samples. The last ones: directions, samples.
    axes = (0, 0, 0) if by_batch else (2, 1, 1)
    return tuple(c.split(r, axis) for r, axis in zip(results, axes, strict=False))

"""A model with named sizes that has every kind of part: quotients, guards, constants of sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

import stitch

W = np.arange(8, dtype=np.float32).reshape(2, 4)


def rich(x: Any) -> Any:
    """Use sizes as shapes, constants, quotients and in comparisons."""
    n, m = x.shape
    if n > 4:
        x = x * 2
    halves = x[: n // 2]
    flat = x.reshape(n * m)
    return halves + 1, flat, np.broadcast_to(x[:1, :2], (n * n - n + 1, 2)) @ W


def rich_model(**options: Any) -> stitch.DynamicModel:
    """Compile `rich` at 8 x 3."""
    axes = {"x": {0: stitch.Dim("n", 2, 40), 1: stitch.Dim("m", 2, 9)}}
    model: stitch.DynamicModel = stitch.compile(
        rich, (np.zeros((8, 3), np.float32),), dynamic_shapes=axes, **options
    )
    return model

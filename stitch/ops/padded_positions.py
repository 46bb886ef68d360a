"""Where the elements that padding adds come from, along one axis."""

from __future__ import annotations

import numpy as np

from stitch.program import Array


def source_positions(mode: str, size: int, begin: int, length: int) -> Array:
    """For each padded position along an axis, the source position that it repeats."""
    position = np.arange(-begin, length - begin)
    if mode == "edge":
        return position.clip(0, size - 1)
    if mode == "wrap":
        return position % size
    if size == 1:
        return np.zeros(length, np.intp)
    folded = position % (2 * (size - 1))
    return np.minimum(folded, 2 * (size - 1) - folded)

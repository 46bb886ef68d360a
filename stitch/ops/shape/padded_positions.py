"""Where the elements that padding adds come from, along one axis."""

from __future__ import annotations

import numpy as np

from stitch.program import Array


def source_positions(mode: str, size: int, begin: int, length: int) -> Array:
    """For each padded position along an axis, the source position that it repeats."""
    # Reduced as Python's integers first: what is cut away may be as long as 64 bits can say.
    if mode == "edge":
        begin = min(max(begin, -size), length)
        return np.arange(-begin, length - begin).clip(0, size - 1)
    if mode == "wrap":
        start = -begin % size
        return np.arange(start, start + length) % size
    if size == 1:
        return np.zeros(length, np.intp)
    period = 2 * (size - 1)
    start = -begin % period
    folded = np.arange(start, start + length) % period
    return np.minimum(folded, period - folded)

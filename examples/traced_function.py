"""A Python function becomes a program: NumPy's own functions work on what is traced.

The function runs once, on symbolic tensors. Arrays that it closes over become constants of the
file; the shapes of the example inputs are fixed in it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import stitch

RANDOM = np.random.default_rng(0)
PROJECTION = RANDOM.standard_normal((16, 48), dtype=np.float32) / np.float32(4)


def attention(x: Any) -> Any:
    """Self-attention over a sequence [T, 16]; arrays and traced tensors go through the same lines.

    Softmax is spelt out, as NumPy has none.
    """
    projected = np.matmul(x, PROJECTION)
    query, key, value = projected[:, :16], projected[:, 16:32], projected[:, 32:]
    scores = np.matmul(query, key.T) * np.float32(0.25)
    powers = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    return np.matmul(powers / np.sum(powers, axis=1, keepdims=True), value)


def main() -> int:
    """Trace, show the program, run it twice on its own result, compare with NumPy."""
    x = RANDOM.standard_normal((8, 16), dtype=np.float32)
    model = stitch.compile(attention, [x], target="wormhole_n150")
    print(model.text())
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(model)
        stitched = np.asarray(program(program(x)))
        print(device.explain())
    difference = float(np.abs(stitched - attention(attention(x))).max())
    print(f"\nlargest difference from the same function on NumPy arrays: {difference:.1e}")
    return 0 if difference <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())

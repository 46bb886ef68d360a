"""A stacked LSTM: an outer scan over layers, whose weights are zipped, around one over words.

The cell gives two results, so the inner scan gives two nests, of which one goes to the next layer.
A cell waits for the one before it and the one below, so those on a diagonal do not wait for each
other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

LAYERS, WORDS, BATCH, HIDDEN = 3, 5, 2, 8


def cell(state: Any, x: Any, *, w: Any, u: Any, b: Any) -> Any:
    said, kept = state
    i, f, o, new = np.split(x @ w + said @ u + b, 4, axis=1)
    kept = ops.sigmoid(f) * kept + ops.sigmoid(i) * ops.tanh(new)
    return ops.sigmoid(o) * ops.tanh(kept), kept


def layer(xs: Any, weights: Any) -> Any:
    w, u, b = weights
    zero = np.zeros((BATCH, HIDDEN), np.float32)
    said, _ = ops.scan(cell, xs, (zero, zero), w=w, u=u, b=b)
    return said


def network(xs: Any, *, ws: Any, us: Any, bs: Any) -> Any:
    """What each layer says at each word: [layers][words] of [batch, hidden]."""
    return ops.scan(layer, ops.zip(ws, us, bs), xs)


def inputs() -> dict[str, Any]:
    """Words of a batch, and the layers' weights: input, forget, output, new, side by side."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return ops.FractalTensor(random.standard_normal(shape, np.float32) * np.float32(0.3))

    return {
        "xs": normal(WORDS, BATCH, HIDDEN),
        "ws": normal(LAYERS, HIDDEN, 4 * HIDDEN),
        "us": normal(LAYERS, HIDDEN, 4 * HIDDEN),
        "bs": normal(LAYERS, 1, 4 * HIDDEN),
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"stacked LSTM: {states.length} layers of {states[0].length} words, "
          f"mean of the last {float(states[-1].numpy()[-1].mean()):+.4f}")  # fmt: skip


if __name__ == "__main__":
    main()

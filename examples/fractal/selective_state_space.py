"""A selective state-space layer (Mamba): a scan whose step sizes are computed from the words.

First what does not depend on the state, by maps; then the scan, which is elementwise; then what
each state says. The short convolution before is a slide, cut so that no word sees a later one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

WORDS, HIDDEN, WIDTH, STATES, NEAR = 6, 4, 8, 3, 4


def opened(word: Any, *, w_in: Any) -> Any:
    return tuple(np.split(word @ w_in, 2))


def near(window: Any, *, kernel: Any) -> Any:
    x = (ops.stack(window) * kernel).sum(axis=0)
    return x * ops.sigmoid(x)


def selected(x: Any, *, a: Any, w_step: Any, b_step: Any, w_put: Any, w_read: Any) -> Any:
    """How much of a state is kept, what is put into it, and how it is read."""
    size = np.log(np.exp(x @ w_step + b_step) + np.float32(1)).reshape(WIDTH, 1)
    kept = ops.exp(size * a)
    put = size * x.reshape(WIDTH, 1) * (x @ w_put).reshape(1, STATES)
    return kept, put, x @ w_read


def step(state: Any, kept: Any, put: Any) -> Any:
    return state * kept + put


def closed(state: Any, reading: Any, x: Any, gate: Any, *, skip: Any, w_out: Any) -> Any:
    return ((state @ reading + skip * x) * gate * ops.sigmoid(gate)) @ w_out


def network(words: Any, *, w_in: Any, kernel: Any, skip: Any, w_out: Any, **selecting: Any) -> Any:
    """The words after the layer: [words] of [hidden]."""
    xs, gates = ops.map(opened, words, w_in=w_in)
    before = np.zeros(WIDTH, np.float32)
    windows = ops.slide(xs, NEAR, padding=NEAR - 1, padding_value=before)[: len(xs)]
    xs = ops.map(near, windows, kernel=kernel)
    kept, put, readings = ops.map(selected, xs, **selecting)
    states = ops.scan(step, ops.zip(kept, put), np.zeros((WIDTH, STATES), np.float32))
    return ops.map(closed, ops.zip(states, readings, xs, gates), skip=skip, w_out=w_out)


def inputs() -> dict[str, Any]:
    """Words, and the layer's weights; states decay, so `a` is negative."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.5)

    return {
        "words": ops.FractalTensor(normal(WORDS, HIDDEN)), "w_in": normal(HIDDEN, 2 * WIDTH),
        "kernel": normal(NEAR, WIDTH), "a": -np.abs(normal(WIDTH, STATES)),
        "w_step": normal(WIDTH, WIDTH), "b_step": normal(WIDTH), "w_put": normal(WIDTH, STATES),
        "w_read": normal(WIDTH, STATES), "skip": normal(WIDTH), "w_out": normal(WIDTH, HIDDEN),
    }  # fmt: skip


def main() -> None:
    """Run it, and say what came out."""
    words = network(**inputs())
    print(f"selective state space: {words.length} words of {words.leaf_shape[0]}, "
          f"{WIDTH}x{STATES} states")  # fmt: skip


if __name__ == "__main__":
    main()

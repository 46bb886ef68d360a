"""A bidirectional network: a scan from the left, one from the right, and both side by side.

`scanr` puts each state at the place of its word, so the two nests need only be zipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

HIDDEN = 8


def cell(state: Any, word: Any, *, w: Any, u: Any) -> Any:
    return np.tanh(word @ w + state @ u)


def both(left: Any, right: Any) -> Any:
    return ops.cat(left, right, axis=1)


def read(words: Any, *, w_left: Any, u_left: Any, w_right: Any, u_right: Any) -> Any:
    zero = np.zeros((1, HIDDEN), np.float32)
    from_left = ops.scanl(cell, words, zero, w=w_left, u=u_left)
    from_right = ops.scanr(cell, words, zero, w=w_right, u=u_right)
    return ops.map(both, ops.zip(from_left, from_right))


def network(sentences: Any, **weights: Any) -> Any:
    """Both states of each word: [sentences][words] of [1, 2 * hidden]."""
    return ops.map(read, sentences, **weights)


def inputs() -> dict[str, Any]:
    """Sentences of different lengths, and the weights of both directions."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    weights = ("w_left", "u_left", "w_right", "u_right")
    return {
        "sentences": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (4, 1, 6)]),
        **{name: normal(HIDDEN, HIDDEN) for name in weights},
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"bidirectional RNN: words {states.width_by_depth(1)}, {states.leaf_shape[1]} features")


if __name__ == "__main__":
    main()

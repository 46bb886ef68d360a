"""A stacked recurrent network: map over sentences, scan over layers, scan over words.

The state of the scan over layers is the sentence itself: each layer turns it into the next one's.
Sentences have lengths of their own, and nothing is padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

LAYERS, HIDDEN = 3, 8


def cell(state: Any, word: Any, *, w: Any, u: Any, b: Any) -> Any:
    return np.tanh(word @ w + state @ u + b)


def layer(words: Any, weights: Any) -> Any:
    w, u, b = weights
    return ops.scan(cell, words, np.zeros((1, HIDDEN), np.float32), w=w, u=u, b=b)


def network(sentences: Any, *, ws: Any, us: Any, bs: Any) -> Any:
    """What each layer says of each word: [sentences][layers][words] of [1, hidden]."""
    layers = ops.zip(ws, us, bs)
    return ops.map(lambda words: ops.scan(layer, layers, words), sentences)


def inputs() -> dict[str, Any]:
    """Three sentences of different lengths, and the layers' weights."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    return {
        "sentences": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (4, 2, 5)]),
        "ws": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
        "us": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
        "bs": ops.FractalTensor(normal(LAYERS, 1, HIDDEN)),
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"stacked RNN: {len(states)} sentences of {states[0].length} layers each, "
          f"words {[layers[-1].length for layers in states]}")  # fmt: skip


if __name__ == "__main__":
    main()

"""A dilated network: layer k reads each 2^k-th word, so states reach far back in few steps.

`dilate` gives the strands of a sentence, of which each is scanned by itself; joined and gathered,
the states stand in the order of the words again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

HIDDEN, DILATIONS = 8, (1, 2, 4)


def cell(state: Any, word: Any, *, w: Any, u: Any) -> Any:
    return np.tanh(word @ w + state @ u)


def scanned(strand: Any, **weights: Any) -> Any:
    return ops.scan(cell, strand, np.zeros((1, HIDDEN), np.float32), **weights)


def layer(words: Any, dilation: int, **weights: Any) -> Any:
    strands = ops.map(scanned, ops.dilate(words, dilation), **weights)
    # Where each word stands in the strands one after the other.
    order = np.argsort(np.arange(len(words)) % dilation, kind="stable")
    return ops.gather(ops.join(*ops.unbind(strands)), np.argsort(order))


def read(words: Any, *, ws: Any, us: Any) -> Any:
    for number, dilation in enumerate(DILATIONS):
        words = layer(words, dilation, w=ws[number], u=us[number])
    return words


def network(sentences: Any, *, ws: Any, us: Any) -> Any:
    """The states of the last layer: [sentences][words] of [1, hidden]."""
    return ops.map(read, sentences, ws=ws, us=us)


def inputs() -> dict[str, Any]:
    """Sentences of different lengths, and the layers' weights."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    return {
        "sentences": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (9, 6, 2)]),
        "ws": ops.FractalTensor(normal(len(DILATIONS), HIDDEN, HIDDEN)),
        "us": ops.FractalTensor(normal(len(DILATIONS), HIDDEN, HIDDEN)),
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"dilated RNN: dilations {DILATIONS}, words {states.width_by_depth(1)}")


if __name__ == "__main__":
    main()

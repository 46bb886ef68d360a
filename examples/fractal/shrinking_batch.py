"""A batch that shrinks: sentences sorted by length, word by word, those that ended leave.

Words come as one list for each place: of all sentences first, then of those that are longer. The
state is a nest as long as the list of the place, so no step computes padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

LAYERS, HIDDEN, LENGTHS = 2, 8, (5, 3, 3, 1)


def cell(state: Any, word: Any, *, w: Any, u: Any) -> Any:
    return np.tanh(word @ w + state @ u)


def step(states: Any, words: Any, **weights: Any) -> Any:
    """The states of the sentences that go on."""
    return ops.map(cell, ops.zip(states[: len(words)], words), **weights)


def layer(places: Any, weights: Any) -> Any:
    w, u = weights
    zeros = ops.FractalTensor(np.zeros((len(places[0]), 1, HIDDEN), np.float32))
    return ops.scan(step, places, zeros, w=w, u=u)


def network(places: Any, *, ws: Any, us: Any) -> Any:
    """The states of the last layer: [places][sentences that go on] of [1, hidden]."""
    return ops.fold(layer, ops.zip(ws, us), places)


def inputs() -> dict[str, Any]:
    """The words of four sentences, longest first, by place, and the layers' weights."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    going_on = [sum(length > place for length in LENGTHS) for place in range(max(LENGTHS))]
    return {
        "places": ops.FractalTensor([list(normal(count, 1, HIDDEN)) for count in going_on]),
        "ws": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
        "us": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"shrinking batch: {states.numel} words of {len(LENGTHS)} sentences, "
          f"{states.width_by_depth(1)} at each place")  # fmt: skip


if __name__ == "__main__":
    main()

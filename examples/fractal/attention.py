"""Sequence to sequence with attention: one scan reads, another one writes and looks back.

Each step of the second scan compares its state with all states of the first, by a map over them,
and adds to it what these say, weighted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

HIDDEN = 8


def cell(state: Any, word: Any, *, w: Any, u: Any) -> Any:
    return ops.tanh(word @ w + state @ u)


def score(read: Any, *, state: Any, by_read: Any, by_state: Any, to_score: Any) -> Any:
    return ops.tanh(read @ by_read + state @ by_state) @ to_score


def step(state: Any, word: Any, *, reads: Any, w: Any, u: Any, **scoring: Any) -> Any:
    state = cell(state, word, w=w, u=u)
    weights = ops.softmax(ops.flatten(ops.map(score, reads, state=state, **scoring)), axis=0)
    return state + weights.T @ ops.flatten(reads)


def pair(source: Any, target: Any, *, w_read: Any, u_read: Any, **writing: Any) -> Any:
    zero = np.zeros((1, HIDDEN), np.float32)
    reads = ops.scan(cell, source, zero, w=w_read, u=u_read)
    return ops.scan(step, target, zero, reads=reads, **writing)


def network(sources: Any, targets: Any, **weights: Any) -> Any:
    """The states of the words written: [pairs][target words] of [1, hidden]."""
    return ops.map(pair, ops.zip(sources, targets), **weights)


def inputs() -> dict[str, Any]:
    """Pairs of sentences, and the weights of both scans and of the scores."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    square = ("w_read", "u_read", "w", "u", "by_read", "by_state")
    return {
        "sources": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (4, 2)]),
        "targets": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (3, 5)]),
        **{name: normal(HIDDEN, HIDDEN) for name in square},
        "to_score": normal(HIDDEN, 1),
    }


def main() -> None:
    """Run it, and say what came out."""
    states = network(**inputs())
    print(f"sequence to sequence with attention: {states.width_by_depth(1)} words written")


if __name__ == "__main__":
    main()

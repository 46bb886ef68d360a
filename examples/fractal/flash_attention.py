"""Flash attention: a map over blocks of queries, in it a fold over blocks of keys and values.

The state has the largest score so far, the sum of the powers and what they weigh, both relative to
that score; so no matrix of all scores ever exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

HEADS, BLOCKS, BLOCK, WIDTH = 2, 3, 4, 8


def step(state: Any, key: Any, value: Any, *, query: Any) -> Any:
    largest, total, weighed = state
    scores = query @ key.T * np.float32(WIDTH**-0.5)
    new = np.maximum(largest, scores.max(axis=1, keepdims=True))
    before, powers = np.exp(largest - new), np.exp(scores - new)
    total = total * before + powers.sum(axis=1, keepdims=True)
    return new, total, weighed * before + powers @ value


def block(query: Any, *, keys: Any, values: Any) -> Any:
    lowest = np.full((BLOCK, 1), -1e30, np.float32)
    start = lowest, np.zeros((BLOCK, 1), np.float32), np.zeros((BLOCK, WIDTH), np.float32)
    _, total, weighed = ops.fold(step, ops.zip(keys, values), start, query=query)
    return weighed / total


def head(queries: Any, keys: Any, values: Any) -> Any:
    return ops.map(block, queries, keys=keys, values=values)


def network(queries: Any, keys: Any, values: Any) -> Any:
    """What each block of each head sees: [heads][blocks] of [block, width]."""
    return ops.map(head, ops.zip(queries, keys, values))


def inputs() -> dict[str, Any]:
    """Queries, keys and values of each head, in blocks."""
    random = np.random.default_rng(0)

    def blocks() -> Any:
        array = random.standard_normal((HEADS, BLOCKS, BLOCK, WIDTH), np.float32)
        return ops.FractalTensor([list(head) for head in array])

    return {"queries": blocks(), "keys": blocks(), "values": blocks()}


def main() -> None:
    """Run it, and say how far it is from attention with all scores at once."""
    given = inputs()
    found = network(**given).numpy().reshape(HEADS, -1, WIDTH)
    q, k, v = [nest.numpy().reshape(HEADS, -1, WIDTH) for nest in given.values()]
    powers = np.exp(q @ k.swapaxes(1, 2) * WIDTH**-0.5)
    whole = powers / powers.sum(axis=2, keepdims=True) @ v
    print(f"flash attention: {HEADS} heads of {BLOCKS} blocks, "
          f"differs by {np.abs(found - whole).max():.1e} from all at once")  # fmt: skip


if __name__ == "__main__":
    main()

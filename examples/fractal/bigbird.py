"""Sparse attention as BigBird has it: a window, the global blocks, and some blocks by chance.

The first block is global: it sees all others, and is seen by all. Windows go round at the ends.
Which blocks are looked at by chance is given as numbers; all of it is access to parts, no mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

BLOCKS, BLOCK, WIDTH = 7, 2, 8
#: For each block after the first: blocks that lie neither in its window nor are global.
BY_CHANCE = ((3, 4), (4, 5), (5, 1), (6, 2), (1, 3), (2, 4))


def attend(query: Any, keys: Any, values: Any) -> Any:
    scores = query @ ops.flatten(keys).T * np.float32(WIDTH**-0.5)
    return ops.softmax(scores) @ ops.flatten(values)


def looked_at(xs: Any) -> Any:
    """For each block after the first, three in its window, and two by chance."""
    chosen = ops.gather(xs, [number for numbers in BY_CHANCE for number in numbers])
    return ops.shifted_slide(xs[1:], 3), ops.split(chosen, len(BY_CHANCE))


def sparse(query: Any, *parts: Any, first_key: Any, first_value: Any) -> Any:
    near_keys, keys, near_values, values = parts
    return attend(
        query, ops.cat(first_key, near_keys, keys), ops.cat(first_value, near_values, values)
    )


def network(queries: Any, keys: Any, values: Any) -> Any:
    """What each block sees, the global one and the others: [1] and [blocks - 1] of [block,
    width]."""
    seen = ops.map(
        sparse, ops.zip(queries[1:], *looked_at(keys), *looked_at(values)),
        first_key=keys[:1], first_value=values[:1],
    )  # fmt: skip
    return ops.map(attend, queries[:1], keys, values), seen


def inputs() -> dict[str, Any]:
    """Queries, keys and values, in blocks."""
    random = np.random.default_rng(0)
    names = ("queries", "keys", "values")
    shape = (BLOCKS, BLOCK, WIDTH)
    return {name: ops.FractalTensor(random.standard_normal(shape, np.float32)) for name in names}


def main() -> None:
    """Run it, and say what came out."""
    _, seen = network(**inputs())
    print(f"BigBird: {seen.length} blocks look at {1 + 3 + len(BY_CHANCE[0])} of {BLOCKS} blocks")


if __name__ == "__main__":
    main()

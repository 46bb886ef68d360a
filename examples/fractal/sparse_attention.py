"""Sparse attention over windows: each word sees some around it, near ones and, dilated, far ones.

Windows go round at the ends of a sentence. They are views of its keys and values: nothing is
copied, and there is no mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

WIDTH, WINDOW, DILATIONS = 4, 3, (1, 3)


def attend(query: Any, keys: Any, values: Any) -> Any:
    scores = query @ ops.stack(keys).T * np.float32(WIDTH**-0.5)
    return ops.softmax(scores) @ ops.stack(values)


def look(queries: Any, keys: Any, values: Any) -> Any:
    """A nest for each dilation, of what each word sees."""
    seen = []
    for dilation in DILATIONS:
        windows = ops.shifted_slide(ops.zip(keys, values), WINDOW, dilation)
        seen.append(ops.map(attend, ops.zip(queries, *windows)))
    return tuple(seen)


def network(queries: Any, keys: Any, values: Any) -> Any:
    """For each dilation what each word sees: [sentences][words] of [width]."""
    return ops.map(look, ops.zip(queries, keys, values))


def inputs() -> dict[str, Any]:
    """Queries, keys and values of sentences of different lengths."""
    random = np.random.default_rng(0)

    def sentences() -> Any:
        lengths = (7, 8)
        return ops.FractalTensor(
            [list(random.standard_normal((length, WIDTH), np.float32)) for length in lengths]
        )

    return {"queries": sentences(), "keys": sentences(), "values": sentences()}


def main() -> None:
    """Run it, and say what came out."""
    near, _ = network(**inputs())
    print(f"sparse attention: words {near.width_by_depth(1)} see {WINDOW} each, "
          f"{' and '.join(map(str, DILATIONS))} apart")  # fmt: skip


if __name__ == "__main__":
    main()

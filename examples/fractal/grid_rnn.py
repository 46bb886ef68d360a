"""A grid network over pairs of sentences: map over pairs, fold over layers, scan over rows and in
each row.

`product` gives the grid: a cell for each word of one sentence beside each of the other. A cell
reads the states of the one before it in both directions, and gives one for either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

LAYERS, HIDDEN = 2, 4


def cell(state: Any, above: Any, x: Any, y: Any, *, wx: Any, ux: Any, wy: Any, uy: Any) -> Any:
    _, before = state
    states = ops.cat(above, before, axis=1)
    return ops.tanh(x @ wx + states @ ux), ops.tanh(y @ wy + states @ uy)


def row(state: Any, words: Any, **weights: Any) -> Any:
    above, _ = state
    xs, ys = words
    zero = np.zeros((1, HIDDEN), np.float32)
    return ops.scan(cell, ops.zip(above, xs, ys), (zero, zero), **weights)


def layer(grid: Any, weights: Any) -> Any:
    xss, yss = grid
    wx, ux, wy, uy = weights
    zeros = ops.FractalTensor(np.zeros((len(xss[0]), 1, HIDDEN), np.float32))
    return ops.scan(row, ops.zip(xss, yss), (zeros, zeros), wx=wx, ux=ux, wy=wy, uy=uy)


def pair(sources: Any, targets: Any, *, layers: Any) -> Any:
    return ops.fold(layer, layers, ops.product(sources, targets))


def network(sources: Any, targets: Any, *, wxs: Any, uxs: Any, wys: Any, uys: Any) -> Any:
    """Two nests of [pairs][target words][source words] of [1, hidden], one for each direction."""
    return ops.map(pair, ops.zip(sources, targets), layers=ops.zip(wxs, uxs, wys, uys))


def inputs() -> dict[str, Any]:
    """Pairs of sentences, and the layers' weights for both directions."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    return {
        "sources": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (3, 2)]),
        "targets": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (2, 4)]),
        "wxs": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
        "uxs": ops.FractalTensor(normal(LAYERS, 2 * HIDDEN, HIDDEN)),
        "wys": ops.FractalTensor(normal(LAYERS, HIDDEN, HIDDEN)),
        "uys": ops.FractalTensor(normal(LAYERS, 2 * HIDDEN, HIDDEN)),
    }


def main() -> None:
    """Run it, and say what came out."""
    across, _ = network(**inputs())
    grids = [f"{grid.length}x{grid[0].length}" for grid in across]
    print(f"grid RNN: {LAYERS} layers over grids of {', '.join(grids)}")


if __name__ == "__main__":
    main()

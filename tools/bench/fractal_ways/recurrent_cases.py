"""Recurrent networks over nests, with peers: stacked LSTM, dilated RNN, grid RNN.

Weights are closed over, so they are constants of the program, as they are parameters of the peers.
Each network is written for elements: nothing here says that it is an LSTM, or which cells may run
together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fractal_ways.cases import Case, Peer, RatioGoal
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.program import Array

#: Best of ours / PyTorch's loops of the same nest, not compiled.
EAGER_GOAL = 1.0
#: Of a stacked LSTM, by its width: 2.8 times as fast at 64, 2.2 times from there on.
LSTM_EAGER_GOALS = {64: 1 / 2.8, 128: 1 / 2.2, 256: 1 / 2.2}
#: Best of ours / `nn.LSTM`; of narrow ones, where it has most calls beside its arithmetic.
LSTM_GOAL, NARROW_LSTM_GOAL, NARROW = 1.1, 0.8, 8
#: A layer reads each word that is so many back.
DILATIONS = (1, 2, 4, 8, 16, 32)
GRID_LAYERS = 2
#: Sizes of what also runs one operation after the other: depth, length, batch, hidden.
SMALL = (2, 4, 2, 8)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    """Random numbers, the same each time."""
    random = np.random.default_rng((seed, *shape))
    return random.standard_normal(shape, np.float32) * np.float32(scale)


def eager_goals(most: float = EAGER_GOAL) -> tuple[RatioGoal, ...]:
    """What holds of every nest that PyTorch runs as loops."""
    return (RatioGoal("EAGER_GOAL", "torch eager loops", most),)


def loop_peers(function: str, *arguments: Any, compiled: bool) -> tuple[Peer, ...]:
    """The same nest as loops in PyTorch, also through torch.compile."""

    def make(is_compiled: bool) -> Any:
        from fractal_ways import torch_peers

        return torch_peers.loops(function, arguments, is_compiled=is_compiled)

    peers = [Peer("torch eager loops", lambda: make(False))]
    if compiled:
        peers.append(Peer("torch.compile of the loops", lambda: make(True)))
    return tuple(peers)


# A stacked LSTM ----------------------------------------------------------------------------------


def lstm_cell(state: Any, x: Any, w: Any, u: Any, b: Any) -> Any:
    """One word in one layer."""
    said, kept = state
    i, f, o, new = np.split(x @ w + said @ u + b, 4, axis=1)
    kept = ops.sigmoid(f) * kept + ops.sigmoid(i) * ops.tanh(new)
    return ops.sigmoid(o) * ops.tanh(kept), kept


def lstm_weights(depth: int, hidden: int) -> tuple[Array, Array, Array]:
    """Of all layers: input, forget, output, new, side by side."""
    scale = hidden**-0.5
    return (
        normal(depth, hidden, 4 * hidden, scale=scale),
        normal(depth, hidden, 4 * hidden, scale=scale, seed=1),
        normal(depth, 1, 4 * hidden, scale=0.1),
    )


def lstm_network(ws: Any, us: Any, bs: Any, batch: int, hidden: int) -> Any:
    """A fold over layers around a scan over words: a function of the words."""
    zero = np.zeros((batch, hidden), np.float32)

    def layer(xs: Any, weights: Any) -> Any:
        w, u, b = weights
        said, _ = ops.scan(lstm_cell, xs, (zero, zero), w=w, u=u, b=b)
        return said

    def network(xs: Any) -> Any:
        return ops.fold(layer, ops.zip(FractalTensor(ws), FractalTensor(us), FractalTensor(bs)), xs)

    return network


def stacked_lstm(
    depth: int, length: int, batch: int, hidden: int, compiled: bool, small: bool = True
) -> Case:
    """Words [length] of [batch, hidden]; what the last layer says."""
    weights, xs = lstm_weights(depth, hidden), normal(length, batch, hidden)

    def of_torch() -> Any:
        from fractal_ways import torch_peers

        return torch_peers.lstm_module(xs, *weights)

    def of_onnx(model: str) -> Any:
        from fractal_ways import onnx_peers

        return onnx_peers.lstm(model, xs, *weights)

    return Case(
        f"stacked LSTM, hidden {hidden}, depth {depth}",
        f"{depth} layers, {length} words, batch {batch}, hidden {hidden}",
        lstm_network(*weights, batch, hidden), (FractalTensor(xs),),
        (
            *loop_peers("stacked_lstm", xs, *weights, compiled=compiled),
            Peer("torch.nn.LSTM", of_torch),
            Peer("onnxruntime, LSTM operators", lambda: of_onnx("operators")),
            Peer("onnxruntime, Scan of cells", lambda: of_onnx("scans")),
            Peer("onnxruntime, Scan, inputs before it", lambda: of_onnx("hoisted scans")),
        ),
        (
            *eager_goals(LSTM_EAGER_GOALS.get(hidden, EAGER_GOAL)),
            RatioGoal(
                "LSTM_GOAL", "torch.nn.LSTM", NARROW_LSTM_GOAL if hidden <= NARROW else LSTM_GOAL
            ),
        ),
        stacked_lstm(*SMALL, compiled=False, small=False) if small else None,
    )  # fmt: skip


# A dilated RNN -----------------------------------------------------------------------------------


def rnn_cell(state: Any, x: Any, *, w: Any, u: Any) -> Any:
    """One word in one layer."""
    return np.tanh(x @ w + state @ u)


def dilated_rnn(length: int, batch: int, hidden: int, compiled: bool, small: bool = True) -> Case:
    """Words [length] of [batch, hidden]; layer k reads each 2^k-th."""
    dilations = tuple(d for d in DILATIONS if d <= length)
    scale, layers = hidden**-0.5, len(dilations)
    ws, us = (normal(layers, hidden, hidden, scale=scale, seed=seed) for seed in (0, 1))
    xs, zero = normal(length, batch, hidden), np.zeros((batch, hidden), np.float32)

    def strand(words: Any, **weights: Any) -> Any:
        return ops.scan(rnn_cell, words, zero, **weights)

    def network(words: Any) -> Any:
        for dilation, w, u in zip(dilations, ws, us, strict=True):
            strands = ops.map(strand, ops.dilate(words, dilation), w=w, u=u)
            order = np.argsort(np.arange(length) % dilation, kind="stable")
            words = ops.gather(ops.join(*ops.unbind(strands)), np.argsort(order))
        return words

    _, few, rows, width = SMALL
    return Case(
        "dilated RNN", f"dilations {dilations}, {length} words, batch {batch}, hidden {hidden}",
        network, (FractalTensor(xs),),
        loop_peers("dilated_rnn", xs, ws, us, dilations, compiled=compiled),
        eager_goals(), dilated_rnn(few, rows, width, False, False) if small else None,
    )  # fmt: skip


# A grid RNN --------------------------------------------------------------------------------------


def grid_cell(state: Any, above: Any, x: Any, y: Any, *, wx: Any, ux: Any, wy: Any, uy: Any) -> Any:
    """A cell reads the states of the ones before it in both directions, and gives one for
    either."""
    _, before = state
    states = ops.cat(above, before, axis=1)
    return ops.tanh(x @ wx + states @ ux), ops.tanh(y @ wy + states @ uy)


def grid_rnn(side: int, batch: int, hidden: int, compiled: bool, small: bool = True) -> Case:
    """Two sequences [side] of [batch, hidden]; what the cells of the last layer say, [side, side]
    in either direction."""
    shapes = ((hidden, hidden), (2 * hidden, hidden)) * 2
    weights = [
        normal(GRID_LAYERS, *shape, scale=0.5 * shape[0] ** -0.5, seed=seed)
        for seed, shape in enumerate(shapes)
    ]
    sources, targets = (normal(side, batch, hidden, seed=seed) for seed in (4, 5))
    zero = np.zeros((batch, hidden), np.float32)
    zeros = FractalTensor(np.zeros((side, batch, hidden), np.float32))

    def row(state: Any, words: Any, **parts: Any) -> Any:
        above, _ = state
        xs, ys = words
        return ops.scan(grid_cell, ops.zip(above, xs, ys), (zero, zero), **parts)

    def layer(grid: Any, parts: Any) -> Any:
        xss, yss = grid
        wx, ux, wy, uy = parts
        return ops.scan(row, ops.zip(xss, yss), (zeros, zeros), wx=wx, ux=ux, wy=wy, uy=uy)

    def network(words: Any, others: Any) -> Any:
        return ops.fold(layer, ops.zip(*map(FractalTensor, weights)), ops.product(words, others))

    return Case(
        "grid RNN", f"{GRID_LAYERS} layers, {side}x{side} cells, batch {batch}, hidden {hidden}",
        network, (FractalTensor(sources), FractalTensor(targets)),
        loop_peers("grid_rnn", sources, targets, *weights, compiled=compiled),
        eager_goals(), grid_rnn(3, SMALL[2], SMALL[3], False, False) if small else None,
    )  # fmt: skip

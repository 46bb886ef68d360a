"""A training step of the stacked LSTM: forward, mean squared error, backward, SGD, the loss read;
beside PyTorch with `torch.nn.LSTM`.

Losses of some steps are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import stitch
from fractal_ways.cases import Absent, RatioGoal, Run, reason_of
from fractal_ways.measuring import interleaved
from fractal_ways.ours import MACHINE
from fractal_ways.recurrent_cases import lstm_cell, lstm_weights, normal
from fractal_ways.results import OURS, PEER, Result, Row
from stitch import fractal as ops
from stitch import training
from stitch.errors import StitchError
from stitch.fractal import FractalTensor
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array

RATE, COMPARED = 0.1, 3
#: Best of ours / the same step with `nn.LSTM`.
TRAINING_GOAL = 1.2


def measured(
    depth: int, length: int, batch: int, hidden: int, executors: Sequence[str], rounds: int
) -> Result:
    """Steps by each executor; raises `AssertionError` where losses differ."""
    xs, wanted = normal(length, batch, hidden), normal(length, batch, hidden, scale=0.1, seed=9)
    weights = lstm_weights(depth, hidden)
    found: list[tuple[str, str, Run]] = []
    absent: list[Absent] = []
    with ExitStack() as stack:
        name = "torch.nn.LSTM"
        try:
            from fractal_ways import torch_training

            found.append((name, PEER, torch_training.step(xs, wanted, *weights, rate=RATE)))
        except ImportError as error:
            absent.append(Absent(name, reason_of(error)))
        for executor in executors:
            name = f"stitch {executor}"
            try:
                step = _our_step(xs, wanted, weights, executor, stack)
                losses = [step() for _ in range(COMPARED)]
            except StitchError as error:
                absent.append(Absent(name, reason_of(error)))
                continue
            found.append((name, OURS, step))
            if found[0][1] == PEER:
                _check(name, losses, xs, wanted, weights)
        spent = interleaved([step for _, _, step in found], rounds) if found else []
    rows = [Row.of(name, side, s) for (name, side, _), s in zip(found, spent, strict=True)]
    text = f"{depth} layers, {length} words, batch {batch}, hidden {hidden}; MSE, SGD"
    goals = (RatioGoal("TRAINING_GOAL", "torch.nn.LSTM", TRAINING_GOAL),)
    return Result("training step, stacked LSTM", text, tuple(rows), tuple(absent), goals)


def _check(name: str, losses: list[float], xs: Array, wanted: Array, weights: Any) -> None:
    from fractal_ways import torch_training

    theirs = torch_training.step(xs, wanted, *weights, rate=RATE)
    expected = [theirs() for _ in range(COMPARED)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=name)


def _graph(shape: Sequence[int], weights: tuple[Array, Array, Array]) -> ComputationGraph:
    """The nest, whose weights are parameters."""
    builder = ComputationGraphBuilder("stacked_lstm")
    xs = builder.input("xs", shape, "float32")
    named = zip(("ws", "us", "bs"), weights, strict=True)
    nests = [FractalTensor(builder.parameter(name, array)) for name, array in named]
    zero = np.zeros(shape[1:], np.float32)

    def layer(words: Any, parts: Any) -> Any:
        w, u, b = parts
        said, _ = ops.scan(lstm_cell, words, (zero, zero), w=w, u=u, b=b)
        return said

    builder.output("said", ops.stack(ops.fold(layer, ops.zip(*nests), FractalTensor(xs))))
    return builder.build()


def _our_step(
    xs: Array, wanted: Array, weights: tuple[Array, Array, Array], executor: str, stack: ExitStack
) -> Run:
    """Forward, loss, backward, update; raises `StitchError` where something has no gradient."""
    compiled = stitch.compile(
        _graph(xs.shape, weights), target=MACHINE, optimizer=training.SGD(lr=RATE),
        loss=training.losses.MSELoss(), executor=executor,
    )  # fmt: skip
    assert compiled.training is not None
    device = stack.enter_context(stitch.open_device(MACHINE, executor=executor))
    model = stack.enter_context(compiled.training.start(device))
    stepper, compute_loss = compiled.training.optimizer, compiled.training.loss

    def step() -> float:
        loss = compute_loss(model(xs), wanted)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return float(loss.item())

    return step

"""Small models in training, theirs and ours, and the loop that both are driven through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array

FEATURES, HIDDEN = 10, 32


def mlp(
    batch: int = 16, outputs: int = 1, *, hidden: int = HIDDEN, name: str = "mlp"
) -> ComputationGraph:
    """Linear, ReLU, linear, with weights as constants of the graph."""
    rng = np.random.default_rng(7)
    b = ComputationGraphBuilder(name)

    def weight(slot: str, *shape: int) -> Any:
        return b.parameter(slot, (rng.standard_normal(shape) * 0.3).astype(np.float32))

    x = b.input("x", (batch, FEATURES), "float32")
    first = b.linear(x, weight("fc1.weight", hidden, FEATURES), weight("fc1.bias", hidden))
    h = b.relu(first)
    b.output("y", b.linear(h, weight("fc2.weight", outputs, hidden), weight("fc2.bias", outputs)))
    return b.build()


def torch_mlp(model: stitch.CompiledModel) -> Any:
    """The same network in torch, with the values that ours starts from."""
    assert model.training is not None
    values = model.training.values
    hidden, features = values["fc1.weight"].shape
    made = torch.nn.Sequential(
        torch.nn.Linear(features, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, values["fc2.weight"].shape[0]),
    )
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    with torch.no_grad():
        for parameter, name in zip(made.parameters(), names, strict=True):
            parameter.copy_(torch.from_numpy(values[name].copy()))
    return made


def batches(count: int, batch: int = 16, outputs: int = 1) -> list[tuple[Array, Array]]:
    """Batches of inputs and of labels that depend on them."""
    rng = np.random.default_rng(3)
    mixing = rng.standard_normal((FEATURES, outputs)).astype(np.float32)
    made = []
    for _ in range(count):
        x = rng.standard_normal((batch, FEATURES)).astype(np.float32)
        made.append((x, np.tanh(x @ mixing).astype(np.float32)))
    return made


def train(
    model: stitch.CompiledModel, data: list[tuple[Array, Array]], steps: int | None = None
) -> list[float]:
    """The seed's loop; gives the loss of every step."""
    assert model.training is not None
    loss_fn, optimizer = model.training.loss, model.training.optimizer
    losses = []
    for step in range(len(data) if steps is None else steps):
        x, y = data[step % len(data)]
        pred = model(x)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torch_train(
    module: Any,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Any],
    data: list[tuple[Array, Array]],
    steps: int,
    *,
    clip: float | None = None,
) -> list[float]:
    """The same loop in torch."""
    losses = []
    for step in range(steps):
        x, y = data[step % len(data)]
        loss = loss_fn(module(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(optimizer: Any = None, loss: Any = "mse", **options: Any) -> stitch.CompiledModel:
    """The small MLP, compiled for training."""
    chosen = stitch.SGD(lr=0.05) if optimizer is None else optimizer
    graph = options.pop("graph", None) or mlp()
    model: stitch.CompiledModel = stitch.compile(graph, optimizer=chosen, loss=loss, **options)
    return model


def values_of(prediction: object) -> Array:
    """What a model's call predicts: a future while it trains, else a tensor."""
    assert isinstance(prediction, stitch.Tensor | stitch.TensorFuture)
    return prediction.numpy()

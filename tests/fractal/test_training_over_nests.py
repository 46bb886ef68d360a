"""Networks written as nests train: a stacked LSTM that reads digits row by row learns as PyTorch's,
and what nests are differentiated to is what loops of PyTorch's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.graph import trace
from stitch.program import Array, InputKind

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"
LAYERS, HIDDEN, BATCH, CLASSES = 2, 8, 64, 10
PARAMETERS = ("w", "u", "b", "head")


def rows_of_digits(count: int) -> tuple[Array, Array]:
    """Images as sequences of their rows, `[8, count, 8]`, and what they show."""
    with np.load(DIGITS) as data:
        images = data["images"][:count].reshape(count, 8, 8).transpose(1, 0, 2)
        return images.astype(np.float32) / 16, data["labels"][:count].astype(np.int64)


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(5)
    shapes = {
        "w": (LAYERS, 8, 4 * HIDDEN), "u": (LAYERS, HIDDEN, 4 * HIDDEN), "b": (LAYERS, 4 * HIDDEN),
        "head": (HIDDEN, CLASSES),
    }  # fmt: skip
    return {
        name: draw.standard_normal(shape, np.float32) * np.float32(0.4)
        for name, shape in shapes.items()
    }


def cell(state: Any, x: Any, w: Any, u: Any, b: Any) -> Any:
    said, kept = state
    i, f, o, new = np.split(x @ w + said @ u + b, 4, axis=1)
    kept = ops.sigmoid(f) * kept + ops.sigmoid(i) * ops.tanh(new)
    return ops.sigmoid(o) * ops.tanh(kept), kept


def network(x: Any, w: Any, u: Any, b: Any, head: Any) -> Any:
    """Scores of the classes after the last row."""
    zero = np.zeros((BATCH, HIDDEN), np.float32)

    def layer(xs: Any, part: Any) -> Any:
        return ops.scan(cell, xs, (zero, zero), w=part[0], u=part[1], b=part[2])[0]

    layers = ops.zip(*map(ops.FractalTensor, (w, u, b)))
    return ops.tail(ops.fold(layer, layers, ops.FractalTensor(x))) @ head


def of_torch(x: Any, w: Any, u: Any, b: Any, head: Any) -> Any:
    said = list(x)
    for layer in range(LAYERS):
        h = c = torch.zeros(BATCH, HIDDEN)
        for number, row in enumerate(said):
            i, f, o, new = torch.split(row @ w[layer] + h @ u[layer] + b[layer], HIDDEN, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(new)
            h = torch.sigmoid(o) * torch.tanh(c)
            said[number] = h
    return said[-1] @ head


@pytest.mark.parametrize(
    ("executor", "recompute"), [("numpy", "all"), ("onnxruntime", "none"), ("auto", "none")]
)
def test_a_stacked_lstm_learns_to_read_digits_as_pytorchs_does(
    executor: str, recompute: str
) -> None:
    images, labels = rows_of_digits(4 * BATCH)
    start = weights()
    kinds = dict.fromkeys(PARAMETERS, InputKind.PARAMETER)
    graph = trace(network, images[:, :BATCH], *start.values(), kinds=kinds)
    assert len(graph.operations) < 24  # Loops stay loops.
    loss_fn = stitch.losses.CrossEntropyLoss()
    optimizer = stitch.Adam(lr=0.02)
    model = stitch.compile(
        graph, target="host", optimizer=optimizer, loss=loss_fn, weights=start, recompute=recompute
    )
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    other = torch.optim.Adam(list(theirs.values()), lr=0.02)
    losses: list[tuple[float, float]] = []
    with stitch.open_device("host", executor=executor) as device:
        model.start(device)
        for step in range(16):
            part = slice(step % 4 * BATCH, (step % 4 + 1) * BATCH)
            loss = loss_fn(model(images[:, part]), labels[part])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scores = of_torch(torch.from_numpy(images[:, part]), **theirs)
            wanted = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[part]))
            other.zero_grad()
            wanted.backward()
            other.step()
            losses.append((float(loss.item()), float(wanted.detach())))
    ours, pytorchs = np.array(losses).T
    np.testing.assert_allclose(ours, pytorchs, rtol=2e-3)
    np.testing.assert_allclose(ours[:4], pytorchs[:4], rtol=1e-5)
    assert losses[-1][0] < 0.85 * losses[0][0]

"""Gradients of normalizations lose no more digits than torch's, however far the mean is off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stitch.compiler import differentiate
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array
from tests.support.gradients.running import backward_feeds, run

ROWS, WIDTH = 512, 96


def torch_gradients(
    x: Array, scale: Array, seed: Array, data_type: torch.dtype, *, centres: bool
) -> list[Array]:
    a, w = (torch.tensor(v, dtype=data_type, requires_grad=True) for v in (x, scale))
    if centres:
        y = torch.nn.functional.layer_norm(a, (WIDTH,), w, eps=1e-5)
    else:
        y = torch.nn.functional.rms_norm(a, (WIDTH,), w, eps=1e-5)
    y.backward(torch.tensor(seed, dtype=data_type))
    assert a.grad is not None
    assert w.grad is not None
    return [a.grad.numpy(), w.grad.numpy()]


def our_gradients(op: str, x: Array, scale: Array, seed: Array) -> list[Array]:
    b = ComputationGraphBuilder("net")
    operands = [b.input("x", x.shape, x.dtype), b.input("w", scale.shape, x.dtype)]
    if op == "LayerNormalization":
        b.output("y", b.layer_norm(*operands, epsilon=1e-5))
    else:
        b.output("y", b.apply(op, operands, 1, {"epsilon": 1e-5})[0])
    both = differentiate(b.build(), ["x", "w"])
    feeds = {"x": x, "w": scale}
    results = run(both.forward, feeds)
    made = run(both.backward, backward_feeds(both, feeds, results, {"y.grad": seed}))
    return [made["x.grad"], made["w.grad"]]


@pytest.mark.parametrize("ratio", [0.0, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_as_exact_as_torch_at_every_ratio_of_mean_and_deviation(op: str, ratio: float) -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(0, 1, (ROWS, WIDTH)) + ratio).astype(np.float32)
    scale = rng.normal(1, 0.3, WIDTH).astype(np.float32)
    seed = rng.normal(0, 1, x.shape).astype(np.float32)
    centres = op == "LayerNormalization"
    truth = torch_gradients(x, scale, seed, torch.float64, centres=centres)
    theirs = torch_gradients(x, scale, seed, torch.float32, centres=centres)
    for ours, other, exact in zip(our_gradients(op, x, scale, seed), theirs, truth, strict=True):
        size = np.abs(exact).max()
        # Where both are as good as float32 is, neither has to be the better one.
        allowed = max(2 * np.abs(other - exact).max(), 2e-6 * size)
        assert np.abs(ours - exact).max() <= allowed


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_gradients_of_float64_have_its_digits(op: str) -> None:
    rng = np.random.default_rng(5)
    x, seed = rng.normal(1, 1, (2, ROWS, WIDTH))
    scale = rng.normal(1, 0.3, WIDTH)
    centres = op == "LayerNormalization"
    truth = torch_gradients(x, scale, seed, torch.float64, centres=centres)
    for ours, exact in zip(our_gradients(op, x, scale, seed), truth, strict=True):
        assert ours.dtype == np.float64
        assert np.abs(ours - exact).max() <= 1e-13 * np.abs(exact).max()

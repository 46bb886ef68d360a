"""Gradients of normalizations lose no more digits than torch's, however far the mean is off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stitch.compiler import differentiate
from stitch.graph import ComputationGraphBuilder
from stitch.ops import evaluate
from stitch.program import Array
from stitch.testing import backward_feeds
from stitch.testing import evaluate_graph as run

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


@pytest.mark.parametrize("shape", [(64, 4, 28, 28), (64, 4, 3, 3), (200, 4), (3, 4, 100, 100)])
def test_channels_far_from_zero_are_normalised_as_exactly_as_others(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    x, seed = rng.normal(0, 1, (2, *shape)).astype(np.float32)
    # One number everywhere, and numbers between which float32 has but a few others.
    x[:, 1] = 53_000.1
    x[:, 2] = 50_000 + rng.normal(0, 0.1, x[:, 2].shape)
    x[:, 3] += 300
    scale, shift = rng.normal(1, 0.3, (2, 4)).astype(np.float32)
    zero, one = np.zeros(4, np.float32), np.ones(4, np.float32)
    attributes = {"training_mode": 1, "momentum": 0.0}
    y, mean, variance = evaluate(
        "BatchNormalization", [x, scale, shift, zero, one], attributes=attributes, outputs=3
    )
    a, w, b = (torch.from_numpy(v).double().requires_grad_() for v in (x, scale, shift))
    exact = F.batch_norm(a, None, None, w, b, training=True)
    slopes = torch.autograd.grad(exact, (a, w, b), torch.from_numpy(seed).double())
    apart = (0, *range(2, len(shape)))
    # What a rounded number of each channel's is worth in deviations.
    worth = np.array([1e-6, 1e-6, 0.05, 1e-4])
    off = np.abs(y - exact.detach().numpy()).max(apart)
    assert (off <= worth).all(), off
    for more in ([], [mean, variance]):
        made = evaluate(
            "BatchNormalizationGradient", [seed, x, scale, *more], domain="stitch", outputs=3
        )
        off = np.abs(made[0] - slopes[0].numpy()).max(apart)
        off /= np.abs(slopes[0].numpy()).max(apart)
        assert (off <= 1e-6 + 0.02 * worth).all(), off
        np.testing.assert_allclose(made[2], slopes[2].numpy(), rtol=1e-4, atol=1e-3)


def test_momentum_that_keeps_nothing_gives_this_batch_whatever_was_before() -> None:
    x = np.random.default_rng(2).normal(0, 1, (8, 3, 4)).astype(np.float32)
    one, wild = np.ones(3, np.float32), np.array([np.inf, np.nan, 1e38], np.float32)
    _, mean, variance = evaluate(
        "BatchNormalization", [x, one, one, wild, wild],
        attributes={"training_mode": 1, "momentum": 0.0}, outputs=3,
    )  # fmt: skip
    np.testing.assert_allclose(mean, x.mean((0, 2)), atol=1e-6)
    np.testing.assert_allclose(variance, x.var((0, 2)), rtol=1e-5)

"""Trains the two parts of the digits network with plain NumPy, and writes `weights.npz`.

Features: x[N, 64] / 16 -> 96 -> 48, each a Gemm and a Relu. Classifier: 48 -> 10, a Gemm and a
Softmax. Adam on shuffled batches, in which every image is shifted by up to a pixel, so that the
few images that there are do not become known by heart. The seed fixes the result (up to the last
bits, which depend on the BLAS).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
SEED = 0
WIDTHS = (64, 96, 48, 10)
EPOCHS = 200
BATCH = 32
SIDE = 8
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-4
MOMENTS = (0.9, 0.999)

Floats = NDArray[np.float32]
Weights = dict[str, Floats]


def initial_weights(random: np.random.Generator) -> Weights:
    """He initialisation: weights w1..w3 as [in, out], biases b1..b3."""
    weights: Weights = {}
    for layer, (rows, columns) in enumerate(pairwise(WIDTHS), start=1):
        scale = np.sqrt(2 / rows)
        weights[f"w{layer}"] = (random.standard_normal((rows, columns)) * scale).astype(np.float32)
        weights[f"b{layer}"] = np.zeros(columns, np.float32)
    return weights


def forward(weights: Weights, x: Floats) -> tuple[Floats, Floats, Floats]:
    """Both hidden layers, and the probabilities of the ten digits [N, 10]."""
    first = np.maximum(x @ weights["w1"] + weights["b1"], 0)
    features = np.maximum(first @ weights["w2"] + weights["b2"], 0)
    scores = features @ weights["w3"] + weights["b3"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return first, features, powers / powers.sum(axis=1, keepdims=True)


def gradients(weights: Weights, x: Floats, labels: NDArray[np.uint8]) -> Weights:
    """Of the mean cross entropy of a batch, by hand."""
    first, features, probabilities = forward(weights, x)
    error = probabilities
    error[np.arange(len(x)), labels] -= 1
    error /= len(x)
    found: Weights = {}
    for layer, inputs in ((3, features), (2, first), (1, x)):
        found[f"w{layer}"] = inputs.T @ error
        found[f"b{layer}"] = error.sum(axis=0)
        error = (error @ weights[f"w{layer}"].T) * (inputs > 0)
    return found


def shifted(x: Floats, random: np.random.Generator) -> Floats:
    """Each image [N, 64] moved by -1, 0 or 1 pixels down and across; what enters is empty."""
    padded = np.pad(x.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    down, across = random.integers(0, 3, (2, len(x), 1, 1))
    rows, columns = np.arange(SIDE)[:, None] + down, np.arange(SIDE) + across
    moved: Floats = padded[np.arange(len(x))[:, None, None], rows, columns]
    return moved.reshape(len(x), -1)


def train(x: Floats, labels: NDArray[np.uint8]) -> Weights:
    """The trained weights, float32."""
    random = np.random.default_rng(SEED)
    weights = initial_weights(random)
    mean = {name: np.zeros_like(w) for name, w in weights.items()}
    spread = {name: np.zeros_like(w) for name, w in weights.items()}
    step = 0
    for epoch in range(EPOCHS):
        rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        order = random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            batch = shifted(x[rows], random)
            step += 1
            for name, gradient in gradients(weights, batch, labels[rows]).items():
                mean[name] += (1 - MOMENTS[0]) * (gradient - mean[name])
                spread[name] += (1 - MOMENTS[1]) * (gradient**2 - spread[name])
                towards = mean[name] / (1 - MOMENTS[0] ** step)
                size = np.sqrt(spread[name] / (1 - MOMENTS[1] ** step)) + 1e-8
                weights[name] -= np.float32(rate) * (
                    towards / size + WEIGHT_DECAY * weights[name]
                ).astype(np.float32)
    return weights


def main() -> None:
    """Train, print the accuracy on both halves, write the weights beside this file."""
    with np.load(HERE / "digits.npz") as digits:
        x = digits["images"].astype(np.float32) / 16
        labels, parts = digits["labels"], {n: digits[n] for n in ("train", "held_out")}
    weights = train(x[parts["train"]], labels[parts["train"]])
    for name, rows in parts.items():
        right = forward(weights, x[rows])[2].argmax(axis=1) == labels[rows]
        print(f"{name}: {right.mean():.4f} of {len(rows)} recognised")
    np.savez(HERE / "weights.npz", **weights)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

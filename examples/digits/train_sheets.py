"""Trains detector and classifier with Stitch, on sheets of the digits to train on: `sheets.npz`.

Run once; takes half a minute. The seeds fix the result, up to the last bits, which depend on the
BLAS.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sheet_networks import (
    CLASSIFIER,
    DETECTOR,
    WEIGHTS,
    Floats,
    Weights,
    classifier,
    cuts_of,
    detector,
    initial_weights,
    maps_of,
    shrunk,
)
from sheets import Sheet, draw_sheets

import stitch
from stitch.graph import ComputationGraph
from stitch.training.losses import Loss

SHEETS = 400
SEED = 0
#: Pixels by which the detector's boxes are wrong, about: the classifier learns from such ones.
SHIFT = 1.6
SHIFTED = 3


def train(
    graph: ComputationGraph, loss_fn: Loss, x: Floats, label: NDArray[np.generic], *,
    names: Weights, batch: int, epochs: int, rate: float, decay: float = 0.0,
) -> dict[str, Floats]:  # fmt: skip
    """The weights of a network that learned these examples in shuffled batches."""
    steps = epochs * (len(x) // batch)
    schedule = stitch.schedules.WarmupLR(20, stitch.schedules.CosineAnnealingLR(steps))
    optimizer = stitch.AdamW(lr=rate, weight_decay=decay, schedule=schedule)
    model = stitch.compile(graph, optimizer=optimizer, loss=loss_fn)
    random = np.random.default_rng(SEED)
    with model.start() as instance:
        for epoch in range(1, epochs + 1):
            losses = []
            order = random.permutation(len(x))
            for start in range(0, len(x) - batch + 1, batch):
                rows = order[start : start + batch]
                losses += instance.step([(x[rows], label[rows])])
            print(f"{graph.name} epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)
        return {name: instance.get_tensor(name) for name in names}


def train_detector(sheets: list[Sheet]) -> dict[str, Floats]:
    """Learns the maps of sheets."""
    x = np.concatenate([shrunk(sheet.image) for sheet in sheets])
    label = np.stack([maps_of(sheet.boxes) for sheet in sheets])
    weights = initial_weights(DETECTOR, SEED)
    return train(detector(weights, 8), stitch.losses.MSELoss(), x, label,
                 names=weights, batch=8, epochs=12, rate=4e-3)  # fmt: skip


def train_classifier(sheets: list[Sheet]) -> dict[str, Floats]:
    """Learns what is in boxes that are slightly wrong, as the detector's are."""
    random = np.random.default_rng(SEED)
    x, label = [], []
    for sheet in sheets:
        for _ in range(SHIFTED):
            wrong = random.normal(0, SHIFT, sheet.boxes.shape).astype(np.float32)
            x.append(cuts_of(sheet.image, sheet.boxes + wrong))
            label.append(sheet.labels)
    weights = initial_weights(CLASSIFIER, SEED)
    graph = classifier(weights, 64, scores=True)
    return train(graph, stitch.losses.CrossEntropyLoss(), np.concatenate(x),
                 np.concatenate(label).astype(np.int64), names=weights, batch=64, epochs=8,
                 rate=4e-3, decay=0.1)  # fmt: skip


def main() -> None:
    """Draw, train both, write `sheets.npz` beside this file."""
    sheets = draw_sheets("train", SHEETS, SEED)
    weights = train_detector(sheets) | train_classifier(sheets)
    np.savez_compressed(WEIGHTS, **weights)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""The data and weights of the digits example are what its README says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", DIGITS / "train_weights.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_images_and_labels_are_scikit_learns() -> None:
    # Takes more than a second to import, which each worker would do to collect tests.
    from sklearn.datasets import load_digits

    bundled = load_digits()
    with np.load(DIGITS / "digits.npz") as digits:
        assert digits["images"].dtype == np.uint8
        assert np.array_equal(digits["images"], bundled.data)
        assert np.array_equal(digits["labels"], bundled.target)


def test_the_stored_weights_recognise_held_out_digits() -> None:
    with np.load(DIGITS / "digits.npz") as digits, np.load(DIGITS / "weights.npz") as weights:
        rows = digits["held_out"]
        x = digits["images"][rows].astype(np.float32) / 16
        right = training().forward(weights, x)[2].argmax(axis=1) == digits["labels"][rows]
        assert {weights[name].dtype for name in weights.files} == {np.dtype(np.float32)}
    assert right.mean() >= 0.97


@pytest.mark.campaign("training")
def test_training_again_gives_weights_as_good_as_the_stored_ones() -> None:
    train = training()
    with np.load(DIGITS / "digits.npz") as digits:
        x, labels = digits["images"].astype(np.float32) / 16, digits["labels"]
        rows, held_out = digits["train"], digits["held_out"]
    weights = train.train(x[rows], labels[rows])
    right = train.forward(weights, x[held_out])[2].argmax(axis=1) == labels[held_out]
    assert right.mean() >= 0.97

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


def test_the_split_is_complete_disjoint_and_stratified() -> None:
    with np.load(DIGITS / "digits.npz") as digits:
        train, held_out, labels = digits["train"], digits["held_out"], digits["labels"]
    assert (len(train), len(held_out)) == (1437, 360)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(len(labels)))
    expected = np.bincount(labels) * 0.2
    assert np.abs(np.bincount(labels[held_out]) - expected).max() <= 1


def test_the_stored_weights_recognise_held_out_digits() -> None:
    with np.load(DIGITS / "digits.npz") as digits, np.load(DIGITS / "weights.npz") as weights:
        rows = digits["held_out"]
        x = digits["images"][rows].astype(np.float32) / 16
        right = training().forward(weights, x)[2].argmax(axis=1) == digits["labels"][rows]
        assert {weights[name].dtype for name in weights.files} == {np.dtype(np.float32)}
    assert right.mean() >= 0.97


def test_gradients_agree_with_finite_differences() -> None:
    train = training()
    random = np.random.default_rng(1)
    weights = {n: w.astype(np.float64) for n, w in train.initial_weights(random).items()}
    x, labels = random.random((5, 64)), np.array([0, 3, 9, 1, 3], np.uint8)

    def loss() -> float:
        chosen = train.forward(weights, x)[2][np.arange(5), labels]
        return float(-np.log(chosen).mean())

    found = train.gradients(weights, x, labels)
    for name, weight in weights.items():
        place = np.unravel_index(np.abs(found[name]).argmax(), weight.shape)
        before, step = weight[place], 1e-6
        weight[place] = before + step
        above = loss()
        weight[place] = before - step
        slope = (above - loss()) / (2 * step)
        weight[place] = before
        assert found[name][place] == pytest.approx(slope, rel=1e-4)


@pytest.mark.campaign("training")
def test_training_again_gives_weights_as_good_as_the_stored_ones() -> None:
    train = training()
    with np.load(DIGITS / "digits.npz") as digits:
        x, labels = digits["images"].astype(np.float32) / 16, digits["labels"]
        rows, held_out = digits["train"], digits["held_out"]
    weights = train.train(x[rows], labels[rows])
    right = train.forward(weights, x[held_out])[2].argmax(axis=1) == labels[held_out]
    assert right.mean() >= 0.97

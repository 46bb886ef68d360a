"""The training loop: equal to torch step by step, and nothing but batches and metrics travels."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.program import DataType, InputKind
from tests.support.stitched_models import held_by
from tests.support.training.models import (
    batches,
    compiled,
    mlp,
    torch_mlp,
    torch_train,
    train,
    values_of,
)


def test_four_micro_batches_step_like_one_batch_of_four_times_the_size() -> None:
    whole = compiled(stitch.SGD(lr=0.1))
    parts = compiled(stitch.SGD(lr=0.1), graph=mlp(4), accumulation_steps=4)
    assert parts.training is not None
    for x, y in batches(5):
        (expected,) = train(whole, [(x, y)])
        losses = []
        for i in range(0, 16, 4):
            loss = parts.training.loss(parts(x[i : i + 4]), y[i : i + 4])
            loss.backward()
            losses.append(loss.item())
        parts.training.optimizer.step()
        parts.training.optimizer.zero_grad()
        assert np.mean(losses) == pytest.approx(expected, abs=1e-6)
    for name, value in whole.instance.parameters().items():
        np.testing.assert_allclose(parts.instance.get_tensor(name), value, atol=1e-6)


def test_clipped_steps_equal_those_of_torch() -> None:
    model = compiled(stitch.SGD(lr=0.05), "mse_sum", clip_grad_norm=0.5)
    theirs = torch_mlp(model)
    stepped = torch.optim.SGD(theirs.parameters(), lr=0.05)

    def loss(pred: Any, label: Any) -> Any:
        return torch.nn.functional.mse_loss(pred, label, reduction="sum")

    data = batches(5)
    expected = torch_train(theirs, stepped, loss, data, 20, clip=0.5)
    np.testing.assert_allclose(train(model, data, 20), expected, rtol=1e-4)
    assert model.instance.get_tensor("gradient_norm") > 0.5


def test_bfloat16_programs_have_float32_masters() -> None:
    exact = train(compiled(stitch.AdamW(lr=0.003)), batches(5), 40)
    model = compiled(stitch.AdamW(lr=0.003), precision=DataType.BFLOAT16)
    rounded = train(model, batches(5), 40)
    assert rounded[-1] == pytest.approx(exact[-1], abs=0.02)
    assert rounded[-1] < rounded[0] / 2
    instance = model.instance
    master = instance.get_tensor("fc1.weight.master")
    weight = instance.get_tensor("fc1.weight")
    assert (weight.dtype.name, master.dtype.name) == ("bfloat16", "float32")
    np.testing.assert_array_equal(master.astype(weight.dtype), weight)
    assert not np.array_equal(master, weight.astype(np.float32))


def saved_by(model: stitch.CompiledModel) -> list[str]:
    """The names of the forward program's outputs besides the prediction."""
    return [slot.name for slot in model.binary.programs[0].outputs if slot.name != "y"]


def test_recomputing_gives_the_same_steps_from_other_saved_values() -> None:
    plain = compiled()
    cheap, everything = compiled(recompute="cheap"), compiled(recompute="all")
    assert saved_by(plain) == ["saved.relu"]
    assert saved_by(cheap) == ["saved.gemm"]
    assert saved_by(everything) == []
    expected = train(plain, batches(4), 8)
    assert train(cheap, batches(4), 8) == expected
    assert train(everything, batches(4), 8) == expected


def test_training_stops_and_gives_its_memory_back_when_the_model_leaves_its_scope() -> None:
    optimizer = stitch.SGD(lr=0.1)
    with stitch.open_device("tiny") as device:
        model = compiled(optimizer, target="tiny")
        with model.start(device):
            train(model, batches(2))
        device.flush()
        assert held_by(device) == []
        with pytest.raises(stitch.StitchError, match="no training uses this optimizer"):
            optimizer.step()
        other = compiled(optimizer, target="tiny")
        other.start(device)
        del other
        gc.collect()
        device.flush()
        assert optimizer.bound_to is None


def test_backward_reads_a_buffer_as_forward_read_it() -> None:
    b = stitch.ComputationGraphBuilder("decaying")
    x = b.input("x", (4, 3), "float32")
    w = b.input("w", (3,), "float32", InputKind.PARAMETER)
    scale = b.input("scale", (3,), "float32", InputKind.STATE)
    b.output("y", x * (w * scale))
    b.output("scale", scale * 0.5)
    values = {"w": np.ones(3, np.float32), "scale": np.full(3, 8, np.float32)}
    model = stitch.compile(
        b.build(), optimizer=stitch.SGD(lr=0.0), loss="identity_sum", weights=values
    )
    assert model.training is not None
    x_value = np.arange(12, dtype=np.float32).reshape(4, 3)
    for step in range(6):
        model.training.loss(model(x_value), 0.0).backward()
        expected = x_value.sum(0) * 8 * 0.5**step
        np.testing.assert_array_equal(model.instance.get_tensor("w.grad"), expected)
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
        assert model.instance.get_tensor("scale")[0] == 8 * 0.5 ** (step + 1)


def test_a_graph_with_batch_statistics_keeps_them_and_predicts_by_them() -> None:
    b = stitch.ComputationGraphBuilder("normalized")
    x = b.input("x", (8, 6, 4, 4), "float32")
    kinds = {"scale": InputKind.PARAMETER, "shift": InputKind.PARAMETER}
    kinds |= {"mean": InputKind.STATE, "variance": InputKind.STATE}
    operands = [b.input(name, (6,), "float32", kind) for name, kind in kinds.items()]
    made = b.apply("BatchNormalization", [x, *operands], 3, {"training_mode": 1})
    for name, value in zip(("y", "mean", "variance"), made, strict=True):
        b.output(name, value)
    zeros, ones = np.zeros(6, np.float32), np.ones(6, np.float32)
    values = {"scale": ones, "shift": zeros, "mean": zeros, "variance": ones}
    model = stitch.compile(b.build(), optimizer="sgd", loss="mse", weights=values)
    assert model.training is not None
    x_value = np.random.default_rng(1).normal(3, 2, (8, 6, 4, 4)).astype(np.float32)
    for _ in range(60):
        model.training.loss(model(x_value), x_value).backward()
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
    found = model.instance.get_tensor("mean")
    np.testing.assert_allclose(found, x_value.mean((0, 2, 3)), rtol=0.01)
    predicted = model.instance.predict(x_value).numpy()
    np.testing.assert_allclose(predicted, values_of(model(x_value)), atol=0.05)

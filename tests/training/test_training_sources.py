"""Losses and schedules as torch has them, and models from YAML, ONNX and functions in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import stitch
from stitch.errors import UsageError
from stitch.program import Array, InputKind
from stitch.training import as_trainable, optimizer_from_config
from tests.support.training.models import FEATURES, batches, compiled, mlp, train

SHARES = np.random.default_rng(9).dirichlet(np.ones(3), 16).astype(np.float32)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 40.0), ("sum", 1.0)])
def test_probabilities_are_labels_of_a_cross_entropy(reduction: str, scale: float) -> None:
    loss = stitch.losses.CategoricalCrossEntropyLoss(reduction)
    instance = compiled(loss=loss, graph=mlp(16, 3)).start()
    x = batches(1)[0][0] * np.float32(scale)
    pred = torch.from_numpy(instance(x).numpy()).requires_grad_()
    expected = torch.nn.CrossEntropyLoss(reduction=reduction)(pred, torch.from_numpy(SHARES))
    expected.backward()
    found = instance.compute_loss(SHARES)
    gradient = instance.get_tensor("y.grad")
    np.testing.assert_allclose(found.item(), expected.item(), rtol=2e-5)
    np.testing.assert_allclose(gradient, pred.grad, rtol=1e-4, atol=1e-6)


def test_schedules_are_those_of_torch() -> None:
    schedulers = torch.optim.lr_scheduler
    cases: list[tuple[Any, Any]] = [
        (stitch.schedules.StepLR(3, 0.5), lambda o: schedulers.StepLR(o, 3, 0.5)),
        (
            stitch.schedules.CosineAnnealingLR(10, 0.01),
            lambda o: schedulers.CosineAnnealingLR(o, 10, 0.01),
        ),
        (
            stitch.schedules.WarmupLR(4),
            lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
        ),
    ]
    for ours, theirs in cases:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        scheduler = theirs(optimizer)
        for step in range(10):
            assert ours.rate(0.4, step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            scheduler.step()


def test_optimizers_losses_and_schedules_go_round_as_plain_data() -> None:
    schedule = stitch.schedules.WarmupLR(3, stitch.schedules.CosineAnnealingLR(7))
    for optimizer in (
        stitch.SGD(0.1, 0.9, 0.01, True, schedule=schedule),
        stitch.Adam(0.1, (0.8, 0.9), 1e-6, schedule=schedule),
        stitch.AdamW(0.1),
    ):
        again = optimizer_from_config(optimizer.config())
        assert again.config() == optimizer.config()
        assert [again.rate(i) for i in range(12)] == [optimizer.rate(i) for i in range(12)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: stitch.SGD(lr=-1),
        lambda: stitch.SGD(nesterov=True),
        lambda: stitch.Adam(betas=(0.9, 1.0)),
        lambda: stitch.SGD(schedule="linear"),
        lambda: stitch.schedules.StepLR(0),
        lambda: stitch.losses.MSELoss("none"),
        lambda: optimizer_from_config({"optimizer": "sgd", "speed": 3}),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


def weights() -> dict[str, Array]:
    model = compiled()
    assert model.training is not None
    return dict(model.training.values)


def test_a_yaml_module_trains_like_the_same_graph_from_a_builder(tmp_path: Path) -> None:
    found = weights()
    lines = []
    for name, value in found.items():
        np.save(tmp_path / f"{name}.npy", value)
        lines.append(f"  {name.replace('.', '_')}: {{file: {name}.npy}}")
    (tmp_path / "mlp.yaml").write_text(
        "inputs:\n  x: {shape: [16, 10], type: float32}\nparameters:\n" + "\n".join(lines) + "\n"
        "operations:\n  - h = Gemm(x, fc1_weight, fc1_bias, transB=1)\n  - r = Relu(h)\n"
        "  - y = Gemm(r, fc2_weight, fc2_bias, transB=1)\noutputs: [y]\n"
    )
    model = compiled(graph=tmp_path / "mlp.yaml")
    assert train(model, batches(4), 8) == train(compiled(), batches(4), 8)


def onnx_mlp() -> onnx.ModelProto:
    """The small MLP as an ONNX model."""
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "fc2.weight", "fc2.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 1])],
        [numpy_helper.from_array(np.array(value), name) for name, value in weights().items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_an_onnx_model_trains_like_the_same_graph_from_a_builder() -> None:
    model = compiled(graph=onnx_mlp())
    assert train(model, batches(4), 8) == train(compiled(), batches(4), 8)
    assert sorted(model.instance.parameters()) == sorted(weights())


def test_statistics_of_batch_normalization_are_not_trained() -> None:
    b = stitch.ComputationGraphBuilder("normalized")
    x = b.input("x", (16, FEATURES), "float32")
    ones, zeros = np.ones(FEATURES, np.float32), np.zeros(FEATURES, np.float32)
    made = b.batch_norm(
        x, b.parameter("scale", ones), b.parameter("shift", zeros),
        b.parameter("mean", zeros), b.parameter("variance", ones),
    )  # fmt: skip
    b.output("y", b.linear(made, b.parameter("w", np.ones((1, FEATURES), np.float32))))
    trained = as_trainable(b.build())
    assert trained.names(InputKind.PARAMETER) == ("scale", "shift", "w")

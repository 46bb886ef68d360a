"""A model trained by tasks of single operators: reference values, and the training's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import InputKind, Role
from stitch.training import LocalTaskBackend, ModelTrainingInstance
from tests.support.grids import every
from tests.support.training.models import batches, compiled, mlp

#: FlexFlow's figures for a linear layer.
X = np.array([[3, 3, 6], [2, 1, 5], [1, 2, -2], [8, 0.5, -3]], np.float32)
WEIGHT = np.array([[1, 2, 1.5], [0.5, 4, -1]], np.float32)
BIAS = np.array([3, -1], np.float32)
Y = [[21, 6.5], [14.5, -1], [5, 9.5], [7.5, 8]]
DY = np.array([[1, -0.5], [2, -2], [1, 9], [-3.5, 1]], np.float32)
DX = [[0.75, 0, 2], [1, -4, 5], [5.5, 38, -7.5], [-3, -3, -6.25]]
DW = [[-20, 5.25, 24.5], [11.5, 15, -34]]
DB = [0.5, 7.5]


def linear() -> ComputationGraph:
    """One linear layer whose weights have no values yet."""
    b = ComputationGraphBuilder("linear")
    x = b.input("x", (4, 3), "float32")
    weight = b.input("weight", (2, 3), "float32", InputKind.PARAMETER)
    bias = b.input("bias", (2,), "float32", InputKind.PARAMETER)
    b.output("y", b.linear(x, weight, bias))
    return b.build()


@pytest.fixture
def layer() -> Iterator[LocalTaskBackend]:
    with LocalTaskBackend(linear(), wanted=["x", "weight", "bias"]) as backend:
        for name, value in (("x", X), ("weight", WEIGHT), ("bias", BIAS)):
            backend.set_tensor(name, value)
        yield backend


def test_a_linear_layer_gives_the_reference_values(layer: LocalTaskBackend) -> None:
    ModelTrainingInstance(layer.graph, layer).forward()
    np.testing.assert_array_equal(layer.get_tensor("y"), np.array(Y, np.float32))


def test_its_gradients_are_the_reference_values(layer: LocalTaskBackend) -> None:
    instance = ModelTrainingInstance(layer.graph, layer)
    instance.forward()
    layer.set_tensor("y.grad", DY)
    instance.backward()
    for name, expected in (("x", DX), ("weight", DW), ("bias", DB)):
        np.testing.assert_array_equal(layer.get_tensor(f"{name}.grad"), np.array(expected))


def test_without_a_loss_backward_asks_for_the_gradient_of_the_output(
    layer: LocalTaskBackend,
) -> None:
    instance = ModelTrainingInstance(layer.graph, layer)
    instance.forward()
    with pytest.raises(UsageError, match=r"'y.grad' has no elements.*\n.*\n.*set_tensor"):
        instance.backward()


@pytest.mark.parametrize(
    "optimizer",
    every(
        2,
        [
            stitch.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
            stitch.Adam(lr=0.01, schedule=stitch.schedules.StepLR(2)),
            stitch.AdamW(lr=0.01, weight_decay=0.1),
        ],
    ),
    ids=["SGD", "Adam", "AdamW"],
)
def test_every_step_has_the_bits_of_the_four_programs(optimizer: Any) -> None:
    model = compiled(optimizer)
    assert model.training is not None
    with LocalTaskBackend(mlp(), optimizer=optimizer.config(), loss="mse") as backend:
        instance = ModelTrainingInstance(backend.graph, backend)
        for x, label in batches(5):
            backend.set_tensor("x", x)
            backend.set_tensor("label", label)
            instance.forward()
            instance.backward()
            instance.update()
            prediction = model(x)
            loss = model.training.loss(prediction, label)
            loss.backward()
            gradient = model.instance.get_tensor("fc1.weight.grad")
            assert backend.get_tensor("fc1.weight.grad").tobytes() == gradient.tobytes()
            optimizer.step()
            optimizer.zero_grad()
            assert backend.get_tensor("loss").tobytes() == np.asarray(loss.item()).astype(
                np.float32
            ).tobytes()  # fmt: skip
            for name, value in model.instance.state_dict().items():
                if not name.startswith("training."):
                    assert backend.get_tensor(name).tobytes() == value.tobytes(), name
    assert backend.iteration == 5


def test_an_update_needs_gradients_and_an_optimizer() -> None:
    ((x, label),) = batches(1)
    with LocalTaskBackend(mlp(), optimizer="sgd", loss="mse") as backend:
        instance = ModelTrainingInstance(backend.graph, backend)
        with pytest.raises(UsageError, match="update\\(\\) was called before"):
            instance.update()
        backend.set_tensor("x", x)
        backend.set_tensor("label", label)
        instance.forward()
        instance.backward()
        instance.update()
        assert backend.iteration == 1
    with LocalTaskBackend(mlp()) as backend, pytest.raises(UsageError, match="no optimizer"):
        ModelTrainingInstance(backend.graph, backend).update()


def recurrent() -> ComputationGraph:
    """A state that forward replaces, and whose value before that backward reads."""
    b = ComputationGraphBuilder("recurrent")
    x = b.input("x", (4, 6), "float32")
    h = b.input("h", (4, 6), "float32", InputKind.STATE)
    w, u = (b.input(name, (6, 6), "float32", InputKind.PARAMETER) for name in ("w", "u"))
    after = b.tanh(b.matmul(x, w) + b.matmul(h, u))
    b.output("y", b.relu(after))
    b.output("h", after)
    return b.build()


def narrow() -> ComputationGraph:
    """A layer in bfloat16, whose weight has a float32 master."""
    b = ComputationGraphBuilder("narrow")
    w = b.input("w", (6, 6), "bfloat16", InputKind.PARAMETER)
    b.output("y", b.tanh(b.matmul(b.input("x", (4, 6), "bfloat16"), w)))
    return b.build()


@pytest.mark.parametrize(
    ("graph", "names"),
    [(recurrent(), ("w", "u", "h", "w.exp_avg")), (narrow(), ("w", "w.master", "w.exp_avg_sq"))],
    ids=["state", "master"],
)
def test_states_and_masters_have_the_bits_of_the_four_programs(
    graph: ComputationGraph, names: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(1)
    weights = {
        slot.name: rng.standard_normal(graph.input_type(i).shape).astype(np.float32)
        for i, slot in enumerate(graph.inputs) if slot.name != "x"
    }  # fmt: skip
    optimizer = stitch.Adam(lr=0.05)
    model = stitch.compile(graph, optimizer=optimizer, loss="mse", weights=weights)
    assert model.training is not None
    given: dict[str, Any] = {"optimizer": optimizer.config(), "loss": "mse", "weights": weights}
    with LocalTaskBackend(graph, **given) as backend:
        instance = ModelTrainingInstance(graph, backend)
        for _ in range(4):
            x, label = rng.standard_normal((2, 4, 6)).astype(np.float32)
            backend.set_tensor("x", x)
            backend.set_tensor("label", label)
            instance.forward()
            instance.backward()
            instance.update()
            model.training.loss(model(x), label).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name in names:
                theirs = model.instance.get_tensor(name)
                assert backend.get_tensor(name).tobytes() == theirs.tobytes(), name


def test_a_graph_of_another_backing_is_refused() -> None:
    with LocalTaskBackend(mlp()) as backend, pytest.raises(UsageError, match="another graph"):
        ModelTrainingInstance(mlp(), backend)


def test_a_graph_without_parameters_has_forward_tasks_only() -> None:
    b = ComputationGraphBuilder("plain")
    b.output("y", b.relu(b.input("x", (2, 2), "float32")))
    graph = b.build()
    with LocalTaskBackend(graph) as backend:
        instance = ModelTrainingInstance(graph, backend)
        backend.set_tensor("x", [[-1.0, 2.0], [3.0, -4.0]])
        instance.forward()
        assert backend.get_tensor("y").tolist() == [[0, 2], [3, 0]]
        assert [len(backend.tasks(role)) for role in Role] == [1, 0, 0, 0]
        with pytest.raises(UsageError, match="no gradients to compute"):
            instance.backward()
    with pytest.raises(CompileError, match="no parameters to train"):
        LocalTaskBackend(graph, loss="mse")

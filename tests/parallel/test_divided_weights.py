"""Divided weights: the parallel graph computes the whole, its stages train with the losses of one
device and the same bits on all carriers, and what cannot be divided is one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, StitchError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh import ParallelOptions
from stitch.parallel import ParallelComputationGraph, divided_graph, replicated
from stitch.program import InputKind
from stitch.testing import evaluate_graph
from stitch.training import TrainingOptions, stage_graph
from tests.parallel.test_parallel_graph import drawn
from tests.support.training.staged_models import (
    attention,
    convolutions,
    drawn_batches,
    embedding,
    mlp,
    model_of,
    norms,
    tied,
)

PLANS = pytest.mark.campaign("plans")
#: Columns, then rows, of each layer of attention.
MEGATRON = {f"{name}{i}": 0 if name == "o" else 1 for i in range(2) for name in "qkvo"}
CASES: dict[str, tuple[ComputationGraph, dict[str, int], list[str]]] = {
    "columns then rows": (mlp(2), {"w0": 1, "w1": 0}, ["Replicate", "Reduction"]),
    "rows then columns": (
        mlp(2), {"w0": 0, "w1": -1}, ["Reduction", "Replicate", "Combine"],
    ),
    "channels": (
        convolutions(), {"w0": 0, "w1": 1, "w2": 0, "w3": 0},
        ["Replicate", "Reduction", "Replicate", "Reduction"],
    ),
    "channels twice": (
        convolutions(), {"w0": 0, "w1": 0, "w2": 1, "w3": 0},
        ["Replicate", "Combine", "Replicate", "Reduction", "Reduction"],
    ),
    "heads": (attention(), MEGATRON, ["Replicate", "Reduction"] * 2),
    "read twice": (norms(1), {"w0": 1}, ["Replicate", "Reduction"]),
    "table": (embedding(), {"table": 1}, ["Replicate", "Combine", "Reduction"]),
    "tied": (tied(), {"w": 1}, ["Replicate", "Combine"] * 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_divided_weights_compute_the_whole(case: str) -> None:
    graph, axes, expected = CASES[case]
    pcg = divided_graph(stage_graph(model_of(graph), TrainingOptions()), 2, axes)
    made = [o.op for o in pcg.graph.operations if o.domain and o.op != "Repartition"]
    assert made == expected
    assert ParallelComputationGraph.from_json(pcg.as_json()) == pcg
    feeds = drawn(graph)
    whole = evaluate_graph(graph, feeds)["y"]
    shards = evaluate_graph(pcg.stacked(), feeds)["y"]
    np.testing.assert_allclose(shards, whole, rtol=1e-4, atol=1e-6 * np.abs(whole).max())


def test_replicas_of_divided_weights_compute_micro_batches_side_by_side() -> None:
    graph, axes, _ = CASES["columns then rows"]
    prepared = stage_graph(model_of(graph), TrainingOptions())
    pcg = replicated(divided_graph(prepared, 2, axes), 2)
    assert ParallelComputationGraph.from_json(pcg.as_json()) == pcg
    feeds, others = drawn(graph), drawn(graph)
    both = feeds | {"x": np.concatenate([feeds["x"], others["x"] + 1])}
    wholes = [evaluate_graph(graph, feeds | {"x": x})["y"] for x in np.split(both["x"], 2)]
    found = evaluate_graph(pcg.stacked(), both)["y"]
    np.testing.assert_allclose(found, np.concatenate(wholes), rtol=1e-4, atol=1e-5)


def check_training(
    graph: ComputationGraph, axes: dict[str, int], carriers: tuple[str, ...], steps: int = 2,
    degree: int = 2, replicas: int = 1, **options: Any,
) -> None:  # fmt: skip
    model, micro_batches = model_of(graph), 2 * replicas
    words: dict[str, Any] = {"optimizer": "adam", "loss": "mse", "weights": model.values, **options}
    parallel = {
        "tensor": degree, "divide": axes, "replicas": replicas, "micro_batches": micro_batches,
    }  # fmt: skip
    compiled = stitch.compile(model.graph, parallel=parallel, target="tiny", **words)
    batches = drawn_batches(model, micro_batches)
    runs = []
    for backend in carriers:
        with compiled.start(backend=backend) as training:
            losses = [training.step(batches) for _ in range(steps)]
            state, gradients = training.state_dict(), training.gradients()
            weights = training.parameters()
            training.load_state_dict(state)
            runs.append((losses, state, training.step(batches)))
    for losses, state, after in runs[1:]:
        assert (losses, after) == (runs[0][0], runs[0][2])
        assert {k: a.tobytes() for k, a in state.items()} == {
            k: a.tobytes() for k, a in runs[0][1].items()
        }
    one = stitch.compile(model.graph, accumulation_steps=micro_batches, target="tiny", **words)
    with one.start() as instance:
        expected = [[float(loss) for loss in instance.step(batches)] for _ in range(steps)]
        found = instance.state_dict()
        instance.load_state_dict(runs[0][1])
        after = [float(loss) for loss in instance.step(batches)]
    np.testing.assert_allclose(runs[0][0], expected, rtol=1e-5)
    np.testing.assert_allclose(runs[0][2], after, rtol=1e-5)
    assert runs[0][1].keys() == found.keys()
    assert weights.keys() == gradients.keys() == set(model.values)
    for name, array in runs[0][1].items():
        assert (array.shape, array.dtype) == (np.shape(found[name]), found[name].dtype)
        np.testing.assert_allclose(array, found[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_divided_weights_train_with_the_losses_of_one_device() -> None:
    check_training(mlp(2), {"w0": 1, "w1": 0}, ("local",), steps=1)


@PLANS
@pytest.mark.parametrize("case", ["columns then rows", "channels", "heads"])
def test_divided_weights_train_on_both_carriers(case: str) -> None:
    graph, axes, _ = CASES[case]
    check_training(graph, axes, ("local", "ray"))


@PLANS
@pytest.mark.parametrize("case", ["table", "tied"])
def test_weights_that_are_read_twice_train(case: str) -> None:
    graph, axes, _ = CASES[case]
    check_training(graph, axes, ("local",))


@PLANS
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "clip_grad_norm": 0.5, "carriers": ("local", "ray")},
        {"degree": 4, "recompute": "all", "optimizer": "nadam"},
    ],
)  # fmt: skip
def test_options_of_a_training_with_divided_weights(options: dict[str, Any]) -> None:
    carriers = options.pop("carriers", ("local",))
    check_training(mlp(2), {"w0": 1, "w1": 0}, carriers, **options)


@PLANS
def test_a_group_of_the_optimizer_has_the_shards_of_its_parameters() -> None:
    optimizer = stitch.Adam(lr=0.01)
    optimizer.add_group(["w0", "b1"], lr=0.1, weight_decay=0.01)
    check_training(mlp(2), {"w0": 1, "w1": 0}, ("local",), optimizer=optimizer)


@PLANS
def test_masters_of_divided_weights_are_joined() -> None:
    model = model_of(mlp(2))
    compiled = stitch.compile(
        model.graph, parallel={"tensor": 2, "divide": {"w0": 1}}, target="tiny", optimizer="adam",
        loss="mse", weights=model.values, precision="bfloat16",
    )  # fmt: skip
    with compiled.start() as training:
        training.step(drawn_batches(model, 1))
        weights = training.parameters()
    assert weights["w0"].dtype == np.float32
    assert 0 < np.abs(weights["w0"] - model.values["w0"]).max() < 0.01


@pytest.mark.parametrize(
    ("degree", "axes", "error", "message"),
    [
        (3, {"w0": 1}, UsageError, "axis 1 of parameter 'w0' .* does not divide into 3"),
        (2, {"w9": 1}, UsageError, "no parameter 'w9'"),
        (2, {"w0": 2}, UsageError, "no such axis"),
        (2, {"w0": True}, UsageError, "no such axis"),
        (2, {"w0": np.int64(2)}, UsageError, "no such axis"),
        (2, {"w0": "columns"}, UsageError, "no such axis"),
        (2, {"x": 0}, UsageError, "no parameter 'x'"),
    ],
)  # fmt: skip
def test_weights_that_do_not_divide_are_one_error(
    degree: int, axes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        divided_graph(stage_graph(model_of(mlp(2)), TrainingOptions()), degree, axes)


def test_axes_may_be_integers_of_numpy() -> None:
    graph = stage_graph(model_of(mlp(2)), TrainingOptions())
    axes: Any = {"w0": np.int64(1)}
    assert divided_graph(graph, 2, axes) == divided_graph(graph, 2, {"w0": 1})


@pytest.mark.parametrize("parallel", [None, {"stages": 2}, {"tensor": 2, "divide": {"w0": 1}}])
def test_initial_weights_of_other_names_or_shapes_are_one_error(parallel: Any) -> None:
    model = model_of(mlp(2))
    compiled: Any = stitch.compile(
        model.graph, weights=model.values, optimizer="adam", loss="mse", target="tiny",
        parallel=parallel,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"weights= has 'w9'(.|\n)*did you mean 'w[01]'"):
        compiled.start(weights={"w9": np.zeros(3, np.float32)})
    wrong = {"w0": np.zeros((16, 3), np.float32)}
    with pytest.raises(StitchError, match=r"'w0' has another shape\n.*\[16, 16\]\n.*\[16, 3\]"):
        compiled.start(weights=wrong)


def test_an_operator_that_does_not_run_in_shards_is_one_error() -> None:
    graph = stage_graph(model_of(norms(1)), TrainingOptions())
    with pytest.raises(CompileError, match="no operator that reads parameter 's0'") as caught:
        divided_graph(graph, 2, {"s0": 0})
    assert "leave it whole" in str(caught.value)


def test_a_bias_alone_is_not_divided() -> None:
    graph = stage_graph(model_of(mlp(2)), TrainingOptions())
    with pytest.raises(CompileError, match="no operator that reads parameter 'b0'"):
        divided_graph(graph, 2, {"b0": 0})
    assert divided_graph(graph, 2, {"w0": 1, "b0": 0}).graph.operations


def test_a_state_is_replaced_after_a_divided_weight() -> None:
    b = ComputationGraphBuilder("averaged")
    x, mean = b.input("x", (4, 8), "float32"), b.input("mean", (4, 8), "float32", InputKind.STATE)
    h = b.op("MatMul", x, b.input("w", (8, 8), "float32", InputKind.PARAMETER))
    b.output("mean", mean * 0.9 + h)
    b.output("y", h)
    model = model_of(b.build())
    words: Any = {"optimizer": "adam", "loss": "mse", "weights": model.values, "target": "tiny"}
    divided = stitch.compile(model.graph, parallel={"tensor": 2, "divide": {"w": 1}}, **words)
    batches = drawn_batches(model, 1)
    with divided.start() as training:
        losses, state = training.step(batches), training.state_dict()
    with stitch.compile(model.graph, **words).start() as one:
        assert losses == pytest.approx([float(loss) for loss in one.step(batches)], rel=1e-5)
        np.testing.assert_allclose(state["mean"], one.state_dict()["mean"], rtol=1e-5)


def test_options_that_do_not_go_together_are_one_error() -> None:
    for words in ({"tensor": 2}, {"divide": {"w": 0}}):
        with pytest.raises(UsageError, match="both, or none"):
            ParallelOptions(**words)
    with pytest.raises(UsageError, match="one stage in each replica"):
        ParallelOptions(tensor=2, divide={"w": 0}, stages=2)
    model = model_of(mlp(2))
    with pytest.raises(UsageError, match="needs more devices"):
        stitch.compile(
            model.graph, optimizer="adam", loss="mse", weights=model.values, devices=1,
            parallel={"tensor": 2, "divide": {"w0": 1}},
        )  # fmt: skip

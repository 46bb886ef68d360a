"""A training in stages has the bits of the training on one device with the same micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import load_machine
from stitch.program import DataType, InputKind
from stitch.training import Trainable, TrainingOptions
from stitch.training.compiled import compile_model
from stitch.training.optimizers import Optimizer
from stitch.training.stages import stages_of
from tests.support.training.staged import StagedRunner
from tests.support.training.staged_models import MODELS, drawn, drawn_batches, model_of


def compare(
    model: Trainable, cuts: int | Sequence[str], optimizer: Optimizer | None = None, *,
    micro_batches: int = 3, steps: int = 3, seed: int = 0, **options: Any,
) -> None:  # fmt: skip
    """Train in stages and unsplit; losses, gradients and weights must have equal bits."""
    optimizer = stitch.AdamW(lr=0.01) if optimizer is None else optimizer
    chosen = TrainingOptions(accumulation_steps=micro_batches, **options)
    whole = compile_model(model, "mse", optimizer, chosen, load_machine("host"))
    staged = StagedRunner(model, whole.loss, optimizer, chosen, cuts, seed)
    with stitch.open_device("host") as device:
        instance = whole.start(device)
        for step in range(steps):
            batches = drawn_batches(model, micro_batches, step)
            inputs = [({**x, **keys(instance, m)}, y) for m, (x, y) in enumerate(batches)]
            assert staged.step(inputs) == instance.step(batches)
            for name, array in staged.gradients.items():
                equal(name, array, instance.get_tensor(name))
            for parameter in instance.programs.parameters:
                assert parameter.gradient in staged.gradients
        state = instance.state_dict()
        owned = set()
        for tensors in staged.tensors:
            for name in tensors.keys() & state.keys():
                equal(name, tensors[name], state[name])
                owned.add(name)
        counters = {name for name in state if name.startswith("training.")}
        assert owned == state.keys() - counters
    staged.close()


def keys(instance: Any, index: int) -> dict[str, Any]:
    """Return the random keys of a micro-batch of the next step."""
    ports = [p for p in instance._step.forward.agent.ports if p.name == "key"]
    forwards, instance.forwards = instance.forwards, instance.forwards + 1 + index
    made = {port.name: instance._key(port) for port in ports}
    instance.forwards = forwards
    return made


def equal(name: str, left: Any, right: Any) -> None:
    bits = f"u{left.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(left).view(bits), np.ascontiguousarray(right).view(bits), err_msg=name
    )


CASES = [
    pytest.param(
        name, stages, id=f"{name}-{stages}",
        marks=() if stages == quick else pytest.mark.campaign("training"),
    )
    for name, quick in zip(MODELS, (4, 3, 2, 4, 4, 2, 3, 2, 4, 3, 2), strict=True)
    for stages in (2, 3, 4) if name != "twice" or stages == 2
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages"), CASES)
def test_stages_have_the_bits_of_the_unsplit_training(name: str, stages: int) -> None:
    compare(model_of(MODELS[name]()), stages, seed=stages)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 300), marks=pytest.mark.campaign("training"))]
)
def test_drawn_graphs_cut_anywhere_have_the_bits_of_the_unsplit_training(seeds: range) -> None:
    for seed in seeds:
        model, draw = model_of(drawn(seed), seed), random.Random(seed)
        (whole,) = stages_of(model, *arguments(), 1).stages
        *rows, _ = whole.forward.operations
        names = [whole.forward.values[v].name for row in rows for v in row.outputs if v >= 0]
        for cuts in (draw.randint(2, 4), draw.sample(names, min(len(names), draw.randint(1, 4)))):
            compare(model, cuts, micro_batches=2, steps=1, seed=seed)


@pytest.mark.parametrize("cut", ["matmul", "tanh", "matmul_1"])
def test_an_expression_on_both_sides_of_a_cut_is_computed_once(cut: str) -> None:
    compare(model_of(MODELS["twice"]()), [cut])


def test_no_stage_passes_a_value_on_under_the_name_of_the_prediction() -> None:
    b = ComputationGraphBuilder("named")
    x = b.input("x", (8, 16), "float32")
    b.op("Tanh", x)  # Dead: the program numbers the other results anew.
    for name in ("w0", "w1"):
        w = b.input(name, (16, 16), "float32", InputKind.PARAMETER)
        x = b.op("Tanh", b.op("MatMul", x, w))
    b.output("tanh", x)
    stages = stages_of(model_of(b.build()), *arguments(), ["tanh"]).stages
    assert [[slot.name for slot in stage.forward.outputs] for stage in stages] == [
        ["tanh_1"], ["tanh"]
    ]  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 0.05}, "cheap": {"recompute": "cheap"},
    "all": {"recompute": "all"},
    "bfloat16": {"precision": DataType.BFLOAT16, "clip_grad_norm": 0.05},
}  # fmt: skip
QUICK = {"clipping": "skips", "cheap": "tied", "all": "statistics", "bfloat16": "tied"}


@pytest.mark.parametrize(("name", "option"), [
    pytest.param(
        name, option, marks=() if QUICK[option] == name else pytest.mark.campaign("training")
    )
    for option in OPTIONS for name in ("skips", "tied", "statistics")
])  # fmt: skip
def test_stages_have_those_bits_under_each_option(name: str, option: str) -> None:
    compare(model_of(MODELS[name]()), 3, **OPTIONS[option])


def test_settings_of_parameter_groups_are_those_of_the_unsplit_training() -> None:
    optimizer = stitch.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer.add_group(["w0", "w3"], lr=0.01, weight_decay=0.0)
    compare(model_of(MODELS["mlp"]()), 3, optimizer)


def test_any_order_of_passes_and_any_number_of_micro_batches_has_those_bits() -> None:
    for seed in (0, 3):
        compare(model_of(MODELS["attention"]()), 4, micro_batches=seed + 1, steps=1, seed=seed)


def test_only_values_that_stages_compute_pass_between_them() -> None:
    model = model_of(MODELS["embedding"]())
    stages = stages_of(model, *arguments(), ["add"]).stages
    assert [[each.slot for each in stage.arriving] for stage in stages] == [[], ["add"]]
    read = [[slot.name for slot in stage.forward.inputs] for stage in stages]
    assert read == [["x", "table", "w0"], ["table", "add", "w1", "w2"]]
    assert [[p.name for p in stage.parameters] for stage in stages] == [
        ["table", "w0"], ["w1", "w2"],
    ]  # fmt: skip


def test_the_gradient_of_a_value_that_goes_around_a_stage_passes_through_its_readers() -> None:
    model = model_of(MODELS["tied"]())
    stages = stages_of(model, *arguments(), 3).stages
    assert [[p.name for p in stage.parameters] for stage in stages] == [
        ["w", "v0"], ["v1"], ["v2"],
    ]  # fmt: skip
    sources = [
        [each.source for each in stage.returning if each.output == "w.grad"] for stage in stages
    ]
    assert sources == [[1], [2], []]


def test_a_graph_that_no_parameter_reaches_is_refused() -> None:
    b = stitch.ComputationGraphBuilder("constant")
    x = b.input("x", (4, 4), "float32")
    b.input("w", (4,), "float32", InputKind.PARAMETER)
    b.output("y", b.op("Tanh", b.op("Tanh", x)))
    with pytest.raises(CompileError, match="no output of graph 'constant"):
        stages_of(model_of(b.build()), *arguments(), 2)


def test_a_cut_that_separates_a_state_from_its_next_value_is_refused() -> None:
    b = stitch.ComputationGraphBuilder("apart")
    x = b.input("x", (4,), "float32")
    w = b.input("w", (4,), "float32", InputKind.PARAMETER)
    state = b.input("state", (4,), "float32", InputKind.STATE)
    h = b.op("Tanh", x * w + state)
    b.output("state", state + b.op("Tanh", h))
    b.output("y", h)
    with pytest.raises(CompileError, match="a cut separates them"):
        stages_of(model_of(b.build()), *arguments(), ["tanh"])


def arguments() -> tuple[Any, Any, TrainingOptions]:
    return stitch.losses.MSELoss(), stitch.SGD(lr=0.1), TrainingOptions()

"""What training refuses, and that the weights are as before a step that went wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import (
    CompileError,
    IncompatibleError,
    LayoutError,
    LinkError,
    TaskError,
    UsageError,
)
from stitch.graph import ComputationGraphBuilder
from stitch.program import InputKind
from stitch.runtime import HookContext
from tests.support.grids import in_turn
from tests.support.training.models import batches, compiled, mlp, train, values_of


def classifier() -> stitch.CompiledModel:
    return compiled(loss="sparse_categorical_crossentropy", graph=mlp(16, 3))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (np.full(16, 3), "out of range"),
        (np.full(16, -1), "out of range"),
        (np.ones(16, np.float32), "class indices"),
        (np.zeros(15, np.int64), "another shape"),
        (np.zeros((16, 3), np.int64), "another shape"),
        (np.full(16, "cat"), "class indices"),
    ],
)
def test_labels_that_are_no_classes_are_refused(label: Any, message: str) -> None:
    model = classifier()
    assert model.training is not None
    x = batches(1)[0][0]
    with pytest.raises(UsageError, match=message):
        model.training.loss(model(x), label)
    loss = model.training.loss(model(x), np.zeros(16, np.int32))
    assert np.isfinite(loss.item())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_batch_that_is_no_number_stops_the_step_and_is_named(bad: float) -> None:
    model = compiled(stitch.Adam(lr=0.01))
    train(model, batches(2))
    before = model.instance.state_dict()
    ((x, y),) = batches(1)
    x = x.copy()
    x[3, 2] = bad
    with pytest.raises(TaskError, match=r"loss of step 2 is nan(.|\n)*'x' held NaN"):
        train(model, [(x, y)])
    after = model.instance.state_dict()
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["training.forwards"]


def test_the_first_operator_that_overflows_is_named_and_training_goes_on() -> None:
    model, plain = compiled(), compiled()
    assert train(model, batches(2)) == train(plain, batches(2))
    ((x, y),) = batches(1)
    with pytest.raises(TaskError, match=r"is inf(.|\n)*Mul -> 'mul' of 'mlp_loss'"):
        train(model, [(x * np.float32(1e30), y)])
    assert train(model, batches(3)) == train(plain, batches(3))


def test_an_operator_without_a_gradient_is_named_when_compiling() -> None:
    b = ComputationGraphBuilder("det")
    x = b.input("x", (4, 4), "float32")
    w = b.parameter("w", np.eye(4, dtype=np.float32))
    b.output("y", b.op("Det", b.matmul(x, w)))
    with pytest.raises(CompileError, match=r"no gradient for Det at test_training_refusals.py"):
        stitch.compile(b.build(), optimizer="sgd", loss="identity")


def test_the_loop_out_of_order_is_refused_with_what_to_do() -> None:
    model = compiled()
    assert model.training is not None
    loss_fn, optimizer = model.training.loss, model.training.optimizer
    ((x, y),) = batches(1)
    with pytest.raises(UsageError, match="no training uses this optimizer"):
        optimizer.step()
    pred = model(x)
    with pytest.raises(UsageError, match="without gradients"):
        optimizer.step()
    with pytest.raises(UsageError, match="backward\\(\\) was called without"):
        model.instance.backward()
    loss = loss_fn(pred, y)
    loss.backward()
    with pytest.raises(UsageError, match="backward\\(\\) can run once"):
        loss.backward()
    model(x)
    with pytest.raises(UsageError, match="not the model's last prediction"):
        loss_fn(pred, y)
    with pytest.raises(UsageError, match="another loss"):
        stitch.losses.MSELoss("sum")(model(x), y)
    with pytest.raises(UsageError, match="prediction of a compiled model"):
        loss_fn(np.zeros((16, 1)), y)


def test_an_optimizer_or_a_loss_alone_is_told_with_what_it_needs() -> None:
    for half in ("optimizer", "loss"):
        given: dict[str, Any] = {half: "sgd" if half == "optimizer" else "mse"}
        with pytest.raises(UsageError, match=rf"got: an? {half} only\n  try: .*optimizer='adam'"):
            stitch.compile(mlp(), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spaces": {"fc1.wieght": "l1"}}, r"spaces= names 'fc1\.wieght'(.|\n)*'fc1\.weight'\?"),
        ({"spaces": {"zzz": "l1"}, "algorithm": "search"}, "'zzz', which is not a tensor"),
        ({"spaces": {"fc1.weight": "l9"}}, "its name(.|\n)*as spaces(.|\n)*l9"),
        ({"precision": "float23"}, "its name(.|\n)*as precision(.|\n)*float23"),
        ({"trainable": ["fc1.wieght"]}, r"no parameter and no(.|\n)*mean 'fc1\.weight'\?"),
        ({"trainable": ["foo"]}, "foo to train(.|\n)*requires_grad"),
        ({"trainable": ["x"]}, "no floating constant x to train"),
        ({"loss": "cross_entropy"}, "got: 'cross_entropy'\n.*'sparse_categorical_crossentropy'"),
        ({"loss": "hinge"}, "unknown loss"),
        ({"optimizer": "adadelta"}, "unknown optimizer"),
        ({"recompute": "some"}, "none, cheap or all"),
        ({"accumulation_steps": 0}, "must be at least 1"),
        ({"clip_grad_norm": 0.0}, "must be above 0"),
        ({"weights": {"nothing": np.zeros(1)}}, "no parameter or state 'nothing'"),
        ({"weights": {"fc1.bias": np.zeros(3)}}, "its value has shape"),
    ],
)
def test_what_is_refused_is_named_with_what_was_meant(
    options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"optimizer": "sgd", "loss": "mse", **options}
    with pytest.raises(UsageError, match=message):
        stitch.compile(mlp(), **given)


def test_an_optimizer_trains_one_model_at_a_time() -> None:
    optimizer = stitch.SGD(lr=0.05)
    first, second, alone = compiled(optimizer), compiled(optimizer), compiled()
    data = batches(4)
    assert train(first, data[:2]) == train(alone, data[:2])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"trains another model(.|\n)*per model") as refused:
            second(data[0][0])
    assert train(first, data[2:]) == train(alone, data[2:])
    first.instance.close()
    second.start()
    assert train(second, data) == train(compiled(), data)
    assert refused.value.exit_code == 2


def test_parameters_without_initial_values_are_listed() -> None:
    b = ComputationGraphBuilder("bare")
    x = b.input("x", (4, 4), "float32")
    w = b.input("w", (4, 4), "float32", InputKind.PARAMETER)
    b.output("y", b.matmul(x, w))
    graph = b.build()
    with pytest.raises(UsageError, match=r"w \(4x4xf32\) has no initial value"):
        stitch.compile(graph, optimizer="sgd", loss="mse")
    model = stitch.compile(graph, optimizer="sgd", loss="mse", weights={"w": np.eye(4)})
    x_value = np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_array_equal(values_of(model(x_value)), x_value)


@pytest.mark.parametrize("device_too", [False, True])
def test_a_training_that_was_closed_is_not_begun_anew_without_a_word(device_too: bool) -> None:
    model = compiled(stitch.SGD(lr=0.1))
    train(model, batches(2))
    state, x = model.instance.state_dict(), batches(1)[0][0]
    if device_too:
        model.instance.device.close()
    else:
        model.instance.close()
    with pytest.raises(TaskError, match=r"(?s)session is closed.*model\.start"):
        model(x)
    model.start(weights=state)
    for name, value in model.instance.state_dict().items():
        if not name.startswith("training."):
            np.testing.assert_array_equal(value, state[name])


def test_a_loss_is_a_number_and_predictions_are_elements_where_they_are_compared() -> None:
    model = classifier()
    assert model.training is not None
    predicted = model(batches(1)[0][0])
    loss = model.training.loss(predicted, np.zeros(16, np.int32))
    assert loss and loss == loss.item() and loss != 0
    assert loss != model.training.loss(predicted, np.zeros(16, np.int32))
    with pytest.raises(UsageError, match="one element"):
        bool(predicted)
    with pytest.raises(TypeError, match="compare the elements"):
        _ = predicted == 0


@pytest.mark.parametrize(
    ("settled", "kind"), in_turn([0, 8], [np.int32, np.int64, np.uint8, np.bool_])
)
def test_a_batch_of_another_kind_of_number_is_refused_and_the_next_step_works(
    settled: int, kind: Any
) -> None:
    """It said that its own conversion "was freed"."""
    model, same = compiled(), compiled()
    train(model, batches(settled))
    train(same, batches(settled))
    x, _ = batches(1)[0]
    with pytest.raises(LinkError, match=r"input 'x' of 'mlp' has another type[\s\S]*float32"):
        model(np.ones(x.shape, kind))
    train(model, batches(2))
    train(same, batches(2))
    for name, array in same.instance.state_dict().items():
        np.testing.assert_array_equal(model.instance.state_dict()[name], array)


@pytest.mark.parametrize("settled", [0, 8])
def test_what_an_interrupted_update_lost_can_be_loaded_again(settled: int) -> None:
    model = compiled(stitch.Adam(lr=0.01))
    train(model, batches(settled + 1))
    instance = model.instance
    saved = instance.state_dict()

    def interrupt(context: HookContext) -> None:
        if context.program.name.endswith("update"):
            raise KeyboardInterrupt

    remove = instance.device.hooks.register(before_program=interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, batches(1))
        instance.device.flush()
    remove()
    instance.load_state_dict(saved)
    for name, array in saved.items():
        np.testing.assert_array_equal(instance.state_dict()[name], array)
    train(model, batches(2))


def test_a_batch_of_another_shape_is_named_be_it_an_array_a_tensor_or_a_list() -> None:
    model = compiled()
    tensor = model.start().device.tensor(np.ones((3, 2), np.float32))
    for batch in (np.ones((3, 2), np.float32), tensor):
        with pytest.raises(UsageError, match=r"input 'x' has another shape[\s\S]*\[3, 2\]"):
            model(batch)
    with pytest.raises(LayoutError, match="input 'x' of 'mlp' cannot become an array"):
        model([[1.0], [1.0, 2.0]])


def test_whole_numbers_that_do_not_fit_are_refused() -> None:
    """They wrapped around: token 2**32 + 1 was token 1."""
    b = ComputationGraphBuilder("embedding")
    tokens = b.input("tokens", (4,), "int32")
    table = b.parameter("table", np.arange(24, dtype=np.float32).reshape(8, 3))
    b.output("y", b.gather(table, tokens))
    model = compiled(graph=b.build())
    model.start()
    kept = np.array([1, 2, 3, 4])
    first = values_of(model(kept))
    with pytest.raises(LinkError, match=r"input 'tokens'[\s\S]*some values do not fit"):
        model(kept + 2**32)
    np.testing.assert_array_equal(values_of(model(kept)), first)
    with pytest.raises(LinkError, match=r"tensor 'table'[\s\S]*some values are too large"):
        model.instance.set_tensor("table", np.full((8, 3), 1e300))
    with pytest.raises(LayoutError, match="tensor 'table' cannot become an array"):
        model.instance.set_tensor("table", [[1.0], [1.0, 2.0]])


def test_a_graph_with_nothing_to_train_is_refused() -> None:
    b = ComputationGraphBuilder("bare")
    b.output("y", b.relu(b.input("x", (4, 4), "float32")))
    with pytest.raises(CompileError, match="no parameters to train"):
        stitch.compile(b.build(), optimizer="sgd", loss="mse")


def test_a_batch_of_other_inputs_is_refused_before_anything_runs() -> None:
    model = compiled()
    for batch in ((), (np.zeros((4, 6)),) * 2):
        with pytest.raises(UsageError, match=r"one array for each input(.*\n)*  try: model\(x\)"):
            model(*batch)


def test_a_training_for_another_machine_names_the_target_of_the_device() -> None:
    model = compiled(target="tiny")
    with stitch.open_device("host") as device:
        with pytest.raises(IncompatibleError, match=r"compiled for 'tiny'.*has no") as caught:
            model.start(device)
        assert caught.value.remedy == "compile(..., target='host')"


def test_a_pinned_place_is_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(*_: object, **__: object) -> None:
        raise LayoutError("an exported array is pinned there")

    model = compiled(target="tiny")
    monkeypatch.setattr(type(model.training), "start", pinned)
    with stitch.open_device("tiny") as device, pytest.raises(LayoutError, match="pinned there"):
        model.start(device)

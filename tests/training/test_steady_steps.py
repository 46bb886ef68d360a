"""Settled steps run at once: whatever callers do in between, results are the queue's own, to the
bit, and nothing is planned, bound or written any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array, DataType
from stitch.runtime import HookContext
from stitch.training import TrainingInstance
from tests.support.grids import in_turn, named
from tests.support.training.models import batches, compiled, mlp, values_of

STEPS = 14
Meddling = Callable[[TrainingInstance, int, Any], None]


def run(meddle: Meddling, **options: Any) -> tuple[list[Any], dict[str, Array], list[Any]]:
    """Losses and predictions of some steps with a caller who meddles, the state after them, and
    what the device had done by the end of each."""
    model = compiled(stitch.Adam(lr=0.01), **options)
    instance = model.start()
    assert model.training is not None
    data, seen, done = batches(3), [], []
    for step in range(STEPS):
        x, y = data[step % 3]
        pred = model(x)
        meddle(instance, step, pred)
        loss = model.training.loss(pred, y)
        loss.backward()
        meddle(instance, step, loss)
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
        seen += [loss.item(), values_of(pred).tolist()]
        done.append(replace(instance.device.statistics(), replays=0))
    state = instance.state_dict()
    instance.close()
    return seen, state, done


def nothing(instance: TrainingInstance, step: int, what: Any) -> None:
    """The loop as it is."""


def keep_everything(instance: TrainingInstance, step: int, what: Any) -> None:
    """As long as the training lives."""
    kept: list[Any] = vars(instance).setdefault("kept", [])
    kept.append(what)
    if len(kept) > 8:
        del kept[:4]


def read_and_write(instance: TrainingInstance, step: int, what: Any) -> None:
    if step % 4 == 3:
        weight = instance.get_tensor("fc1.weight")
        instance.set_tensor("fc1.weight", weight * np.float32(0.99))


def reads_inside(instance: TrainingInstance, step: int, what: Any) -> None:
    if step % 3 == 2 and hasattr(what, "tensor"):
        assert instance.get_tensor("gemm").shape == (16, 32)


def predict_in_between(instance: TrainingInstance, step: int, what: Any) -> None:
    if step % 3 == 1:
        instance.predict(batches(1)[0][0]).numpy()


def profile_some_steps(instance: TrainingInstance, step: int, what: Any) -> None:
    instance.profiling = step % 5 == 4


def allocate_and_free(instance: TrainingInstance, step: int, what: Any) -> None:
    device = instance.device
    kept = [device.tensor(np.ones((64, 64), np.float32)) for _ in range(3)]
    moved = [device.to_layout(t, device.tensor(np.ones(1)).layout) for t in kept[:1]]
    assert moved[0].numpy().all()


def copy_the_handle(instance: TrainingInstance, step: int, what: Any) -> None:
    if hasattr(what, "tensor"):
        other = copy.copy(what.tensor)
        assert np.isfinite(other.numpy()).all()


def raise_the_rate(instance: TrainingInstance, step: int, what: Any) -> None:
    instance.optimizer.lr = 0.01 + step / 1000


@pytest.mark.parametrize(("meddle", "options"), in_turn(named(lambda meddle: meddle.__name__, [
        nothing, keep_everything, read_and_write, reads_inside, predict_in_between,
        profile_some_steps, allocate_and_free, copy_the_handle, raise_the_rate,
    ]), [{}, {"target": "host"}, {"precision": DataType.BFLOAT16}]))  # fmt: skip
def test_a_caller_who_meddles_sees_what_the_queue_would_give(
    meddle: Meddling, options: dict[str, Any]
) -> None:
    def forgets(instance: TrainingInstance, step: int, what: Any) -> None:
        meddle(instance, step, what)
        instance.device.make_room()

    found, state, at_once = run(meddle, **options)
    expected, other, _ = run(forgets, **options)
    assert at_once[-1].plans_made == at_once[6].plans_made
    assert found == expected
    for name, value in other.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_predictions_that_are_kept_keep_their_values() -> None:
    model = compiled(stitch.SGD(lr=0.05))
    assert model.training is not None
    kept = []
    for x, y in batches(3) * 4:
        pred = model(x)
        kept.append((pred, values_of(pred)))
        loss = model.training.loss(pred, y)
        loss.backward()
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
    for pred, values in kept:
        np.testing.assert_array_equal(values_of(pred), values)


def test_losses_that_nobody_steps_on_keep_their_values() -> None:
    model = compiled()
    assert model.training is not None
    data = batches(6)
    for x, y in data[:4]:
        model.training.loss(model(x), y).backward()
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
    losses = [model.training.loss(model(x), y) for x, y in data]
    expected = [np.mean((model.instance.predict(x).numpy() - y) ** 2) for x, y in data]
    np.testing.assert_allclose([loss.item() for loss in losses], expected, rtol=1e-5)


def test_two_trainings_share_one_device() -> None:
    with stitch.open_device("tiny") as device:
        models = [
            compiled(stitch.Adam(lr=0.01), graph=mlp(name=name), target="tiny")
            for name in ("one", "two")
        ]
        losses: list[list[float]] = [[], []]
        for model in models:
            model.start(device)
        for x, y in batches(4) * 3:
            for model, mine in zip(models, losses, strict=True):
                assert model.training is not None
                loss = model.training.loss(model(x), y)
                loss.backward()
                model.training.optimizer.step()
                model.training.optimizer.zero_grad()
                mine.append(loss.item())
        assert losses[0] == losses[1]
        for model in models:
            model.instance.close()


def test_an_interrupted_update_leaves_the_weights_after_it() -> None:
    model = compiled()
    assert model.training is not None
    for x, y in batches(6):
        model.training.loss(model(x), y).backward()
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()

    def interrupt(context: HookContext) -> None:
        if context.operation is not None and context.program.name.endswith("update"):
            raise KeyboardInterrupt

    other = compiled()
    assert other.training is not None
    for a, b in [*batches(6), (x, y)]:
        other.training.loss(other(a), b).backward()
        other.training.optimizer.step()
        other.training.optimizer.zero_grad()
    model.instance.device.hooks.register(after_operation=interrupt)
    model.training.loss(model(x), y).backward()
    with pytest.raises(KeyboardInterrupt):
        model.training.optimizer.step()
    assert model.instance.steps == other.instance.steps == 7
    for name, array in other.instance.parameters().items():
        np.testing.assert_array_equal(model.instance.get_tensor(name), array)

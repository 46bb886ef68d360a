"""`TrainingInstance.step`: the bits of the loop written by hand, and nothing after an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError, UsageError
from stitch.program import InputKind
from tests.support.training.models import batches, compiled, mlp


def normalized() -> stitch.CompiledModel:
    """A model with running statistics, dropout and two inputs."""
    b = stitch.ComputationGraphBuilder("normalized")
    x, y = (b.input(name, (8, 6), "float32") for name in ("x", "y"))
    kinds = {"scale": InputKind.PARAMETER, "shift": InputKind.PARAMETER}
    kinds |= {"mean": InputKind.STATE, "variance": InputKind.STATE}
    operands = [b.input(name, (6,), "float32", kind) for name, kind in kinds.items()]
    made = b.apply("BatchNormalization", [x + y, *operands], 3, {"training_mode": 1})
    key = b.input("key", (1,), "int64", InputKind.KEY)
    drawn = b.op("Mod", np.arange(48).reshape(8, 6) * 7919 + b.op("Mod", key, 10007), 3)
    dropped = made[0] * b.cast(b.op("Greater", drawn, 0), "float32")
    for name, value in zip(("out", "mean", "variance"), (dropped, *made[1:]), strict=True):
        b.output(name, value)
    values = {
        name: np.full(6, start, np.float32) for name, start in zip(kinds, (1, 0, 0, 1), strict=True)
    }
    return stitch.compile(
        b.build(), optimizer=stitch.Adam(lr=0.1), loss="mse", weights=values, accumulation_steps=3,
        clip_grad_norm=0.1,
    )  # fmt: skip


def micro_batches(count: int) -> list[tuple[dict[str, Any], Any]]:
    rng = np.random.default_rng(count)
    arrays = rng.standard_normal((count, 3, 8, 6)).astype(np.float32)
    return [({"x": x, "y": y}, target) for x, y, target in arrays]


def equal_states(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_a_step_has_the_bits_of_the_loop_written_by_hand() -> None:
    one, other = normalized(), normalized()
    with one.start() as instance, other.start() as by_hand:
        for step in range(3):
            data = micro_batches(3 + step)[:3]
            losses = []
            for inputs, target in data:
                loss = by_hand.loss_fn(other(**inputs), target)
                loss.backward()
                losses.append(loss.item())
            by_hand.optimizer.step()
            assert instance.step(data) == losses
            for name in ("scale.grad", "shift.grad", "gradient_norm"):
                np.testing.assert_array_equal(
                    instance.get_tensor(name), by_hand.get_tensor(name), err_msg=name
                )
            by_hand.optimizer.zero_grad()
            equal_states(instance.state_dict(), by_hand.state_dict())


@pytest.mark.parametrize("at", [0, 1, 2])
def test_nan_in_any_loss_leaves_everything_as_before_the_step(at: int) -> None:
    with normalized().start() as instance:
        instance.step(micro_batches(3))
        before = instance.state_dict()
        data = micro_batches(4)[:3]
        data[at] = (data[at][0], np.full((8, 6), np.nan, np.float32))
        with pytest.raises(TaskError, match="the loss of step 1 is nan"):
            instance.step(data)
        equal_states(instance.state_dict(), before)
        good = instance.step(micro_batches(4)[:3])
    with normalized().start() as undisturbed:
        undisturbed.step(micro_batches(3))
        assert undisturbed.step(micro_batches(4)[:3]) == good


def test_a_batch_that_does_not_fit_leaves_everything_as_before_the_step() -> None:
    with normalized().start() as instance:
        before = instance.state_dict()
        wrong = [*micro_batches(3)[:2], ({"x": np.zeros((8, 6))}, np.zeros((8, 6)))]
        with pytest.raises(UsageError, match="one array for each input"):
            instance.step(wrong)
        with pytest.raises(UsageError, match="a pair of inputs and target"):
            instance.step([*micro_batches(3)[:2], np.zeros((8, 6))])  # type: ignore[list-item]
        equal_states(instance.state_dict(), before)


def test_a_step_needs_as_many_micro_batches_as_the_training_accumulates() -> None:
    model = compiled(graph=mlp(8), accumulation_steps=2)
    with model.start() as instance:
        x, y = batches(1, 8)[0]
        with pytest.raises(UsageError, match="as many micro-batches") as caught:
            instance.step([(x, y)])
        assert "accumulation_steps=1" in str(caught.value)
        with pytest.raises(UsageError, match="a list of micro-batches, each a pair"):
            instance.step((x, y))  # type: ignore[arg-type]
        assert len(instance.step([(x, y), ((x,), y)])) == 2

"""Steps of a training that are observed: the same weights, copies and plans as bare ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.report import ChromeTrace
from stitch.runtime import Totals
from stitch.runtime.history import Statistics
from tests.support.grids import every

ROWS, WIDTH, CLASSES = 8, 16, 4
STEPS = 12
MOMENTS = ("before_program", "after_program", "before_operation", "after_operation")


def nothing(context: object) -> None:
    """A hook that looks on."""


def observed(device: stitch.Device, how: str) -> Callable[[], None]:
    """Begin to observe a device; gives what ends that."""
    if how == "listener":
        return device.events.subscribe(nothing)
    if how == "trace":
        return ChromeTrace(device).close
    return device.hooks.register(**{how: nothing})


OBSERVERS = ("listener", "trace", *MOMENTS)


def compiled() -> stitch.CompiledModel:
    random = np.random.default_rng(0)
    builder = stitch.ComputationGraphBuilder("classifier")
    h = builder.input("x", (ROWS, WIDTH), "float32")
    for number, width in enumerate((WIDTH, CLASSES)):
        w = random.standard_normal((WIDTH, width), np.float32) * np.float32(0.1)
        weights = builder.parameter(f"w{number}", w)
        bias = builder.parameter(f"b{number}", np.zeros(width, np.float32))
        h = builder.op("Gemm", builder.op("Relu", h) if number else h, weights, bias)
    builder.output("y", h)
    loss = stitch.losses.CrossEntropyLoss()
    return stitch.compile(builder.build(), target="tiny", optimizer=stitch.Adam(lr=0.01), loss=loss)


def trained(how: str, rounds: int
            ) -> tuple[list[float], dict[str, bytes], Totals, list[Statistics]]:  # fmt: skip
    """Losses, weights, what all of it did, and what was counted after each round of steps; every
    other round is observed."""
    random = np.random.default_rng(1)
    batch: Array = random.standard_normal((ROWS, WIDTH), np.float32)
    labels = random.integers(0, CLASSES, ROWS)
    model, losses, counted = compiled(), [], []
    assert model.training is not None
    with stitch.open_device("tiny") as device, model.training.start(device) as instance:
        compute_loss, optimizer = model.training.loss, model.training.optimizer
        for number in range(rounds):
            end = observed(device, how) if how != "nobody" and number % 2 == 0 else None
            for _ in range(STEPS):
                loss = compute_loss(instance(batch), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.item()))
            if end is not None:
                end()
            counted.append(device.statistics())
        weights = {name: array.tobytes() for name, array in instance.state_dict().items()}
        total = device.account().total
    return losses, weights, total, counted


@pytest.mark.parametrize("how", every(2, OBSERVERS))
def test_losses_weights_and_copies_are_those_of_the_bare_steps(how: str) -> None:
    bare, seen = trained("nobody", 1), trained(how, 1)
    assert bare[:3] == seen[:3]


@pytest.mark.parametrize("how", every(2, OBSERVERS))
def test_nothing_is_made_or_written_anew_while_observers_come_and_go(how: str) -> None:
    losses, _, _, counted = trained(how, 6)
    assert losses[-1] < losses[0]
    settled, last = counted[1], counted[-1]
    for what in ("plans_made", "recordings_made", "bindings_made", "code_written"):
        assert getattr(last, what) == getattr(settled, what), what

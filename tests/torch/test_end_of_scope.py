"""Training stops when its model goes out of scope: at once, by reference counting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import TaskError
from tests.support.grids import every

LOSS = nn.CrossEntropyLoss()
LABELS = torch.tensor([0, 2, 1, 1])
Start = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def no_gc() -> Iterator[None]:
    """Without the cyclic garbage collector: what ends here ends by its references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Net(nn.Module):
    """A layer, with running statistics behind it, which the training shares with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x))


def batch(seed: int = 0) -> Any:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def training() -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


STARTS: dict[str, Start] = {
    "module_without_a_loss": lambda net, optimizer: net.compile(optimizer=optimizer),
    "module": lambda net, optimizer: net.compile(optimizer=optimizer, loss=LOSS),
    "function": lambda net, optimizer: stitch.torch.compile(net, optimizer=optimizer),
    "with_an_example": lambda net, optimizer: stitch.torch.compile(
        net, (batch(),), optimizer=optimizer, loss=LOSS
    ),
}


def step(model: Any, optimizer: Any, seed: int) -> float:
    loss = LOSS(model(batch(seed)), LABELS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def epoch(net: Any, optimizer: Any, start: Start = STARTS["module_without_a_loss"]) -> list[float]:
    model = start(net, optimizer)
    return [step(model, optimizer, seed) for seed in range(3)]


@pytest.mark.parametrize("start", every(2, STARTS.values()), ids=STARTS)
def test_a_function_that_trains_is_called_again_and_eager_steps_go_on(start: Start) -> None:
    for _ in range(3):
        net, optimizer = training()
        epoch(net, optimizer, start)
        epoch(net, optimizer, start)
        step(net, optimizer, 3)


def test_two_epochs_with_a_model_each_and_eager_steps_are_torchs() -> None:
    net, optimizer = training()
    found = [*epoch(net, optimizer), *epoch(net, optimizer), step(net, optimizer, 3)]
    twin, theirs = training()
    expected = [step(twin, theirs, seed) for seed in (0, 1, 2, 0, 1, 2, 3)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def forward(model: Any, optimizer: Any) -> Any:
    return model(batch())


def unused_loss(model: Any, optimizer: Any) -> Any:
    return LOSS(model(batch()), LABELS)


def unused_gradients(model: Any, optimizer: Any) -> Any:
    loss = LOSS(model(batch()), LABELS)
    loss.backward()
    return loss


def refused_step(model: Any, optimizer: Any) -> None:
    LOSS(model(batch() * float("nan")), LABELS).backward()
    with pytest.raises(TaskError, match="nan"):
        optimizer.step()


@pytest.mark.parametrize("last", [forward, unused_loss, unused_gradients, refused_step])
def test_a_training_ends_wherever_it_was(last: Callable[[Any, Any], Any]) -> None:
    net, optimizer = training()

    def train() -> weakref.ref[Any]:
        model = net.compile(optimizer=optimizer)
        step(model, optimizer, 0)
        last(model, optimizer)
        return weakref.ref(model.instance)

    assert train()() is None
    step(net, optimizer, 1)
    epoch(net, optimizer)


def test_what_a_training_gave_is_read_after_it_and_not_gone_back_from() -> None:
    net, optimizer = training()
    model = net.compile(optimizer=optimizer)
    step(model, optimizer, 0)
    pred = model(batch())
    loss = LOSS(pred, LABELS)
    expected = loss.item(), np.asarray(pred).copy()
    del model
    assert loss.item() == expected[0]
    np.testing.assert_array_equal(np.asarray(pred), expected[1])
    for late in (loss.backward, (loss / 2).backward, lambda: LOSS(pred, LABELS)):
        with pytest.raises(TaskError, match=r"has ended(.|\n)*keep a reference to the model"):
            late()


def test_programs_and_pipelines_end_with_their_last_reference() -> None:
    source = stitch.compile(torch.nn.Linear(6, 6), (batch(),), target="tiny")
    with stitch.open_device("tiny") as device:
        a, b = device.load(source), device.load(source)
        pipeline = stitch.Pipeline([a, b])
        for seed in range(3):
            np.asarray(pipeline(batch(seed)))
            np.asarray(b(a(batch(seed))))
        ends = [weakref.ref(one) for one in (pipeline, a, b)]
        del pipeline, a, b
        device.flush()
        assert [end() for end in ends] == [None] * 3

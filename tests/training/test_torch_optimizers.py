"""Optimizers of torch.optim as they are: the same steps on the device as torch takes."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stitch
from stitch.errors import UsageError
from tests.support.grids import every, every_row, in_turn

STEPS = 22
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1}),
]
Made = Callable[[Any], Any]


class Twins:
    """One network that torch trains, and its copy that Stitch trains, with optimizers alike."""

    def __init__(self, make: Made) -> None:
        torch.manual_seed(0)
        self.torch_net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.net = copy.deepcopy(self.torch_net)
        self.torch_optimizer, self.optimizer = make(self.torch_net), make(self.net)
        self.loss_fn = nn.CrossEntropyLoss()
        self.model = stitch.compile(
            self.net, (torch.ones(12, 6),), target="host", optimizer=self.optimizer,
            loss=self.loss_fn,
        )  # fmt: skip

    def step(self, count: int = STEPS) -> None:
        for _ in range(count):
            x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
            expected = self.loss_fn(self.torch_net(x), y)
            expected.backward()
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad()
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)

    def compare(self) -> None:
        for name, parameter in self.torch_net.named_parameters():
            found = self.model.instance.get_tensor(name)
            np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), every_row(2, OPTIMIZERS))
def test_steps_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    twins = Twins(lambda net: kind(net.parameters(), lr=0.02, **options))
    twins.step()
    twins.compare()
    theirs, ours = twins.torch_optimizer.state_dict(), twins.optimizer.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    for number, state in theirs["state"].items():
        kept = {word: value for word, value in state.items() if value is not None}
        assert kept.keys() == ours["state"][number].keys()
        for word, value in kept.items():
            found = ours["state"][number][word]
            np.testing.assert_allclose(found, value, rtol=1e-3, atol=1e-4, err_msg=word)


def grouped(name: str, **options: Any) -> Made:
    def make(net: Any) -> Any:
        groups = [
            {"params": net[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": net[2].parameters()},
        ]
        return getattr(torch.optim, name)(groups, lr=0.05, **options)

    return make


@pytest.mark.parametrize(
    "name", every(3, ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad"])
)
def test_groups_go_by_settings_of_their_own(name: str) -> None:
    twins = Twins(grouped(name))
    twins.step()
    twins.compare()


SCHEDULERS: list[Made] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.5),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=STEPS + 1),
]


@pytest.mark.parametrize(
    ("name", "make", "before"), in_turn(["SGD", "Adam"], SCHEDULERS, [True, False])
)
def test_schedulers_of_torch_set_rates_and_momenta(name: str, make: Made, before: bool) -> None:
    twins = Twins(grouped(name, **({"momentum": 0.5} if name == "SGD" else {})))
    if not before:
        twins.model.start()
    schedules = make(twins.torch_optimizer), make(twins.optimizer)
    for _ in range(STEPS):
        twins.step(1)
        for schedule in schedules:
            schedule.step()
    twins.compare()


def test_a_state_that_is_loaded_goes_to_the_device() -> None:
    twins = Twins(lambda net: torch.optim.Adam(net.parameters(), lr=0.02))
    twins.step(4)
    before = copy.deepcopy(twins.optimizer.state_dict())
    twins.step(3)
    twins.optimizer.load_state_dict(before)
    twins.torch_optimizer.load_state_dict(copy.deepcopy(before))
    twins.step(4)
    twins.compare()
    assert int(twins.optimizer.state_dict()["state"][0]["step"]) == 8


@pytest.mark.parametrize("end", ["close", "scope"])
def test_the_optimizer_is_its_own_again_when_training_ends(end: str) -> None:
    twins = Twins(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    twins.step(1)
    assert "step" in vars(twins.optimizer)
    if end == "close":
        twins.model.instance.close()
    else:
        del twins.model
        gc.collect()
    assert not {"step", "zero_grad"} & vars(twins.optimizer).keys()
    twins.net[0].weight.grad = torch.ones(8, 6)
    before = twins.net[0].weight.detach().clone()
    twins.optimizer.step()
    assert not torch.equal(before, twins.net[0].weight)


def test_a_closure_is_called_before_the_step() -> None:
    twins = Twins(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))

    def closure() -> Any:
        twins.optimizer.zero_grad()
        loss = twins.loss_fn(twins.model(x), y)
        loss.backward()
        return loss

    twins.model.start()
    first = twins.optimizer.step(closure)
    second = twins.optimizer.step(closure)
    assert second.item() < first.item()


def test_groups_and_settings_are_in_the_json() -> None:
    twins = Twins(grouped("NAdam"))
    twins.step(3)
    other = stitch.CompiledModel.load(io.StringIO(twins.model.as_json()))
    assert other.training is not None
    assert twins.model.training is not None
    assert other.training.optimizer.config() == twins.model.training.optimizer.config()
    x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
    losses = []
    for model in (twins.model, other):
        optimizer = model.training.optimizer  # type: ignore[union-attr]  # it has one
        for _ in range(2):
            loss = twins.loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.item(), model.instance.get_tensor("0.weight").tobytes()))
    assert losses[0] == losses[1]


def refusal(make: Made, **options: Any) -> str:
    net = nn.Linear(6, 5)
    with pytest.raises(UsageError) as caught:
        stitch.compile(
            net, (torch.ones(2, 6),), target="host", optimizer=make(net),
            loss=nn.CrossEntropyLoss(), **options,
        )  # fmt: skip
    return str(caught.value)


def test_an_optimizer_that_we_lack_is_named_with_those_we_have() -> None:
    told = refusal(lambda net: torch.optim.Adadelta(net.parameters()))
    assert "optimizer Adadelta is not supported" in told
    assert "SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad" in told


def test_a_group_over_other_tensors_is_refused() -> None:
    told = refusal(lambda net: torch.optim.SGD([nn.Parameter(torch.ones(3, 7))], lr=0.1))
    assert "not parameters of the compiled module" in told
    assert "a tensor of shape [3, 7]" in told


def test_a_group_that_came_later_is_refused() -> None:
    twins = Twins(lambda net: torch.optim.SGD(net[2].parameters(), lr=0.1))
    twins.step(1)
    twins.optimizer.add_param_group({"params": twins.net[0].parameters()})
    loss = twins.loss_fn(twins.model(torch.ones(12, 6)), torch.zeros(12, dtype=torch.int64))
    loss.backward()
    with pytest.raises(UsageError, match="was added after the model was compiled"):
        twins.optimizer.step()


def test_groups_of_stitch_name_their_parameters() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    optimizer = stitch.SGD(lr=0.1)
    optimizer.add_group(["bias"], lr=0.0)
    model = stitch.compile(net, (torch.ones(2, 6),), target="host", optimizer=optimizer, loss="mse")
    loss = stitch.losses.MSELoss()(model(np.ones((2, 6))), np.ones((2, 5)))
    loss.backward()
    optimizer.step()
    assert np.array_equal(model.instance.get_tensor("bias"), net.bias.detach().numpy())
    assert not np.array_equal(model.instance.get_tensor("weight"), net.weight.detach().numpy())
    with pytest.raises(UsageError, match="no setting 'momentun'"):
        optimizer.add_group(["weight"], momentun=0.9)
    with pytest.raises(UsageError, match="parameters are in two groups"):
        optimizer.add_group(["bias"])


def test_an_update_that_is_to_be_differentiated_is_refused() -> None:
    told = refusal(
        lambda net: torch.optim.SGD([{"params": net.parameters(), "differentiable": True}], lr=0.1)
    )
    assert "differentiable" in told

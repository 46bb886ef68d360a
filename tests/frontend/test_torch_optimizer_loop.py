"""`torch.compile(options={"optimizer": ...})`: torch's loop, with steps that are programs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stitch
from stitch.errors import UsageError
from stitch.frontend import RelocatedParameters
from tests.support.grids import every, in_turn, rows

TARGETS = ("host", "wormhole_n150")
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    ("AdamW", {"lr": 0.02, "amsgrad": True}),
    ("NAdam", {"lr": 0.02}),
    ("RAdam", {"lr": 0.02}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


class Twins:
    """A network that torch trains, and its copy whose graphs and optimizer run here."""

    def __init__(self, make: Callable[[Any], Any], target: str) -> None:
        torch.manual_seed(0)
        self.eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.net = copy.deepcopy(self.eager)
        self.eager_optimizer, self.optimizer = make(self.eager), make(self.net)
        self.places = [p.data_ptr() for p in self.net.parameters()]
        self.options = {"algorithm": "none", "optimizer": self.optimizer, "target": target}
        self.compiled = torch.compile(self.net, backend="stitch", options=self.options)
        self.loss_fn = nn.CrossEntropyLoss()

    def step(self, count: int = 4) -> None:
        for _ in range(count):
            x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
            losses = []
            for model, optimizer in (
                (self.eager, self.eager_optimizer), (self.compiled, self.optimizer),
            ):  # fmt: skip
                loss = self.loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    def compare(self) -> None:
        for one, other in zip(self.eager.parameters(), self.net.parameters(), strict=True):
            torch.testing.assert_close(other.detach(), one.detach(), rtol=1e-4, atol=1e-5)

    def lie(self) -> list[bool]:
        """Which parameters lie where they lay before."""
        parameters = self.net.parameters()
        return [p.data_ptr() == at for p, at in zip(parameters, self.places, strict=True)]


def made(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda net: getattr(torch.optim, name)(net.parameters(), **options)


@pytest.mark.parametrize(("target", "name", "options"), in_turn(TARGETS, rows(OPTIMIZERS)))
def test_steps_are_those_of_torch(name: str, options: dict[str, Any], target: str) -> None:
    twins = Twins(made(name, **options), target)
    twins.step(20)
    twins.compare()
    states = (twins.eager_optimizer.state_dict(), twins.optimizer.state_dict())
    for number, state in states[0]["state"].items():
        for word, value in state.items():
            if value is not None:
                found = states[1]["state"][number][word]
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4, check_dtype=False)


def test_the_update_is_a_program_and_weights_stay_on_the_device() -> None:
    twins = Twins(made("SGD", lr=0.1, momentum=0.9), "wormhole_n150")
    twins.step(3)
    device = stitch.device_of({"target": "wormhole_n150"})
    device.history.clear()
    twins.step(6)
    told = device.explain()
    assert "18 program runs" in told
    # The batch twice, the gradient of the prediction, the rate: no weight, no state.
    assert "24 copies" in told
    assert twins.lie() == [False] * 4


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_what_torch_writes_to_a_parameter_counts_in_the_next_step(target: str) -> None:
    twins = Twins(made("SGD", lr=0.1, momentum=0.9), target)
    for way in range(4):
        twins.step(2)
        for net in (twins.eager, twins.net):
            with torch.no_grad():
                if way == 0:
                    net[0].weight.mul_(0.5)
                elif way == 1:
                    net[2].bias.data[1] = 0.25
                elif way == 2:
                    net[0].bias.detach().numpy()[:] = 0.125
                else:
                    net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
    twins.step(2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_schedulers_and_groups_work(target: str) -> None:
    def make(net: Any) -> Any:
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)

    twins = Twins(make, target)
    schedules = [
        lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=12)
        for optimizer in (twins.eager_optimizer, twins.optimizer)
    ]
    for _ in range(10):
        twins.step(1)
        for schedule in schedules:
            schedule.step()
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_state_is_saved_and_loaded(target: str) -> None:
    twins = Twins(made("Adam", lr=0.02), target)
    twins.step(3)
    kept = copy.deepcopy((twins.net.state_dict(), twins.optimizer.state_dict()))
    same = copy.deepcopy((twins.eager.state_dict(), twins.eager_optimizer.state_dict()))
    twins.step(2)
    twins.net.load_state_dict(kept[0])
    twins.optimizer.load_state_dict(kept[1])
    twins.eager.load_state_dict(same[0])
    twins.eager_optimizer.load_state_dict(same[1])
    twins.step(3)
    twins.compare()
    assert float(twins.optimizer.state_dict()["state"][0]["step"]) == 6


def test_parameters_without_a_gradient_are_left_alone() -> None:
    twins = Twins(made("Adam", lr=0.02), "host")
    for net in (twins.eager, twins.net):
        net[0].requires_grad_(False)
    before = twins.net[0].weight.detach().clone()
    twins.step(3)
    twins.compare()
    assert torch.equal(before, twins.net[0].weight)


def test_torch_steps_parameters_that_are_not_float32() -> None:
    twins = Twins(made("SGD", lr=0.1, momentum=0.9), "host")
    twins.eager.double()
    twins.net.double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 5, (12,))
    for model, optimizer in (
        (twins.eager, twins.eager_optimizer), (twins.compiled, twins.optimizer),
    ):  # fmt: skip
        for _ in range(2):
            twins.loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_the_end_of_the_graphs_gives_everything_back(target: str) -> None:
    twins = Twins(made("SGD", lr=0.1, momentum=0.9), target)
    twins.step(3)
    assert "step" in vars(twins.optimizer)
    twins.compiled = None
    torch._dynamo.reset()
    gc.collect()
    assert not {"step", "zero_grad"} & vars(twins.optimizer).keys()
    assert twins.lie() == [True] * 4
    twins.compare()


def test_an_optimizer_that_we_lack_is_named() -> None:
    twins = Twins(made("Adadelta"), "host")
    with pytest.raises(Exception, match="optimizer Adadelta is not supported") as caught:
        twins.compiled(torch.ones(12, 6))
    assert "SGD, Adam, AdamW" in str(caught.value)


def test_an_optimizer_of_the_same_name_that_is_not_torchs_is_refused() -> None:
    kind = type("SGD", (torch.optim.SGD,), {"__module__": "elsewhere"})
    twins = Twins(lambda net: kind(net.parameters(), lr=0.1), "host")
    with pytest.raises(Exception, match="optimizer SGD is not supported") as caught:
        twins.compiled(torch.ones(12, 6))
    assert "elsewhere.SGD" in str(caught.value)


@pytest.mark.parametrize(("target", "kind"), in_turn(TARGETS, [torch.float32, torch.float64]))
def test_hooks_of_a_step_are_called_once_and_what_they_change_counts(
    kind: Any, target: str
) -> None:
    net = nn.Linear(2, 1, bias=False).to(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    options = {"optimizer": optimizer, "target": target}
    compiled = torch.compile(net, backend="stitch", options=options)
    compiled(torch.ones(1, 2, dtype=kind)).sum().backward()
    told: list[Any] = []

    def before(theirs: Any, arguments: Any, named: Any) -> None:
        told.append((theirs, arguments, named))
        net.weight.grad.mul_(0.25)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *given: told.append(given))
    wanted = net.weight.detach() - 0.25
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), wanted)
    assert told == [(optimizer, (optimizer,), {})] * 2


@pytest.mark.parametrize(("target", "name"), in_turn(TARGETS, ["SGD", "Adam"]))
def test_a_fused_step_under_a_scaler_of_gradients_is_torchs(name: str, target: str) -> None:
    twins = Twins(made(name, lr=0.05, fused=True), target)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for factor in (1.0, 1.0, float("inf"), 1.0):
        x = torch.randn(12, 6)
        for model, optimizer, scaler in (
            (twins.eager, twins.eager_optimizer, scalers[0]),
            (twins.compiled, twins.optimizer, scalers[1]),
        ):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    twins.compare()


@pytest.mark.parametrize("change", [
    lambda groups: groups[0]["params"].append(groups[1]["params"].pop()),
    lambda groups: groups[0]["params"].reverse(),
    lambda groups: groups[1]["params"].append(nn.Parameter(torch.ones(3))),
])  # fmt: skip
def test_other_parameters_in_a_group_are_told(change: Callable[[Any], object]) -> None:
    def make(net: Any) -> Any:
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1)

    twins = Twins(make, "host")
    twins.step(1)
    twins.compiled(torch.ones(12, 6)).sum().backward()
    change(twins.optimizer.param_groups)
    with pytest.raises(UsageError, match="were changed after the model was compiled"):
        twins.optimizer.step()


def test_what_is_no_optimizer_is_refused() -> None:
    options = {"optimizer": "sgd"}
    run = torch.compile(lambda x: x + 1, backend="stitch", options=options)
    with pytest.raises(Exception, match=r"an optimizer of torch\.optim"):
        run(torch.ones(3))


def test_parameters_are_restored_though_torch_traces_something_else() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    parameter, relocated = torch.nn.Parameter(torch.zeros(3)), RelocatedParameters()
    original = parameter.data
    relocated.relocate(parameter, torch.ones(3))
    with FakeTensorMode():
        relocated.restore()
    assert parameter.data_ptr() == original.data_ptr()
    assert original.tolist() == [1, 1, 1]

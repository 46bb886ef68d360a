"""`torch.compile(options={"optimizer": ...})`: steps are programs that overwrite parameters and
state in place: nothing moves from the first step on, whatever torch does between steps."""

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
from stitch.runtime import PreparedGraph
from tests.support.grids import every, in_turn, rows
from tests.support.interrupts import interrupt_next_plan

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
    """Two copies of a network, by eager torch and by programs, stepped on the same gradients."""

    def __init__(
        self, net: Any, target: str, kind: Any = torch.optim.Adam,
        groups: Callable[[Any], Any] = nn.Module.parameters, **settings: Any,
    ) -> None:  # fmt: skip
        self.nets = (net, copy.deepcopy(net))
        self.optimizers = [kind(groups(each), **{"lr": 0.05, **settings}) for each in self.nets]
        self.optimizer = self.optimizers[1]
        options = {"optimizer": self.optimizer, "target": target}
        self.device = stitch.device_of({"target": target})
        self.calls: Any = [
            self.nets[0], torch.compile(self.nets[1], backend="stitch", options=options)
        ]  # fmt: skip

    def both(self, change: Callable[[Any], object]) -> None:
        """The same with both networks."""
        with torch.no_grad():
            for net in self.nets:
                change(net)

    def step(self, x: Any, count: int = 1) -> None:
        for _ in range(count):
            losses = []
            for call, optimizer in zip(self.calls, self.optimizers, strict=True):
                optimizer.zero_grad()
                loss = call(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-3)

    def compare(self) -> None:
        for ours, eager in zip(self.nets[1].parameters(), self.nets[0].parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), eager.detach(), rtol=1e-4, atol=1e-5)

    def places(self) -> list[int]:
        """Where parameters and their state lie."""
        state = self.optimizer.state
        kept = [t for p in self.nets[1].parameters() for t in (p, *state[p].values())]
        return [t.data_ptr() for t in kept if t.dim()]

    @property
    def first(self) -> Any:
        return next(self.nets[1].parameters())


def linear() -> Any:
    torch.manual_seed(3)
    return nn.Linear(4, 4)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))


def layer_groups(net: Any) -> Any:
    """Two parameter groups with rates of their own."""
    return [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_nothing_moves_from_the_first_step_on(target: str) -> None:
    twins, x = Twins(linear(), target), torch.randn(3, 4)
    twins.step(x)
    view, places = twins.first.detach()[1:3], twins.places()
    before = view.clone()
    twins.step(x, 4)
    assert twins.places() == places
    assert not torch.equal(view, before)
    assert torch.equal(view, twins.first.detach()[1:3])
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_parameters_with_axes_in_another_order_are_stepped(target: str) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    twins, x = Twins(net, target), torch.randn(2, 3, 6, 6)
    twins.step(x, 3)
    twins.optimizer.load_state_dict(_row_major(twins.optimizers[0].state_dict()))
    twins.both(lambda net: net.weight.mul_(0.5))
    twins.step(x, 2)
    twins.compare()


def _row_major(state: Any) -> Any:
    """A state as one who does not know the order would have kept it."""
    state = copy.deepcopy(state)
    for kept in state["state"].values():
        kept.update({word: tensor.contiguous() for word, tensor in kept.items()})
    return state


@pytest.mark.parametrize(
    ("target", "change"),
    in_turn(
        TARGETS,
        [
            lambda net: net.weight.mul_(0.5),
            lambda net: net.bias.detach().numpy().fill(0.125),
            lambda net: net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()}),
            lambda net: setattr(net.weight, "data", net.weight.data.clone().mul_(0.5)),
            # The same bytes, seen in another order.
            lambda net: setattr(net.weight, "data", net.weight.data.t()),
            lambda net: net.weight.data.resize_(0).resize_(4, 4).copy_(torch.ones(4, 4)),
            lambda net: net.bias.set_(torch.full((4,), 0.25)),
        ],
    ),
)
def test_a_parameter_that_torch_writes_or_puts_elsewhere_is_stepped_as_it_is(
    change: Callable[[Any], object], target: str
) -> None:
    twins, x = Twins(linear(), target), torch.randn(3, 4)
    for _ in range(2):
        twins.step(x, 2)
        twins.both(change)
    twins.step(x, 2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_parameter_of_another_shape_is_stepped_in_that(target: str) -> None:
    twins = Twins(nn.Linear(4, 1, bias=False), target, torch.optim.SGD)
    twins.step(torch.randn(3, 4), 2)
    twins.both(lambda net: setattr(net.weight, "data", net.weight.data.reshape(2, 2)))
    twins.step(torch.randn(3, 2), 2)
    twins.compare()


@pytest.mark.parametrize(("target", "word"), in_turn(TARGETS, ["exp_avg", None]))
def test_a_gradient_that_is_what_it_steps_is_read_as_it_was(word: str | None, target: str) -> None:
    twins, x = Twins(linear(), target, weight_decay=0.1), torch.randn(3, 4)
    twins.step(x)
    for net, optimizer in zip(twins.nets, twins.optimizers, strict=True):
        parameter, state = net.weight, optimizer.state[net.weight]
        kept = parameter.detach() if word is None else state[word]
        parameter.grad = kept.clone() if optimizer is twins.optimizers[0] else kept
        optimizer.step()
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_gradient_within_what_is_overwritten_is_read_as_it_was(target: str) -> None:
    twins, x = Twins(linear(), target, torch.optim.SGD), torch.randn(3, 4)
    twins.step(x)
    for net, optimizer in zip(twins.nets, twins.optimizers, strict=True):
        optimizer.zero_grad()
        row = net.weight.detach()[1]
        for _ in range(4):  # What comes again is read where it lies.
            net.weight.grad = torch.ones(4, 4)
            net.bias.grad = row.clone() if optimizer is twins.optimizers[0] else row
            optimizer.step()
    twins.compare()


@pytest.mark.parametrize(("target", "late"), in_turn(TARGETS, [False, True]))
def test_a_step_that_was_interrupted_leaves_what_was_written(
    late: bool, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, x = Twins(linear(), target, torch.optim.SGD, momentum=0.9), torch.randn(3, 4)
    twins.step(x, 2)
    run = PreparedGraph.run

    def interrupted(graph: Any, arguments: Any) -> Any:
        if "step" in repr(graph._title):
            if late:
                run(graph, arguments)
            raise KeyboardInterrupt
        return run(graph, arguments)

    twins.calls[1](x).square().sum().backward()
    monkeypatch.setattr(PreparedGraph, "run", interrupted)
    before = twins.first.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        twins.optimizer.step()
    monkeypatch.undo()
    assert torch.equal(twins.first.detach(), before) is not late
    # From there on as torch would from there on.
    twins.nets[0].load_state_dict(twins.nets[1].state_dict())
    twins.optimizers[0].load_state_dict(copy.deepcopy(twins.optimizer.state_dict()))
    twins.step(x, 2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_first_step_that_was_interrupted_is_still_to_be_taken(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5}
    twins, x = Twins(linear(), target, torch.optim.SGD, **settings), torch.randn(3, 4)
    twins.calls[1](x).square().sum().backward()

    def interrupted(graph: Any, arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PreparedGraph, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        twins.optimizer.step()
    monkeypatch.undo()
    assert not twins.optimizer.state
    twins.step(x, 3)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_step_that_was_interrupted_before_it_ran_does_not_run_later(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, x = Twins(linear(), target, torch.optim.SGD), torch.randn(3, 4)
    twins.calls[1](x).square().sum().backward()
    interrupt_next_plan(twins.device)
    with pytest.raises(KeyboardInterrupt):
        twins.optimizer.step()
    twins.both(lambda net: net.weight.fill_(0.25))
    twins.both(lambda net: net.bias.fill_(0.5))
    twins.step(x, 2)
    twins.compare()


@pytest.mark.parametrize(
    ("target", "kind", "word", "on", "off"),
    in_turn(
        TARGETS,
        rows(
            [
                (torch.optim.Adam, "amsgrad", True, False),
                (torch.optim.RMSprop, "momentum", 0.5, 0.0),
                (torch.optim.RMSprop, "centered", True, False),
                (torch.optim.SGD, "momentum", 0.9, 0.0),
            ]
        ),
    ),
)
def test_a_state_that_is_not_used_for_a_while_waits_where_it_is(
    kind: Any, word: str, on: object, off: object, target: str
) -> None:
    settings: dict[str, Any] = {word: on, "lr": 0.01}
    twins, x = Twins(linear(), target, kind, **settings), torch.randn(3, 4)
    for value in (on, off, on):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0][word] = value
        twins.step(x, 2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_state_of_another_type_or_shape_is_refused_as_by_torch(target: str) -> None:
    twins, x = Twins(linear(), target), torch.randn(3, 4)
    twins.step(x)
    state = twins.optimizer.state[twins.nets[1].weight]
    kept = state["exp_avg"]
    twins.calls[1](x).square().sum().backward()
    for other in (kept.double(), kept[:3].clone()):
        state["exp_avg"] = other
        with pytest.raises(RuntimeError, match=r"dtype|must match"):
            twins.optimizer.step()
    # The device works on.
    state["exp_avg"] = kept
    twins.calls[1](x)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_what_backward_needs_and_a_step_has_overwritten_is_told(target: str) -> None:
    twins, x = Twins(nn.Sequential(linear(), nn.Tanh(), linear()), target), torch.randn(3, 4)
    twins.step(x)
    for call, optimizer in zip(twins.calls, twins.optimizers, strict=True):
        loss = call(x).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_parameters_without_elements_are_stepped_with_the_others(target: str) -> None:
    net = linear()
    net.nothing = nn.Parameter(torch.empty(0, 3))
    twins, x = Twins(net, target), torch.randn(3, 4)
    for _ in range(3):
        for net, call, optimizer in zip(twins.nets, twins.calls, twins.optimizers, strict=True):
            optimizer.zero_grad()
            (call(x).square().sum() + net.nothing.sum()).backward()
            optimizer.step()
    twins.compare()
    assert twins.nets[1].nothing.shape == (0, 3)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_other_graphs_read_what_the_last_step_left(target: str) -> None:
    twins, x = Twins(linear(), target), torch.randn(3, 4)
    part = torch.compile(
        lambda x, w: x[:, :2] @ w[1:3, :2], backend="stitch", options={"target": target}
    )
    for _ in range(4):
        twins.step(x)
        rows = twins.first.detach()[1:]
        found = part(x, twins.first.detach()), part(x, torch.cat([x[:1], rows]))
        wanted = x[:, :2] @ twins.nets[0].weight.detach()[1:3, :2]
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)
    twins.compare()


@pytest.mark.parametrize(("target", "name", "options"), in_turn(TARGETS, rows(OPTIMIZERS)))
def test_steps_are_those_of_torch(name: str, options: dict[str, Any], target: str) -> None:
    twins, x = Twins(layers(), target, getattr(torch.optim, name), **options), torch.randn(12, 4)
    twins.step(x, 20)
    twins.compare()
    eager, ours = (optimizer.state_dict()["state"] for optimizer in twins.optimizers)
    for number, state in eager.items():
        for word, value in state.items():
            if value is not None:
                found = ours[number][word]
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4, check_dtype=False)


def test_the_update_is_a_program_and_weights_stay_on_the_device() -> None:
    twins = Twins(layers(), "wormhole_n150", torch.optim.SGD, momentum=0.9)
    before = [p.data_ptr() for p in twins.nets[1].parameters()]
    x = torch.randn(12, 4)
    twins.step(x, 3)
    twins.device.history.clear()
    twins.step(x, 6)
    told = twins.device.explain()
    assert "18 program runs" in told
    # The batch twice, the gradient of the prediction, the rate: no weight, no state.
    assert "24 copies" in told
    after = [p.data_ptr() for p in twins.nets[1].parameters()]
    assert not set(before) & set(after)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_schedulers_and_groups_work(target: str) -> None:
    twins = Twins(layers(), target, torch.optim.SGD, layer_groups, momentum=0.5)
    schedules = [
        lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=12)
        for optimizer in twins.optimizers
    ]
    for _ in range(10):
        twins.step(torch.randn(12, 4))
        for schedule in schedules:
            schedule.step()
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_state_is_saved_and_loaded(target: str) -> None:
    twins, x = Twins(layers(), target), torch.randn(12, 4)
    twins.step(x, 3)
    kept = [
        copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        for net, optimizer in zip(twins.nets, twins.optimizers, strict=True)
    ]
    twins.step(x, 2)
    for net, optimizer, (of_net, state) in zip(twins.nets, twins.optimizers, kept, strict=True):
        net.load_state_dict(of_net)
        optimizer.load_state_dict(state)
    twins.step(x, 3)
    twins.compare()
    assert float(twins.optimizer.state_dict()["state"][0]["step"]) == 6


def test_parameters_without_a_gradient_are_left_alone() -> None:
    twins = Twins(layers(), "host")
    for net in twins.nets:
        net[0].requires_grad_(False)
    before = twins.first.detach().clone()
    twins.step(torch.randn(12, 4), 3)
    twins.compare()
    assert torch.equal(before, twins.first)


def test_torch_steps_parameters_that_are_not_float32() -> None:
    twins = Twins(layers(), "host", torch.optim.SGD, momentum=0.9)
    for net in twins.nets:
        net.double()
    twins.step(torch.randn(12, 4, dtype=torch.float64), 2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_the_end_of_the_graphs_gives_everything_back(target: str) -> None:
    twins = Twins(layers(), target, torch.optim.SGD, momentum=0.9)
    places = [p.data_ptr() for p in twins.nets[1].parameters()]
    twins.step(torch.randn(12, 4), 3)
    assert "step" in vars(twins.optimizer)
    twins.calls = None
    torch._dynamo.reset()
    gc.collect()
    assert not {"step", "zero_grad"} & vars(twins.optimizer).keys()
    assert [p.data_ptr() for p in twins.nets[1].parameters()] == places
    twins.compare()


def test_an_optimizer_that_we_lack_is_named() -> None:
    twins = Twins(layers(), "host", torch.optim.Adadelta)
    with pytest.raises(Exception, match="optimizer Adadelta is not supported") as caught:
        twins.calls[1](torch.ones(12, 4))
    assert "SGD, Adam, AdamW" in str(caught.value)


def test_an_optimizer_of_the_same_name_that_is_not_torchs_is_refused() -> None:
    kind = type("SGD", (torch.optim.SGD,), {"__module__": "elsewhere"})
    twins = Twins(layers(), "host", kind)
    with pytest.raises(Exception, match="optimizer SGD is not supported") as caught:
        twins.calls[1](torch.ones(12, 4))
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


@pytest.mark.parametrize(("target", "kind"), in_turn(TARGETS, [torch.optim.SGD, torch.optim.Adam]))
def test_a_fused_step_under_a_scaler_of_gradients_is_torchs(kind: Any, target: str) -> None:
    twins = Twins(layers(), target, kind, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for factor in (1.0, 1.0, float("inf"), 1.0):
        x = torch.randn(12, 4)
        for call, optimizer, scaler in zip(twins.calls, twins.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(call(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    twins.compare()


@pytest.mark.parametrize("change", [
    lambda groups: groups[0]["params"].append(groups[1]["params"].pop()),
    lambda groups: groups[0]["params"].reverse(),
    lambda groups: groups[1]["params"].append(nn.Parameter(torch.ones(3))),
])  # fmt: skip
def test_other_parameters_in_a_group_are_told(change: Callable[[Any], object]) -> None:
    twins = Twins(layers(), "host", torch.optim.SGD, layer_groups)
    twins.step(torch.ones(12, 4))
    twins.calls[1](torch.ones(12, 4)).sum().backward()
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

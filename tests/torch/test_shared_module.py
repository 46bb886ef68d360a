"""A module in training is what torch sees: what torch reads is what the last step left, and what it
writes is trained on."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import TaskError, UsageError
from tests.support.grids import every, in_turn
from tests.support.torch.writers import WRITERS

#: Of the devices with memory of their own the small one runs always, the other one once.
TARGETS = ("host", "tiny", pytest.param("wormhole_n150", marks=pytest.mark.campaign("training")))
LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Two layers, with running statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Twins:
    """A module that torch trains, and its copy that is compiled."""

    def __init__(self, target: str, make: Callable[[], Any] = Net, **options: Any) -> None:
        torch.manual_seed(0)
        self.eager = make()
        self.net = copy.deepcopy(self.eager)
        self.places = {n: p.data_ptr() for n, p in self.net.named_parameters()}
        self.eager_optimizer, self.optimizer = map(optimizer_of, (self.eager, self.net))
        self.model = self.net.compile(optimizer=self.optimizer, target=target, **options)
        self.both: tuple[tuple[Any, Any, Any], ...] = (
            (self.eager, self.eager, self.eager_optimizer), (self.net, self.model, self.optimizer)
        )  # fmt: skip

    def step(self, count: int = 1, between: Callable[[Any], object] | None = None) -> None:
        """So many steps of both; `between` backward and step something is done to each module."""
        for _ in range(count):
            x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
            losses = []
            for net, model, optimizer in self.both:
                loss = LOSS(model(x), y)
                loss.backward()
                if between is not None:
                    between(net)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    def compare(self) -> None:
        """Torch reads the same of both, and that is what the device has."""
        for one, other in zip(tensors_of(self.eager), tensors_of(self.net), strict=True):
            assert one[0] == other[0]
            torch.testing.assert_close(other[1].detach(), one[1].detach(), rtol=1e-4, atol=1e-5)
            if other[0] in self.model.instance.state_dict():
                there = self.model.get_tensor(other[0])
                np.testing.assert_array_equal(there, other[1].detach().numpy())


def optimizer_of(net: Any) -> Any:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def tensors_of(net: Any) -> list[tuple[str, Any]]:
    return [*net.named_parameters(), *net.named_buffers()]


@pytest.mark.parametrize("target", ["host", "tiny", "wormhole_n150"])
def test_torch_reads_what_the_last_step_left(target: str) -> None:
    twins = Twins(target)
    seen = []
    for _ in range(5):
        twins.step()
        twins.compare()
        seen.append(twins.net.first.weight.detach().clone())
    assert all(not torch.equal(seen[0], later) for later in seen[1:])


#: Written in each way: a parameter, one of another shape, and a buffer that is mirrored.
WRITTEN = ("first.weight", "last.bias", "norm.running_mean")


@pytest.mark.parametrize(("way", "target"), in_turn(WRITERS, TARGETS))
def test_what_torch_writes_is_trained_on(way: str, target: str) -> None:
    twins = Twins(target)
    twins.step(2)
    for name in WRITTEN:
        new = torch.rand(dict(tensors_of(twins.net))[name].shape)
        for net in (twins.eager, twins.net):
            WRITERS[way](dict(tensors_of(net))[name], new)
        twins.compare()
    twins.step(2)
    twins.compare()


class Square(nn.Module):
    """Two layers with weights of one shape, equal to its transpose's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))


def transposed(weight: Any) -> None:
    weight.data = weight.data.t()


@pytest.mark.parametrize("target", ["host", "tiny"])
def test_a_weight_with_other_strides_at_its_address_is_trained_on(target: str) -> None:
    twins = Twins(target, Square)
    twins.step()
    for way in (transposed, torch.Tensor.t_, lambda weight: weight.set_(weight.data.t())):
        for net in (twins.eager, twins.net):
            with torch.no_grad():
                way(net.first.weight)
        twins.step(2)
        twins.compare()


def test_a_weight_that_gets_the_memory_of_another_is_refused_on_a_device() -> None:
    twins = Twins("tiny", Square)
    twins.step()
    twins.net.last.weight.data = twins.net.first.weight.data
    with pytest.raises(UsageError, match=r"last\.weight was given the memory of first\.weight"):
        twins.model(torch.randn(12, 6))


def test_a_buffer_that_is_replaced_and_statistics_that_are_reset_are_trained_on() -> None:
    twins = Twins("tiny")
    twins.step(2)
    for net in (twins.eager, twins.net):
        net.norm.reset_running_stats()
        net.norm.running_mean = net.norm.running_mean + 1
    twins.step(2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_gradients_are_those_of_torch(target: str) -> None:
    twins = Twins(target)
    twins.step(2)
    assert all(p.grad is None for p in twins.net.parameters())
    seen: list[Any] = []
    twins.step(1, between=lambda net: seen.append([p.grad.clone() for p in net.parameters()]))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in twins.net.parameters())


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_gradients_that_torch_holds_grow_with_another_batch(target: str) -> None:
    twins = Twins(target)
    twins.step(2)
    x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
    for net, model, optimizer in twins.both:
        LOSS(model(x), y).backward()
        held, before = net.last.bias.grad, net.last.bias.grad.clone()
        LOSS(model(x), y).backward()
        assert not torch.equal(held, before)
        torch.testing.assert_close(held, net.last.bias.grad)
        optimizer.step()
        optimizer.zero_grad()
    twins.compare()


def test_a_step_that_would_miss_a_gradient_is_refused() -> None:
    twins = Twins("host")
    twins.step(2)
    x, y = torch.randn(12, 6), torch.randint(0, 5, (12,))
    before = twins.model.get_tensor("first.weight")
    LOSS(twins.model(x), y).backward()
    twins.net.first.bias.grad = None
    with pytest.raises(UsageError, match=r"some parameters have no gradient(.|\n)*first\.bias"):
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    LOSS(twins.model(x), y).backward()
    LOSS(twins.net(x), y).backward()
    with pytest.raises(UsageError, match="own backward pass"):
        twins.optimizer.step()
    np.testing.assert_array_equal(twins.model.get_tensor("first.weight"), before)
    twins.optimizer.zero_grad()
    LOSS(twins.model(x), y).backward()
    twins.optimizer.step()
    assert not np.array_equal(twins.model.get_tensor("first.weight"), before)


@pytest.mark.parametrize(("end", "target"), in_turn(["close", "del"], TARGETS))
def test_after_the_end_the_module_has_what_was_trained(target: str, end: str) -> None:
    twins = Twins(target)
    twins.step(3)
    kinds = {type(p) for p in twins.eager.parameters()}
    model = twins.model
    if end == "close":
        model.instance.close()
        with pytest.raises(TaskError, match="the module has its weights"):
            model(torch.randn(12, 6))
        with pytest.raises(UsageError, match="would set it back"):
            model.model.start()
        for name, tensor in twins.net.named_parameters():
            for one in (twins.net, model):
                np.testing.assert_array_equal(one.get_tensor(name), tensor.detach())
    twins.model, twins.both, model = None, (), None
    gc.collect()
    for one, other in zip(tensors_of(twins.eager), tensors_of(twins.net), strict=True):
        torch.testing.assert_close(other[1].detach(), one[1].detach(), rtol=1e-4, atol=1e-5)
    assert {n: p.data_ptr() for n, p in twins.net.named_parameters()} == twins.places
    assert {type(p) for p in twins.net.parameters()} == kinds
    assert not {"step", "zero_grad"} & vars(twins.optimizer).keys()
    LOSS(twins.net(torch.randn(12, 6)), torch.randint(0, 5, (12,))).backward()
    twins.optimizer.step()
    assert twins.net.first.weight.grad is not None


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_torch_evaluates_with_the_weights_of_the_last_step(target: str) -> None:
    twins = Twins(target)
    x = torch.randn(12, 6)
    for _ in range(3):
        twins.step()
        outputs = []
        for net, _, _ in twins.both:
            net.eval()
            with torch.no_grad():
                outputs.append(net(x))
            net.train()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            twins.model.instance.predict(x).numpy(), outputs[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_tied_parameter_is_one(target: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
            self.out.weight = self.into.weight
            self.last = nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.last(self.out(torch.tanh(self.into(x))))

    twins = Twins(target, Tied)
    twins.step(2)
    for net in (twins.eager, twins.net):
        net.out.weight.data = net.out.weight.data * 0.5
    twins.step(2)
    twins.compare()
    assert twins.net.out.weight is twins.net.into.weight


def test_views_of_a_parameter_are_current_on_the_host() -> None:
    torch.manual_seed(0)
    net = Net()
    row, transposed = net.first.weight.detach()[2:4], net.last.weight.detach().t()
    optimizer = optimizer_of(net)
    model = net.compile(optimizer=optimizer, target="host")
    LOSS(model(torch.randn(12, 6)), torch.randint(0, 5, (12,))).backward()
    optimizer.step()
    np.testing.assert_array_equal(row, model.get_tensor("first.weight")[2:4])
    np.testing.assert_array_equal(transposed, model.get_tensor("last.weight").T)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_frozen_parameter_is_read_by_name_and_not_changed_unseen(target: str) -> None:
    def make() -> Net:
        net = Net()
        net.first.weight.requires_grad_(False)
        return net

    twins = Twins(target, make)
    twins.step(2)
    frozen = twins.net.first.weight
    np.testing.assert_array_equal(twins.model.get_tensor("first.weight"), frozen)
    np.testing.assert_array_equal(twins.model.instance.get_tensor("first.weight"), frozen)
    with pytest.raises(UsageError, match=r"first\.weight is frozen"):
        twins.model.set_tensor("first.weight", np.zeros((8, 6), np.float32))
    kept = frozen.clone()
    before = twins.model.get_tensor("last.weight")
    frozen.data.mul_(2)
    with pytest.raises(UsageError, match=r"first\.weight was changed(.|\n)*frozen"):
        twins.step()
    np.testing.assert_array_equal(twins.model.get_tensor("last.weight"), before)
    frozen.data.copy_(kept)
    twins.model(torch.randn(12, 6))


def test_a_gradient_that_is_dropped_and_set_again_is_stepped_with() -> None:
    def anew(net: Any) -> None:
        for parameter in net.parameters():
            gradient, parameter.grad = parameter.grad * 0.5, None
            assert parameter.grad is None
            parameter.grad = gradient
            torch.testing.assert_close(parameter.grad, gradient)

    twins = Twins("tiny")
    twins.step(3, between=anew)
    twins.compare()


@pytest.mark.parametrize("backend", ["eager", "stitch"])
def test_a_module_in_training_is_compiled_by_torch_for_evaluation(backend: str) -> None:
    twins = Twins("host")
    x = torch.randn(12, 6)
    compiled = torch.compile(twins.net.eval(), backend=backend)
    for _ in range(2):
        twins.net.train()
        twins.step()
        twins.net.eval(), twins.eager.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), twins.eager(x), rtol=1e-4, atol=1e-5)
        twins.eager.train()
    torch._dynamo.reset()


def test_a_parameter_that_is_replaced_is_refused() -> None:
    twins = Twins("host")
    twins.step(2)
    kept = twins.net.first.weight
    twins.net.first.weight = torch.nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(UsageError, match=r"first\.weight was replaced"):
        twins.model(torch.randn(12, 6))
    twins.net.first.weight = kept
    kept.data = torch.zeros(6, 8)
    with pytest.raises(UsageError, match=r"first\.weight was given data of another type or shape"):
        twins.model(torch.randn(12, 6))


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_refused_step_leaves_what_torch_reads_as_it_was(target: str) -> None:
    twins = Twins(target)
    twins.step(3)
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(twins.net)}
    x, y = torch.full((12, 6), torch.inf), torch.randint(0, 5, (12,))
    LOSS(twins.model(x), y).backward()
    with pytest.raises(TaskError, match="the loss of step 3"):
        twins.optimizer.step()
    for name, tensor in tensors_of(twins.net):
        assert torch.equal(tensor, before[name])
    twins.step(2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_an_interrupted_step_is_taken_whole_and_another_state_can_be_loaded(target: str) -> None:
    def interrupt(context: Any) -> None:
        if context.program.name.endswith("update"):
            ran.append(context.operation)
            if len(ran) == 5:
                raise KeyboardInterrupt

    ran: list[Any] = []
    twins = Twins(target)
    twins.step(3)
    kept = copy.deepcopy((twins.net.state_dict(), twins.optimizer.state_dict()))
    LOSS(twins.model(torch.randn(12, 6)), torch.randint(0, 5, (12,))).backward()
    with (
        twins.model.instance.device.hooks.registered({"after_operation": interrupt}),
        pytest.raises(KeyboardInterrupt),
    ):
        twins.optimizer.step()
    twins.model(torch.randn(12, 6))
    twins.net.load_state_dict(kept[0])
    twins.optimizer.load_state_dict(kept[1])
    twins.optimizer.zero_grad()
    twins.compare()
    twins.step(3)
    twins.compare()


@pytest.mark.parametrize(("target", "precision"), in_turn(TARGETS, ["float32", "bfloat16"]))
def test_weights_that_cannot_be_shared_are_current_all_the_same(
    target: str, precision: str
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizer_of(net)
    spaces = {"last.weight": "l1"} if target != "host" else {}
    model = net.compile(optimizer=optimizer, target=target, precision=precision, spaces=spaces)
    for _ in range(4):
        LOSS(model(torch.randn(12, 6)), torch.randint(0, 5, (12,))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in net.named_parameters():
            np.testing.assert_array_equal(
                model.instance.parameters()[name], parameter.detach().numpy()
            )
    net.last.weight.data.zero_()
    net.last.bias.data.fill_(1)
    assert np.all(np.asarray(model.instance.predict(torch.randn(12, 6))) == 1)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_an_optimizer_in_training_is_copied_with_its_state(target: str) -> None:
    twins = Twins(target)
    twins.step(3)
    copied = copy.deepcopy(twins.optimizer)
    kept = copy.deepcopy(twins.optimizer.state_dict())
    assert not {"step", "zero_grad"} & vars(copied).keys()
    torch.testing.assert_close(copied.state_dict(), kept)
    for one, other in zip(copied.param_groups[0]["params"], twins.net.parameters(), strict=True):
        assert type(one) is torch.nn.Parameter
        assert one.data_ptr() != other.data_ptr()
        torch.testing.assert_close(one, other)
    before = twins.model.get_tensor("first.weight")
    copied.param_groups[0]["params"][0].grad = torch.ones(8, 6)
    copied.step()
    np.testing.assert_array_equal(twins.model.get_tensor("first.weight"), before)
    twins.step(2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_copies_and_pickles_of_the_module_are_modules_of_their_own(target: str) -> None:
    twins = Twins(target)
    twins.step(2)
    for made in (copy.deepcopy(twins.net.first), pickle.loads(pickle.dumps(twins.net.first))):
        torch.testing.assert_close(made.weight, twins.net.first.weight)
        assert type(made.weight) is torch.nn.Parameter
        assert made.weight.grad is None
        made.weight.data.zero_()
    twins.step(2)
    twins.compare()


def test_two_trainings_of_one_module_are_refused() -> None:
    twins = Twins("host")
    twins.step(2)
    other = twins.net.compile(optimizer=optimizer_of(twins.net), target="host", loss=LOSS)
    with pytest.raises(UsageError, match="another training has the tensors"):
        other(torch.randn(12, 6))
    twins.step(2)
    twins.compare()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_state_that_is_loaded_into_the_training_is_what_torch_reads(target: str) -> None:
    twins = Twins(target)
    twins.step(2)
    kept = twins.model.instance.state_dict()
    twins.step(2)
    twins.model.instance.load_state_dict(kept)
    for name, tensor in tensors_of(twins.net):
        np.testing.assert_array_equal(tensor.detach(), kept[name])
    twins.model.set_tensor("first.bias", 3.0, 1)
    assert twins.net.first.bias[1].item() == 3


def test_with_stitch_compile_weights_are_copies() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizer_of(net)
    before = net.first.weight.detach().clone()
    model = stitch.compile(
        net, (torch.randn(12, 6),), optimizer=optimizer, loss=LOSS, target="host"
    )
    LOSS(model(torch.randn(12, 6)), torch.randint(0, 5, (12,))).backward()
    optimizer.step()
    assert torch.equal(net.first.weight, before)
    assert not np.array_equal(model.get_tensor("first.weight"), before)

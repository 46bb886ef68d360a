"""Habits of training loops, on one device and on several: torch's numbers, or an error."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import UsageError

LOSS = nn.CrossEntropyLoss()
LONG = pytest.mark.campaign("training")
HALVES: dict[str, Any] = {"parallel": {"stages": 2, "micro_batches": 2}}
STAGES: dict[str, Any] = {"parallel": {"stages": 2}}
EVERY = pytest.mark.parametrize("options", [{}, HALVES], ids=["one device", "several"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(torch.tanh(self.first(x))))


class Counting(Net):
    """Its predictions in training are not those of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Masked(nn.Module):
    """Two arguments of one type and shape, of which the caller may change the order."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, tokens: Any, mask: Any) -> Any:
        return self.last((self.table(tokens) * mask.unsqueeze(-1).to(torch.float32)).mean(1))


class Pair(Net):
    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), hidden


class Own(nn.Module):
    """The losses of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self.net(x), y, reduction="none")


def batches(count: int) -> list[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 6, generator=draw), torch.randint(0, 4, (12,), generator=draw))
        for _ in range(count)
    ]


def made(kind: Any = Net, optimizer: Any = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    net = kind()
    return net, optimizer(net.parameters(), lr=0.01)


def trained(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for x, y in batches(steps):
        loss = LOSS(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alike(net: Any, other: Any, tolerance: float = 1e-5) -> None:
    theirs = other.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


# Gradients and losses -----------------------------------------------------------------------------


def test_a_step_has_the_gradients_of_its_own_backward() -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **HALVES)
    (x, y), (other, labels) = batches(2)
    seen: list[list[Any]] = [[], []]
    for module, called, of, grads in (
        (eager, eager, optimizer, seen[0]), (net, model, theirs, seen[1])
    ):  # fmt: skip
        for number in range(2):
            loss = LOSS(called(x), y)
            loss.item()  # The gradients of the step before stay until zero_grad().
            grads += [module.last.bias.grad.clone()] if number else []
            of.zero_grad()
            loss.backward()
            if module is net:
                with pytest.raises(UsageError, match=r"overwrite the gradients(.|\n)*step\(\)"):
                    LOSS(model(other), labels).item()
            of.step()
    torch.testing.assert_close(seen[1], seen[0])
    alike(net, eager)


@LONG
@EVERY
@pytest.mark.parametrize(
    "term", [lambda p: p[:].square().mean(), lambda p: p.max(), lambda p: torch.topk(p, 1)[0].sum()]
)
def test_no_gradient_of_a_prediction_is_ignored(options: dict[str, Any], term: Any) -> None:
    net, optimizer = made()
    model = net.compile(optimizer=optimizer, **options)
    (x, y), = batches(1)  # fmt: skip
    pred = model(x)
    with pytest.raises(UsageError, match="combined with numbers only"):
        LOSS(pred, y) + term(pred)
    pred = model(x)
    read = float(term(pred).detach()), pred.numpy(), pred.argmax(1)
    assert read[2].tolist() == read[1].argmax(1).tolist()


@LONG
@EVERY
def test_an_output_of_several_has_no_backward_of_its_own(options: dict[str, Any]) -> None:
    net, optimizer = made(Pair)
    model = net.compile(optimizer=optimizer, **options)
    (x, y), = batches(1)  # fmt: skip
    found, hidden = model(x)
    torch.testing.assert_close(hidden, net(x)[1])
    with pytest.raises(UsageError, match=r"does not support backward"):
        LOSS(found, y).backward()


@LONG
def test_the_first_loss_is_that_of_compile_and_a_prediction_is_of_its_step() -> None:
    net, optimizer = made()
    model = net.compile(optimizer=optimizer, loss=nn.MSELoss(), **HALVES)
    (x, _), = batches(1)  # fmt: skip
    with pytest.raises(UsageError, match=r"another loss(.|\n)*MSELoss(.|\n)*L1Loss"):
        nn.L1Loss()(model(x), torch.zeros(12, 4))
    late = model(x)
    nn.MSELoss()(model(x), torch.zeros(12, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="made before a step"):
        nn.MSELoss()(late, torch.zeros(12, 4))
    with pytest.raises(UsageError, match="made before a step"):
        late.argmax(1)


@LONG
@pytest.mark.parametrize("kind", [Net, Counting], ids=["plain", "with statistics"])
@pytest.mark.parametrize("options", [{}, STAGES], ids=["one device", "several"])
def test_accuracy_is_counted_after_the_step(options: dict[str, Any], kind: Any) -> None:
    (eager, own), (net, optimizer) = made(kind, torch.optim.SGD), made(kind, torch.optim.SGD)
    model = net.compile(optimizer=optimizer, **options)
    for x, y in batches(3):
        found, expected = model(x), eager(x)
        for pred, of in ((found, optimizer), (expected, own)):
            loss = LOSS(pred, y)
            of.zero_grad()
            loss.backward()
            of.step()
        right, wanted = (found.argmax(1) == y).sum(), (expected.argmax(1) == y).sum()
        assert int(right) == int(wanted)
        net.eval()
        np.testing.assert_allclose(found.numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
        net.train()
    alike(net, eager)


@LONG
@EVERY
def test_a_loss_that_the_module_computes(options: dict[str, Any]) -> None:
    (eager, optimizer), (net, theirs) = made(Own), made(Own)
    model, loss_fn = net.compile(optimizer=theirs, **options), stitch.losses.IdentityLoss()
    for x, y in batches(3):
        expected, loss = eager(x, y).mean(), loss_fn(model(x, y), 0.0)
        for each, of in ((expected, optimizer), (loss, theirs)):
            of.zero_grad()
            each.backward()
            of.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    alike(net, eager)


# Arguments ----------------------------------------------------------------------------------------


@LONG
@EVERY
def test_arguments_by_name_and_then_by_position(options: dict[str, Any]) -> None:
    (eager, optimizer), (net, theirs) = made(Masked), made(Masked)
    model = net.compile(optimizer=theirs, **options)
    draw = torch.Generator().manual_seed(2)
    for number in range(3):
        tokens = torch.randint(0, 11, (8, 5), generator=draw)
        mask, y = (torch.randint(0, n, (8, 5), generator=draw) for n in (2, 4))
        for called, of in ((eager, optimizer), (model, theirs)):
            pred = called(tokens, mask) if number else called(mask=mask, tokens=tokens)
            LOSS(pred, y[:, 0]).backward()
            of.step()
            of.zero_grad()
    alike(net, eager)


@LONG
@EVERY
def test_batches_of_bfloat16_and_of_numpy(options: dict[str, Any]) -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    eager, net = eager.bfloat16(), net.bfloat16()
    model = net.compile(optimizer=theirs, **options)
    for x, y in batches(2):
        for called, of in ((eager, optimizer), (model, theirs)):
            LOSS(called(x.bfloat16()), y).backward()
            of.step()
            of.zero_grad()
    alike(net, eager, 2e-2)
    model.instance.close()
    net, theirs = made()
    model = net.compile(optimizer=theirs, **options)
    x, y = (each.numpy() for each in batches(1)[0])
    expected = net(torch.from_numpy(x)).detach().numpy()
    pred = model(x)
    np.testing.assert_allclose(np.asarray(pred[:].detach()), expected, rtol=1e-5, atol=1e-6)
    model.eval()
    np.testing.assert_allclose(np.asarray(model(x)), expected, rtol=1e-5, atol=1e-6)
    model.train()
    stitch.losses.CrossEntropyLoss()(model(x), y).backward()
    theirs.step()


def test_a_wrong_parallel_is_told_by_compile_and_a_compiled_module_is_not_copied() -> None:
    net, optimizer = made()
    for parallel, message in (
        ({"stages": 2, "micro_batches": 0}, "micro_batches must be at least 1"),
        ({"stages": 2, "micro_batches": "x"}, "whole number as micro_batches"),
        ([2], "a mapping as parallel"),
        ({"stage": 2}, "takes no stage"),
    ):
        with pytest.raises(UsageError, match=message):
            net.compile(optimizer=optimizer, parallel=parallel)
    model = net.compile(optimizer=optimizer, **HALVES)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(model)


@LONG
@EVERY
def test_gradients_of_other_modules_are_not_ignored(options: dict[str, Any]) -> None:
    net, optimizer = made()
    model, before = net.compile(optimizer=optimizer, **options), nn.Linear(6, 6)
    (x, y), = batches(1)  # fmt: skip
    with pytest.raises(UsageError, match=r"has a gradient(.|\n)*detach"):
        LOSS(model(before(x)), y)
    total = torch.tensor(0.0)
    for _ in range(2):  # As the Trainer of transformers adds losses.
        loss = LOSS(model(before(x).detach()), y)
        optimizer.zero_grad()
        loss.backward()
        total = total + loss.detach() / 2
        optimizer.step()
    assert float(total) == pytest.approx(1.4, abs=0.2)


@LONG
def test_what_is_no_array_is_refused() -> None:
    net, optimizer = made()
    model = net.compile(optimizer=optimizer, **HALVES)
    (x, y), = batches(1)  # fmt: skip
    for batch, labels in ((x.to_sparse(), y), (x.to("meta"), y), (x, [[1], [2, 3]])):
        with pytest.raises(UsageError, match="no array"):
            stitch.losses.CrossEntropyLoss()(model(batch), labels)
    with pytest.raises(UsageError, match="has a gradient"):
        nn.MSELoss()(model(x), nn.Linear(6, 4)(x))


# Modes and frozen parameters ----------------------------------------------------------------------


@LONG
@EVERY
def test_a_change_of_modes_or_of_what_is_trained_is_seen(options: dict[str, Any]) -> None:
    net, _ = made(Dropping)
    optimizer = stitch.SGD(lr=0.1)
    model = net.compile(optimizer=optimizer, **options)
    trained(model, optimizer, 1)
    net.drop.eval()
    with pytest.raises(UsageError, match=r"another mode(.|\n)*Dropout"):
        trained(model, optimizer, 1)
    model.eval()
    model.train()
    drop, net.drop = net.drop, nn.Dropout(0.1)
    with pytest.raises(UsageError, match=r"was replaced(.|\n)*Dropout"):
        trained(model, optimizer, 1)
    net.drop = drop
    hook = net.first.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(UsageError, match=r"first.weight has a hook"):
        trained(model, optimizer, 1)
    hook.remove()
    net.last.bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"requires_grad of last.bias"):
        trained(model, optimizer, 1)
    net.last.bias.requires_grad_(True)
    trained(model, optimizer, 1)


@LONG
@pytest.mark.parametrize("options", [{}, STAGES], ids=["one device", "several"])
def test_a_module_that_is_compiled_in_evaluation_mode_and_then_trained(options: Any) -> None:
    net, optimizer = made(Dropping)
    model = net.eval().compile(optimizer=optimizer, **options)
    model.train()
    trained(model, optimizer)
    model.eval()
    (x, _), = batches(1)  # fmt: skip
    np.testing.assert_allclose(np.asarray(model(x)), net(x).detach().numpy(), rtol=1e-5, atol=1e-6)


# State --------------------------------------------------------------------------------------------


@LONG
@EVERY
def test_the_state_of_the_optimizer_outlives_the_training_and_can_be_emptied(options: Any) -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **options)
    empty = copy.deepcopy(theirs.state_dict())
    assert not empty["state"]
    for called, of in ((eager, optimizer), (model, theirs)):
        trained(called, of)
        of.load_state_dict(empty)
        trained(called, of)
    alike(net, eager)
    model.instance.close()
    for module, of in ((eager, optimizer), (net, theirs)):
        of.zero_grad()
        trained(module, of)
    alike(net, eager)
    model = net.compile(optimizer=theirs, **options)
    trained(model, theirs)
    trained(eager, optimizer)
    alike(net, eager)


@LONG
def test_an_interrupt_after_the_update_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **HALVES)
    trained(model, theirs, 1)
    trained(eager, optimizer, 2)
    training = model.instance.training
    update = training.update

    def interrupted() -> None:
        update()
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "update", interrupted)
    x, y = batches(2)[1]
    theirs.zero_grad()
    LOSS(model(x), y).backward()
    with pytest.raises(KeyboardInterrupt):
        theirs.step()
    assert model.steps == 2
    alike(net, eager)


@LONG
@EVERY
def test_first_calls_of_several_threads(options: dict[str, Any]) -> None:
    failures: list[BaseException] = []
    loops = []
    for _ in range(3):
        net, optimizer = made()
        loops.append((net, net.compile(optimizer=optimizer, **options), optimizer))

    def run(model: Any, optimizer: Any) -> None:
        try:
            trained(model, optimizer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=each[1:]) for each in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    eager, optimizer = made()
    trained(eager, optimizer)
    for net, _, _ in loops:
        alike(net, eager)

"""A module's own loop trains it on several devices: the numbers of one device, of torch, or an
error."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import TaskError, UsageError

LOSS = nn.CrossEntropyLoss()
LONG = pytest.mark.campaign("training")
STAGES: dict[str, Any] = {"parallel": {"stages": 2}}
HALVES: dict[str, Any] = {"parallel": {"stages": 2, "micro_batches": 2}}


class Net(nn.Module):
    """Layers, with or without running statistics between them."""

    def __init__(self, *, has_norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x))))


def batches(count: int, size: int = 12) -> list[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=draw), torch.randint(0, 4, (size,), generator=draw))
        for _ in range(count)
    ]


def made(kind: Any = torch.optim.AdamW, *, has_norm: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Net(has_norm=has_norm)
    return net, kind(net.parameters(), **{"lr": 0.01, **settings})


def trained(net: Any, model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for x, y in batches(steps):
        loss = LOSS(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alike(net: Any, other: Any, tolerance: float = 0.0) -> None:
    theirs = other.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


@LONG
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_loop_in_stages_has_the_bits_of_one_device(has_norm: bool) -> None:
    (one, optimizer), (net, theirs) = made(has_norm=has_norm), made(has_norm=has_norm)
    expected = trained(one, one.compile(optimizer=optimizer), optimizer)
    assert trained(net, net.compile(optimizer=theirs, **STAGES), theirs) == expected
    alike(net, one)
    ours, single = theirs.state_dict()["state"], optimizer.state_dict()["state"]
    assert {n: {k: v.tolist() for k, v in s.items()} for n, s in ours.items()} == {
        n: {k: v.tolist() for k, v in s.items()} for n, s in single.items()
    }


@LONG
@pytest.mark.parametrize(
    "options",
    [
        HALVES, {"parallel": {"stages": 1, "replicas": 2, "micro_batches": 4}},
        {"algorithm": "search", "devices": 2}, {"algorithm": "data_parallel", "devices": 3},
        {"algorithm": "pipeline", "devices": 2, "accumulation_steps": 6},
        {"algorithm": "tensor", "devices": 2, "loss": LOSS},
    ],
)  # fmt: skip
def test_a_loop_divides_each_batch_and_gives_torchs_numbers(options: dict[str, Any]) -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    expected = trained(eager, eager, optimizer)
    model = net.compile(optimizer=theirs, **options)
    np.testing.assert_allclose(trained(net, model, theirs), expected, rtol=1e-5)
    alike(net, eager, 1e-5)
    assert "ParallelOptions" in repr(model)
    assert (model.model.search_result is None) == ("parallel" in options)


@LONG
def test_losses_and_predictions_are_read_before_the_step() -> None:
    (eager, optimizer), (net, theirs) = made(torch.optim.SGD), made(torch.optim.SGD)
    model = net.compile(optimizer=theirs, **HALVES)
    for x, y in batches(3):
        expected, found = eager(x), model(x)
        loss, other = LOSS(expected, y), LOSS(found, y)
        assert other.item() == pytest.approx(loss.item(), rel=1e-5)
        assert found.argmax(1).tolist() == expected.argmax(1).tolist()
        for each, of in ((loss, optimizer), (other, theirs)):
            of.zero_grad()
            each.backward()
            of.step()
    alike(net, eager, 1e-5)
    theirs.zero_grad()
    late = model(x)
    LOSS(late, y).backward()
    theirs.zero_grad()
    with pytest.raises(UsageError, match="without gradients"):
        theirs.step()
    LOSS(model(x), y).backward()
    theirs.step()
    # `alike(net, eager)` held when it was made: it has those weights after the step.
    assert not torch.equal(eager.state_dict()["last.weight"], net.state_dict()["last.weight"])
    np.testing.assert_allclose(late.numpy(), eager(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert late.argmax(1).tolist() == eager(x).argmax(1).tolist()


def test_torch_reads_and_writes_the_weights_between_steps() -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **HALVES)
    rates = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, theirs)]
    saved = copy.deepcopy(net.state_dict())
    for number, (x, y) in enumerate(batches(4)):
        for module, called, of, rate in (
            (eager, eager, optimizer, rates[0]), (net, model, theirs, rates[1])
        ):  # fmt: skip
            LOSS(called(x), y).backward()
            if number == 1:
                module.last.weight.data.clamp_(-0.1, 0.1)
            of.step()
            of.zero_grad()
            rate.step()
            if number == 0:
                module.load_state_dict(saved)
            if number == 2:
                model_or_net = model if module is net else None
                if model_or_net is None:
                    with torch.no_grad():
                        module.first.bias[0] = 2.0
                else:
                    model_or_net.set_tensor("first.bias", 2.0, 0)
        alike(net, eager, 1e-5)
    assert model.get_tensor("first.bias").tolist() == net.first.bias.tolist()
    model.eval()
    assert torch.equal(model(x), net(x))


@LONG
def test_gradients_are_torchs_and_stay_as_they_are() -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **HALVES)
    (x, y), = batches(1)  # fmt: skip
    LOSS(eager(x), y).backward()
    LOSS(model(x), y).backward()
    for parameter, other in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)
    before = copy.deepcopy(net.state_dict())
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    with pytest.raises(UsageError, match=r"gradients on several devices(.|\n)*clip_grad_norm="):
        theirs.step()
    theirs.zero_grad()
    assert net.first.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    LOSS(model(x), y).backward()
    with pytest.raises(UsageError, match=r"gradients on several devices"):
        net.first.weight.grad = torch.zeros(8, 6)
    net.first.weight.grad = None
    with pytest.raises(UsageError, match=r"no gradient(.|\n)*first.weight"):
        theirs.step()
    theirs.zero_grad()
    trained(net, model, theirs, 1)
    trained(eager, eager, optimizer, 1)
    alike(net, eager, 1e-5)


@LONG
def test_an_update_that_failed_on_a_device_ends_the_training(monkeypatch: Any) -> None:
    (eager, optimizer), (net, theirs) = made(), made()
    model = net.compile(optimizer=theirs, **HALVES)
    trained(net, model, theirs, 1)
    saved = copy.deepcopy((net.state_dict(), theirs.state_dict()))
    theirs.zero_grad()
    x, y = batches(2)[1]
    LOSS(model(x), y).backward()
    carrier = model.instance.training.mesh.client.carrier
    start = carrier.start
    with monkeypatch.context() as patch:
        patch.setattr(carrier, "start", lambda device: (start(device), carrier._kill(device)))
        carrier._kill("device1")
        with pytest.raises(TaskError, match="failed on a part of its devices"):
            theirs.step()
    # The server is there again, and makes the update, which the module does not have.
    assert all(torch.equal(value, saved[0][name]) for name, value in net.state_dict().items())
    theirs.zero_grad()
    with pytest.raises(TaskError, match=r"the last update failed(.|\n)*compile the module again"):
        LOSS(model(x), y).backward()
    model.instance.close()
    net.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    model = net.compile(optimizer=theirs, **HALVES)
    theirs.zero_grad()
    LOSS(model(x), y).backward()
    theirs.step()
    trained(eager, eager, optimizer, 2)
    alike(net, eager, 1e-5)


@LONG
def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    net, optimizer = made(has_norm=True)
    model = net.compile(optimizer=optimizer, **HALVES)
    trained(net, model, optimizer, 2)
    before = copy.deepcopy(net.state_dict())
    (x, y), = batches(1)  # fmt: skip
    optimizer.zero_grad()
    LOSS(model(x * torch.inf), y).backward()
    with pytest.raises(TaskError, match="the loss of step 2 is nan"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    optimizer.zero_grad()
    trained(net, model, optimizer, 1)
    assert not torch.equal(net.last.bias, before["last.bias"])


@LONG
def test_the_training_ends_with_its_model_and_the_module_keeps_its_weights() -> None:
    net, optimizer = made()
    model = net.compile(optimizer=optimizer, **STAGES)
    trained(net, model, optimizer, 2)
    mesh = weakref.ref(model.instance.training.mesh)
    weights = copy.deepcopy(net.state_dict())
    with pytest.raises(UsageError, match="another training has the tensors"):
        trained(net, net.compile(optimizer=torch.optim.SGD(net.parameters(), 0.1), **STAGES),
                optimizer, 1)  # fmt: skip
    kept = mesh()
    assert kept is not None
    del model
    gc.collect()
    assert kept.is_closed
    assert type(net.first.weight) is torch.nn.Parameter
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    again = torch.optim.SGD(net.parameters(), 0.1)
    model = net.compile(optimizer=again, **STAGES)
    trained(net, model, again, 1)
    model.instance.close()
    with pytest.raises(TaskError, match="this training is closed"):
        model(torch.zeros(12, 6))
    assert not torch.equal(net.first.weight, weights["first.weight"])


def step(model: Any, optimizer: Any, x: Any, y: Any, loss: Any = LOSS, by: float = 1.0) -> None:
    (loss(model(x), y) * by).backward()
    optimizer.step()


def test_what_several_devices_do_not_do_is_an_error() -> None:
    (x, y), = batches(1)  # fmt: skip
    net, optimizer = made()
    for options, message in (
        ({"devices": 2}, "takes parallel=, or an algorithm"),
        ({"devices": 2, "algorithm": "greedy"}, "for one device"),
        ({"devices": 2, "backend": "stitch"}, "torch.compile(.|\n)*optimizer, devices"),
        ({"devices": 2, "algorithm": "search", "optimizer": None}, "several devices train"),
    ):
        with pytest.raises(UsageError, match=message):
            net.compile(**{"optimizer": optimizer, **options})
    model = net.compile(optimizer=optimizer, **HALVES)
    with pytest.raises(UsageError, match=r"into 2 micro-batches(.|\n)*the labels: 11"):
        step(model, optimizer, x[:11], y[:11])
    with pytest.raises(UsageError, match=r"as many examples(.|\n)*labels: 12, argument 0: 10"):
        step(model, optimizer, x[:10], y)
    y[0] = -100
    with pytest.raises(UsageError, match="examples have different weights"):
        step(model, optimizer, x, y)
    (x, y), = batches(1)  # fmt: skip
    step(model, optimizer, x, y)
    with pytest.raises(UsageError, match=r"JSON(.|\n)*torch.save"):
        net.dump("unused.json")
    with pytest.raises(UsageError, match="zero_grad"):
        step(model, optimizer, x, y)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"not scaled(.|\n)*0\.5"):
        step(model, optimizer, x, y, by=0.5)
    with pytest.raises(UsageError, match=r"batches of one size(.|\n)*drop_last"):
        step(model, optimizer, x[:8], y[:8])
    with pytest.raises(UsageError, match="another loss"):
        step(model, optimizer, x, y, nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(UsageError, match=r"frozen|another loss|labels"):
        step(model, optimizer, x, y + 4)
    optimizer.zero_grad()
    step(model, optimizer, x, y)


@LONG
def test_an_optimizer_and_a_loss_of_stitch_drive_a_loop_of_several_devices() -> None:
    net, _ = made()
    optimizer, loss_fn = stitch.training.Adam(lr=0.01), stitch.losses.CrossEntropyLoss()
    model = stitch.torch.compile(
        net, optimizer=optimizer, loss=loss_fn, algorithm="search", devices=2
    )
    eager, theirs = made(torch.optim.Adam)
    expected = trained(eager, eager, theirs, 3)
    for (x, y), value in zip(batches(3), expected, strict=True):
        loss = loss_fn(model(x), y)
        x.zero_()  # The caller may reuse its memory, as a loader does.
        y.zero_()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(value, rel=1e-5)
    alike(net, eager, 1e-5)


def test_gradients_of_replicas_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    theirs, x, y = copy.deepcopy(module), torch.randn(6, 4), torch.randn(6, 3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, devices=3, algorithm="data_parallel")
    for each in (model, theirs):
        nn.MSELoss()(each(x), y).backward()
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, value.grad)

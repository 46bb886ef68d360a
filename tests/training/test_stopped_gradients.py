"""Gradients that a module stops, as torch does: detach, no_grad, rows of padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stitch.torch
from stitch.errors import CompileError


class Stopping(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Gradients flow back through a part of it only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.rows = nn.Embedding(4, 3, padding_idx=0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        nn.init.ones_(self.rows.weight)

    def forward(self, x: Any) -> Any:
        h = self.first(self.rows(x))
        if self.way == "detach":
            h = h + h.detach() ** 2 * torch.tensor([1.0, 2.0, 3.0])
        elif self.way == "straight through":
            h = h + (torch.round(h) - h).detach()
        elif self.way == "no_grad":
            with torch.no_grad():
                scale, shift = h.abs().mean() + 1, self.first.bias * 2
            h = h / scale + shift
        elif self.way == "buffer":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            h = h - self.mean
        elif self.way == "detach_":
            h = (h * 2).detach_() + h
        elif self.way == "all":
            h = h.detach()
        elif self.way == "quantize":
            h = torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -8, 7)
        elif self.way == "bag":
            h = h + F.embedding_bag(x[:, None], self.rows.weight, scale_grad_by_freq=True)
        elif self.way == "function":
            h = Reversed.apply(h)
        return self.second(h)


class Reversed(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return -gradient


def trained(way: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return modules after three steps, ours and torch's."""
    torch.manual_seed(0)
    ours = Stopping(way)
    theirs = copy.deepcopy(ours)
    updates = [torch.optim.SGD(each.parameters(), 0.1) for each in (ours, theirs)]
    models = stitch.torch.compile(ours, optimizer=updates[0], **options), theirs
    x, y = torch.tensor([0, 1, 2, 0]), torch.randn(4, 2)
    for _ in range(3):
        for model, optimizer in zip(models, updates, strict=True):
            nn.MSELoss()(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ours, theirs


@pytest.mark.parametrize("way", ["padding", "detach", "straight through", "no_grad", "buffer"])
def test_gradients_stop_where_torch_stops_them(way: str) -> None:
    ours, theirs = trained(way)
    assert torch.equal(ours.rows.weight[0], torch.ones(3))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_and_in_another_precision_and_on_several_devices() -> None:
    for options in ({"precision": stitch.DataType.BFLOAT16}, {"parallel": {"stages": 2}}):
        ours, theirs = trained("detach", **options)
        assert torch.equal(ours.rows.weight[0], torch.ones(3))
        for name, value in theirs.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name), value, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("detach_", "detach_.default cannot be trained"),
        ("quantize", "cannot be trained"),
        ("bag", "scale_grad_by_freq=False"),
        ("function", "Reversed"),
        ("all", "stops all gradients"),
    ],
)
def test_what_torch_does_not_export_is_refused(way: str, message: str) -> None:
    with pytest.raises(CompileError) as error:
        trained(way)
    assert message in str(error.value)


def test_an_exported_program_stays_as_it_was() -> None:
    x = torch.tensor([0, 1, 2, 0])
    program = torch.export.export(Stopping("no_grad"), (x,))
    before = str(program.graph)
    stitch.compile(program, (x,), optimizer="sgd", loss="mse")
    assert str(program.graph) == before


def test_a_buffer_that_is_written_but_not_read_is_a_state() -> None:
    torch.manual_seed(0)
    ours = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    theirs, x, y = copy.deepcopy(ours), torch.randn(4, 3), torch.randn(4, 2)
    updates = [torch.optim.SGD(each.parameters(), 0.1) for each in (ours, theirs)]
    models = stitch.torch.compile(ours, optimizer=updates[0]), theirs
    for _ in range(3):
        for model, optimizer in zip(models, updates, strict=True):
            optimizer.zero_grad()
            nn.MSELoss()(model(x), y).backward()
            optimizer.step()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_a_frozen_part_may_be_detached() -> None:
    module = nn.Sequential(Stopping("all").requires_grad_(requires_grad=False), nn.Linear(2, 2))
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    nn.MSELoss()(model(torch.tensor([1, 1])), torch.ones(2, 2)).backward()
    assert module[1].weight.grad is not None


def test_rows_whose_gradients_are_scaled_are_refused() -> None:
    module = nn.Embedding(4, 3, scale_grad_by_freq=True)
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(CompileError, match="scale_grad_by_freq"):
        nn.MSELoss()(model(torch.tensor([1, 1])), torch.ones(2, 3))


class Written(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Detaches a tensor that was written in place: torch makes its alias anew where it is read."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.cell = nn.GRUCell(3, 3)  # Torch decomposes it to writes in place.
        self.first = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        h = self.first(self.cell(x, torch.ones_like(x)))
        if self.way == "cell":
            h = self.cell(x, h)
            return h.detach() * 2 + h
        h = F.leaky_relu(h, inplace=True)
        if self.way == "no_grad":
            with torch.no_grad():
                scale = h * 2
            return scale * h
        if self.way == "enable_grad":
            with torch.no_grad(), torch.enable_grad():
                return h.detach() * h
        if self.way == "view":
            return h.detach().view(-1, 3)[:, :] * h[...]
        return h.detach() * h


@pytest.mark.parametrize("way", ["cell", "detach", "view", "no_grad", "enable_grad"])
def test_what_was_written_in_place_is_detached(way: str) -> None:
    torch.manual_seed(0)
    module, x, y = Written(way), torch.randn(5, 3), torch.randint(0, 3, (5,))
    eager, loss_fn = copy.deepcopy(module), nn.CrossEntropyLoss()
    loss_fn(eager(x), y).backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, target="host")
    loss_fn(model(x), y).backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_all_parameters_without_gradients_are_named() -> None:
    class Still(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.still, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.still(x).detach())

    module = Still()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, target="host")
    with pytest.raises(CompileError, match=r"still\.weight, still\.bias"):
        nn.CrossEntropyLoss()(model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()


class WritesWithout(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Writes without gradients to a tensor that has some: torch keeps those, with new elements."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        g = h * 2
        if self.way == "detach":
            g.detach()[0].mul_(3)
        else:
            with torch.no_grad():
                g.chunk(2)[0].mul_(3)
        return self.last(g * h)


@pytest.mark.parametrize("way", ["detach", "no_grad"])
def test_writes_without_gradients_to_a_tensor_that_has_some_are_refused(way: str) -> None:
    module = WritesWithout(way)
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(CompileError, match="writes to a tensor with gradients without them"):
        nn.CrossEntropyLoss()(model(torch.ones(4, 3)), torch.tensor([0, 1, 2, 0]))

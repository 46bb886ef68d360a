"""Stale weights: nothing that torch, NumPy or DLPack writes between two calls is missed.

A random walk writes to the parameters, buffers and results of three copies of one network in every
way that there is; eager torch says what the two that are compiled, for the host and for a device,
have to give. Gradients and running statistics are carried over from eager after they have been
compared, so that the copies stay equal bit by bit however long the walk is.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.grids import in_turn
from tests.support.run_seed import SEED
from tests.support.torch.agreement import TOLERANCE
from tests.support.torch.compiled import assert_same
from tests.support.torch.writers import IN_PLACE, WRITERS

TARGETS = ("host", "wormhole_n150")


class Net(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Parameters of several kinds: square, in one flat storage, tied; buffers; a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        flat = torch.randn(40)
        self.scale, self.shift = nn.Parameter(flat[3:9]), nn.Parameter(flat[16:22])
        self.register_buffer("mask", torch.rand(6))
        self.plain = torch.randn(6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        hidden = self.norm(self.first(x)) * self.scale + self.shift
        return self.last(torch.tanh(F.linear(hidden * self.mask, self.first.weight)) + self.plain)


class Walk:
    """Three copies of a network, and one random step after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.eager, *self.copies = [self._net(seed) for _ in ("eager", *TARGETS)]
        torch._dynamo.reset()
        self.runs = [self._compiled(c, t) for c, t in zip(self.copies, TARGETS, strict=True)]
        self.halves = [self._compiled(lambda made: made * 2 + 1, t) for t in TARGETS]
        self.networks = [self.eager, *self.copies]

    @staticmethod
    def _net(seed: int) -> Net:
        # Not a deep copy: that tears storages apart that two parameters share.
        torch.manual_seed(seed)
        return Net()

    @staticmethod
    def _compiled(function: Any, target: str) -> Any:
        return torch.compile(function, backend="stitch", options={"target": target}, dynamic=False)

    def step(self) -> str:
        """One write and one look, both drawn; what they were."""
        wrote = self.random.choice((self.write, self.write, self.optimize, self.nothing))()
        looked = self.random.choice((self.infer, self.train, self.results))()
        return f"{wrote}; {looked}"

    # -- writing -----------------------------------------------------------------------------------

    def nothing(self) -> str:
        return "nothing"

    def write(self) -> str:
        places = ("first.weight", "first.bias", "scale", "shift", "mask", "plain", "last.weight",
                  "norm.weight", "norm.bias", "norm.running_mean")  # fmt: skip
        place, way = self.random.choice(places), self.random.choice(list(WRITERS))
        tensors = [_at(network, place) for network in self.networks]
        new = torch.randn(tensors[0].shape)
        for tensor in tensors:
            WRITERS[way](tensor, new)
        return f"{place} by {way}"

    def optimize(self) -> str:
        """A step of an optimizer, on gradients that are the same for all."""
        kind, options = self.random.choice(
            (
                (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"foreach": True}),
                (torch.optim.SGD, {"fused": True}), (torch.optim.SGD, {"foreach": True}),
                (torch.optim.SGD, {}),
            )
        )  # fmt: skip
        given = [torch.randn(p.shape) for p in self.eager.parameters()]
        for network in self.networks:
            for parameter, gradient in zip(network.parameters(), given, strict=True):
                parameter.grad = gradient.clone()
            kind(network.parameters(), 0.1, **options).step()
            network.zero_grad()
        return f"{kind.__name__} {options}"

    # -- looking -----------------------------------------------------------------------------------

    def infer(self) -> str:
        x = torch.randn(5, 6)
        for network in self.networks:
            network.eval()
        with torch.no_grad():
            wanted = self.eager(x)
            for run in self.runs:
                _agree(run(x), wanted)
        return "inference"

    def train(self) -> str:
        """Both passes. Between them nothing is written: what is saved would change in eager too."""
        x = torch.randn(5, 6)
        for network in self.networks:
            network.train()
            network.zero_grad()
        wanted = self.eager(x)
        wanted.square().sum().backward()
        largest = max(float(p.grad.abs().max()) for p in self.eager.parameters())
        for network, run in zip(self.copies, self.runs, strict=True):
            made = run(x)
            _agree(made, wanted)
            made.square().sum().backward()
            for ours, theirs in zip(network.parameters(), self.eager.parameters(), strict=True):
                _agree(ours.grad, theirs.grad, largest)
            for ours, theirs in zip(network.buffers(), self.eager.buffers(), strict=True):
                _agree(ours, theirs)
                ours.numpy()[...] = theirs.numpy()
        return "training"

    def results(self) -> str:
        """What a program gave is written, and goes to the next."""
        x, way = torch.randn(5, 6), self.random.choice(list(IN_PLACE))
        for network in self.networks:
            network.eval()
        with torch.no_grad():
            for run, half in zip(self.runs, self.halves, strict=True):
                made = run(x)
                for _ in range(2):
                    new = torch.randn(made.shape)
                    IN_PLACE[way](made, new)
                    _agree(half(made), made * 2 + 1)
        return f"results written by {way}"


def _at(network: Any, place: str) -> Any:
    for name in place.split("."):
        network = getattr(network, name)
    return network


def _agree(found: Any, wanted: Any, largest: float = 0.0) -> None:
    """Equal up to rounding: gradients cancel, so the `largest` of them says what rounding is."""
    bound = TOLERANCE * max(1.0, largest, float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=10 * bound)


def _walk(steps: int, seed: int) -> None:
    taken: list[str] = []
    # Where torch gave up and ran a function itself, nothing would be shown.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        walk = Walk(seed)
        for number in range(steps):
            try:
                taken.append(walk.step())
            except AssertionError as error:
                raise AssertionError(f"step {number} of seed {seed} after {taken[-3:]}") from error


def test_no_write_is_missed_in_a_walk_over_all_ways_to_write() -> None:
    _walk(60, SEED)


@pytest.mark.campaign("torch_compile")
def test_no_write_is_missed_in_ten_thousand_steps() -> None:
    for part in range(4):
        _walk(2500, 100 + SEED + part)


@pytest.mark.parametrize(("target", "way"), in_turn(TARGETS, WRITERS))
def test_a_parameter_that_was_written_is_read_anew(way: str, target: str) -> None:
    _read_anew(way, target)


MODULES: dict[str, Any] = {}


def _read_anew(way: str, target: str) -> None:
    """All ways share one compiled module a machine: compiling takes a hundred times longer."""
    if target not in MODULES:
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        MODULES[target] = (
            module,
            torch.compile(module, backend="stitch", options={"target": target}, dynamic=False),
        )
    module, run = MODULES[target]
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(3):
            assert_same(run(x), module(x))
            for parameter in module.parameters():
                WRITERS[way](parameter, torch.randn(parameter.shape))
            assert_same(run(x), module(x))

"""A module whose training is ended has its values and its kind of parameters, wherever that is
interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stitch.torch.nn as nn
from tests.support.interrupts import interrupted

LOSS = nn.MSELoss()
#: Whose lines are interrupted; where torch's own modes end in between, those stay as they were.
FILES = ("shared_module.py",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.campaign("injection"))])
def test_a_close_that_was_interrupted_anywhere_is_finished_by_the_next(step: int) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    places = [parameter.data_ptr() for parameter in net.parameters()]
    at, came = 1 - step, True
    while came:
        at += step
        model = net.compile(optimizer=optimizer, target="tiny")
        LOSS(model(x), y).backward()
        optimizer.step()
        trained = [parameter.detach().clone() for parameter in net.parameters()]
        came = interrupted(model.instance.close, at, FILES)
        if came:
            model.instance.close()
        for parameter, values, place in zip(net.parameters(), trained, places, strict=True):
            assert type(parameter) is torch.nn.Parameter
            assert parameter.data_ptr() == place
            assert torch.equal(parameter.detach(), values)
            assert parameter.grad is None
    assert at > len(trained) + 1

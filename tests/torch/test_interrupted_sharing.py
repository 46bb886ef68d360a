"""A module whose training is ended has its values and its kind of parameters, wherever that is
interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import stitch.torch.nn as nn

LOSS = nn.MSELoss()
#: Whose lines are interrupted; where torch's own modes end in between, those stay as they were.
FILES = ("shared_module.py",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Call, with an interrupt before so many lines of `FILES` have run; whether it came."""
    left = at

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_filename.endswith(FILES) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.full)])
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
        came = interrupted(model.instance.close, at)
        if came:
            model.instance.close()
        for parameter, values, place in zip(net.parameters(), trained, places, strict=True):
            assert type(parameter) is torch.nn.Parameter
            assert parameter.data_ptr() == place
            assert torch.equal(parameter.detach(), values)
            assert parameter.grad is None
    assert at > len(trained) + 1

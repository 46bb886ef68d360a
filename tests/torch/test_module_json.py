"""The JSON of a module that torch runs: read back to the bit, or refused with what is wrong."""

from __future__ import annotations

import copy
import io
import json
import random
from typing import Any

import pytest
import torch

import stitch.torch
from stitch.errors import FormatError, StitchError, UsageError
from stitch.torch.module_json import module_json
from tests.support.json_damage import at, damaged_json


def made() -> tuple[Any, Any]:
    """A module, and an optimizer that has stepped it."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def load(text: str, module: Any, optimizer: Any = None) -> None:
    stitch.torch.load(io.StringIO(text), module, optimizer)


def state_of(module: Any, optimizer: Any) -> str:
    """All that loading could change."""
    return module_json(module, optimizer)


EXP_AVG = "optimizer state items 0 1 items 0 1 items 1 1"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("tensors 0.bias", 7, "module.tensors.0.bias\n  expected: Tensor\n  got: 7"),
        ("tensors 0.bias dtype", "floot32", "where: module.tensors.0.bias\n  got: floot32"),
        ("tensors 0.bias dtype", "nn", "unknown data type"),
        (
            "tensors 0.bias shape",
            [4],
            "[4] of float32 is not 12 bytes",
        ),
        (
            "tensors 0.bias tensor",
            "A",
            ".tensor\n  expected: a string of base64",
        ),
        ("tensors 0.bias extra", 1, "Tensor has a surplus 'extra'\n  where: module.tensors.0.bias"),
        ("optimizer kind", None, "module.optimizer.kind\n  expected: a string"),
        (f"{EXP_AVG} dtype", 3, "module.optimizer.state.state.0.exp_avg.dtype\n"),
        ("optimizer state items", [[1]], "module.optimizer.state[0]\n  expected: a list of 2"),
        ("optimizer", 7, "module.optimizer\n  expected: Optimizer\n  got: 7"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(place: str, value: Any, said: str) -> None:
    module, optimizer = made()
    body = json.loads(module_json(module, optimizer))
    *outer, last = [int(word) if word in ("0", "1") else word for word in place.split()]
    at(body, tuple(outer))[last] = value
    before = state_of(module, optimizer)
    with pytest.raises(FormatError) as caught:
        load(json.dumps(body), module, optimizer)
    assert said in str(caught.value)
    assert state_of(module, optimizer) == before


def test_what_is_nested_too_deeply_is_said_with_its_place() -> None:
    module, optimizer = made()
    body = json.loads(module_json(module, optimizer))
    body["optimizer"]["state"] = 0
    text = json.dumps(body).replace('"state": 0', '"state": ' + "[" * 900 + "]" * 900)
    with pytest.raises(FormatError, match=r"nested too deeply\n  where: module\.optimizer\.state"):
        load(text, module, optimizer)


def test_a_state_of_another_shape_is_refused_and_the_optimizer_stays() -> None:
    module, optimizer = made()
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    beside = torch.optim.AdamW(other.parameters(), lr=0.5)
    body = json.loads(module_json(other))
    body["optimizer"] = json.loads(module_json(module, optimizer))["optimizer"]
    before = state_of(other, beside)
    with pytest.raises(UsageError, match=r"exp_avg of a parameter \[4, 3\] is \[3, 4\]"):
        load(json.dumps(body), other, beside)
    assert state_of(other, beside) == before


def test_a_state_without_what_the_optimizer_needs_is_refused_and_the_optimizer_stays() -> None:
    module, optimizer = made()
    body = json.loads(module_json(module, optimizer))
    del at(body, ("optimizer", "state", "items", 0, 1, "items", 0, 1, "items"))[0]
    before = state_of(module, optimizer)
    with pytest.raises(UsageError, match="another optimizer's state: 'step' is missing"):
        load(json.dumps(body), module, optimizer)
    assert state_of(module, optimizer) == before


def test_a_key_that_stands_twice_is_refused() -> None:
    module, _ = made()
    text = module_json(module).replace('"tensors": {', '"tensors": {"0.bias": 1, ', 1)
    with pytest.raises(FormatError, match="duplicate key in one object"):
        load(text, module)


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=pytest.mark.campaign("hostile"))]
)
def test_damaged_json_is_loaded_or_an_error_of_ours(count: int) -> None:
    module, optimizer = made()
    text, rng, refused = module_json(module, optimizer), random.Random(12), 0
    for _ in range(count):
        other = copy.deepcopy(module)
        beside = torch.optim.AdamW(other.parameters(), lr=0.01)
        try:
            load(damaged_json(text, rng), other, beside)
        except StitchError as error:
            assert len(str(error)) < 20_000
            refused += 1
    assert count // 2 < refused < count

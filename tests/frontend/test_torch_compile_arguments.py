"""What stands for a program's arguments, call by call: what comes again is known, and what has
changed is seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from stitch.frontend.torch.compile.shared_storage import (
    MAX_IDLE_PARTS,
    ArgumentSlot,
    ProgramArguments,
)
from tests.support.grids import every
from tests.support.torch.compiled import storage_of


def _arguments(*kinds: str) -> tuple[Any, ProgramArguments]:
    account = storage_of(executor="numpy")
    slots = [ArgumentSlot(at, kind == "static", kind == "fresh") for at, kind in enumerate(kinds)]
    return account, ProgramArguments(account, slots)


def _given(account: Any, arguments: ProgramArguments, *tensors: Any) -> list[Any]:
    with account.device.lock:
        return arguments.all_of(arguments.arrays(tensors))


@pytest.mark.parametrize("count", every(2, [1, 2, 3]))
def test_what_lasts_is_given_again_until_it_lies_elsewhere(count: int) -> None:
    account, arguments = _arguments(*["static"] * count)
    tensors = [torch.randn(4) for _ in range(count)]
    first = _given(account, arguments, *tensors)
    assert not arguments.stay
    recognised = account.recognised
    for _ in range(2):
        again = _given(account, arguments, *tensors)
        assert [a is b for a, b in zip(first, again, strict=True)] == [True] * count
        assert arguments.stay
    assert account.recognised - recognised == 2 * count
    kept, tensors[-1] = tensors[-1], torch.randn(4)
    other = _given(account, arguments, *tensors)
    assert not arguments.stay
    assert other[-1] is not first[-1]
    assert all(a is b for a, b in zip(first[:-1], other[:-1], strict=True))
    _given(account, arguments, *tensors)
    assert arguments.stay
    del kept


def test_an_array_where_a_lent_one_was_does_not_stay() -> None:
    account, arguments = _arguments("other")
    x = torch.randn(4)
    for _ in range(3):
        _given(account, arguments, x)
    assert arguments.stay
    y = torch.randn(4)
    (array,) = _given(account, arguments, y)
    assert not arguments.stay
    assert array.tolist() == y.tolist()
    _given(account, arguments, torch.randn(4))
    assert arguments.stay  # An array is another in every call.


def test_the_same_bytes_in_other_strides_are_not_the_same() -> None:
    account, arguments = _arguments("other")
    x = torch.arange(4.0).view(2, 2)
    for _ in range(3):
        _given(account, arguments, x)
    (array,) = _given(account, arguments, x.t())
    assert not arguments.stay
    assert array.tolist() == x.t().tolist()
    (array,) = _given(account, arguments, torch._neg_view(x))
    assert array.tolist() == (-x).tolist()


def test_what_was_taken_back_is_lent_anew() -> None:
    account, arguments = _arguments("static", "other")
    x, y = torch.randn(4), torch.randn(4)
    for _ in range(4):
        first = _given(account, arguments, x, y)
    with account.device.lock:
        for lender in account._lent.values():
            for lent in lender.parts.values():
                account._take_back(lent)
        account._lent.clear()
    again = _given(account, arguments, x, y)
    assert not arguments.stay
    assert again[0] is not first[0]
    for _ in range(2):
        again = _given(account, arguments, x, y)
    assert again[0].numpy().tolist() == x.tolist()
    with account.device.lock:
        account.device.run_queue()


def test_what_is_asked_for_all_at_once_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{ArgumentSlot.__module__}.MAX_IDLE_PARTS"
    monkeypatch.setattr(module, 0)
    assert MAX_IDLE_PARTS > 0
    account, arguments = _arguments("static", "static")
    x, y = torch.randn(4), torch.randn(4)
    first = _given(account, arguments, x, y)
    for _ in range(300):
        again = _given(account, arguments, x, y)
    assert again[0] is first[0]


def test_what_another_thread_compiles_during_a_look_is_asked_from_then_on() -> None:
    asked: list[str] = []

    class Asker:
        def mark_used(self) -> None:
            asked.append("early")
            other.start()
            # It comes to its end only where nothing keeps it out.
            other.join(0.2)

    class Late:
        def mark_used(self) -> None:
            asked.append("late")

    account = storage_of(executor="numpy")
    early: Any = Asker()
    late = Late()
    other = threading.Thread(target=account.register, args=(late,))
    account.register(early)
    with account.device.lock:
        account.clean_up()
    other.join()
    del early
    assert asked == ["early"]
    with account.device.lock:
        account.clean_up()
    assert asked == ["early", "late"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_made_anew_is_an_array(dtype: torch.dtype) -> None:
    account, arguments = _arguments("fresh")
    tensor = torch.arange(4).to(dtype)
    for given in (tensor, tensor.clone(), tensor.view(2, 2).t().reshape(4), tensor[::2]):
        (array,) = _given(account, arguments, given)
        assert array.astype(float).tolist() == given.tolist()
    leaf = torch.ones(2, requires_grad=True)
    (array,) = _given(account, arguments, leaf * 2)
    assert array.tolist() == [2.0, 2.0]

"""Whose bytes are where: what torch and a device share through torch.compile, and for how long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stitch
from stitch.budget import BUDGET
from stitch.frontend.torch import shared_storage
from stitch.frontend.torch.shared_storage import (
    CALLS_BETWEEN_CLEANUPS,
    COPIED_BELOW,
    ArgumentSlot,
)
from stitch.runtime import RuntimeDevice, Tensor
from tests.support import garbage
from tests.support.grids import every
from tests.support.stitched_models import held_by, one
from tests.support.torch.compiled import assert_gone, assert_same, compiled, storage_of

TARGETS = ("host", "wormhole_n150")
#: Rows of 64 numbers that are not too few to be read in place.
ROWS = COPIED_BELOW // 256


def _both(first: nn.Module, second: nn.Module, between: Callable[[Any], Any]) -> Any:
    """Two layers, and torch's own code between them."""

    def function(x: Any) -> Any:
        made = first(x)
        torch._dynamo.graph_break()
        made = between(made)
        torch._dynamo.graph_break()
        return second(made)

    return function


def _written(device: RuntimeDevice) -> int:
    return device.account().nbytes_seen


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_tensor_stays_on_the_device_over_a_graph_break(target: str) -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    function = _both(first, second, lambda made: made.view(-1, 64))
    run, account = compiled(function, target=target), storage_of(target=target)
    x = torch.randn(ROWS, 64)
    with torch.no_grad():
        for _ in range(3):
            assert_same(run(x), function(x))
        made, copied, written = (
            account.device.statistics().plans_made,
            account.copied,
            _written(account.device),
        )
        fresh = [torch.randn(ROWS, 64) for _ in range(3)]
        for batch in fresh:
            assert_same(run(batch), function(batch))
    # Only the batch enters; what the first program made is read where it lies.
    assert account.copied - copied == 3
    assert _written(account.device) - written == sum(batch.nbytes for batch in fresh)
    assert account.device.statistics().plans_made - made <= 1


@pytest.mark.parametrize("target", TARGETS)
def test_what_torch_writes_between_two_programs_is_seen(target: str) -> None:
    def change(made: Any) -> Any:
        made.add_(1)
        made[:, 3] = 9.0
        return made

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    function = _both(first, second, change)
    run = compiled(function, target=target)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 8)
            assert_same(run(x), function(x))


def test_copies_elsewhere_are_void_when_torch_has_written_a_result() -> None:
    module, target = nn.Linear(8, 8), "wormhole_n150"
    run, account = compiled(module, target=target), storage_of(target=target)
    # Compiled by itself, a program wants its input in L1: a copy of the result comes to lie there.
    double = stitch.compile(lambda v: v * 2.0, (np.zeros((4, 8), np.float32),), target=target)
    loaded = account.device.load(double)
    with torch.no_grad():
        made = run(torch.randn(4, 8))
        tensor = account.argument(made, ArgumentSlot(0, False))
        assert isinstance(tensor, Tensor)
        assert_same(torch.from_numpy(one(loaded(tensor)).numpy()), made * 2)
        made.mul_(3)
        assert_same(run(made), module(made))
        assert_same(torch.from_numpy(one(loaded(tensor)).numpy()), made * 2)


def test_parts_of_a_result_are_read_where_they_lie() -> None:
    module = nn.Linear(1024, 1024)
    run, account = compiled(module), storage_of()
    with torch.no_grad():
        made = run(torch.randn(6, 1024))
        assert made.nbytes > COPIED_BELOW
        for part in (made[2:4], made.view(3, 2, 1024)[1], made.detach()):
            copied = account.copied
            assert_same(run(part), module(part))
            assert account.copied == copied


def test_a_result_that_is_looked_at_as_another_type_is_read_as_that() -> None:
    made = compiled(lambda x: x + 1)(torch.rand(5, 3))
    bits = made.view(torch.int32)
    assert torch.equal(compiled(lambda x: x + 1, dynamic=False)(bits), bits + 1)


def test_what_begins_where_a_result_does_and_is_longer_is_read_to_its_end() -> None:
    made, device = (
        compiled(lambda x: x + 1)(torch.ones(8000, dtype=torch.int32)),
        storage_of().device,
    )
    whole = device.memory("host")
    start = made.data_ptr() - whole.ctypes.data
    longer = torch.from_numpy(whole[start : start + 64_000].view(np.int32))
    assert longer.data_ptr() == made.data_ptr()
    assert torch.equal(compiled(lambda x: x * 3, dynamic=False)(longer), longer * 3)


def test_four_results_of_an_output_are_views_and_further_ones_copies_while_these_are_held() -> None:
    run, device = compiled(lambda x: x + 1, dynamic=False), storage_of().device
    memory = device.memory("host")
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes

    def views(results: list[Any]) -> list[bool]:
        return [start <= result.data_ptr() < end for result in results]

    held = [run(torch.full((COPIED_BELOW // 4,), float(number))) for number in range(6)]
    assert views(held) == [True] * 4 + [False] * 2
    del held[1]
    gc.collect()
    more = [run(torch.full((COPIED_BELOW // 4,), float(number))) for number in (6, 7)]
    assert views(more) == [True, False]
    for result, number in zip([*held, *more], (0, 2, 3, 4, 5, 6, 7), strict=True):
        assert (result == number + 1).all()


def test_arguments_that_come_again_are_read_in_place() -> None:
    run, account = compiled(lambda x: x * 2), storage_of()
    x = torch.randn(100, 100)
    run(x)
    run(x)
    written = _written(account.device)
    for number in range(3):
        x.fill_(number)
        assert_same(run(x), x * 2)
    # Also what torch does not count: NumPy's writes.
    x.numpy()[0] = -5
    assert_same(run(x), x * 2)
    assert _written(account.device) == written


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_thousand_steps_leave_nothing_behind(target: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run, account = compiled(module, target=target), storage_of(target=target)
    steps = torch.optim.SGD(module.parameters(), 1e-3)

    def step() -> None:
        steps.zero_grad()
        run(torch.randn(4, 8)).sum().backward()
        steps.step()

    def state() -> tuple[int, int, int, int]:
        device = account.device
        return (
            device.statistics().plans_made,
            device.statistics().bindings_made,
            len(held_by(device)),
            len(account),
        )

    for _ in range(100):
        step()
    before = state()
    for _ in range(900):
        step()
    assert state() == before


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_module_that_is_gone_leaves_nothing_behind(target: str) -> None:
    assert_gone(lambda: nn.Linear(64, 64), (4, 64), target=target)


def test_parameters_that_are_replaced_are_not_taken_for_the_old_ones() -> None:
    for target in TARGETS:
        module = nn.Linear(8, 8)
        run = compiled(module, target=target)
        x = torch.randn(2, 8)
        with torch.no_grad(), garbage.only_of_here():
            for _ in range(4):
                assert_same(run(x), module(x))
                module.weight.data = torch.randn(8, 8)
                gc.collect()
            module.load_state_dict(nn.Linear(8, 8).state_dict())
            assert_same(run(x), module(x))


def test_several_threads_may_call_at_once() -> None:
    modules = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2)]
    runs = [torch.compile(module, backend="stitch") for module in modules]
    with torch.no_grad():
        for run in runs:
            run(torch.randn(3, 16))
    wrong: list[Any] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(60):
                x = torch.randn(3, 16)
                if not torch.allclose(runs[number % 2](x), modules[number % 2](x), atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_parameters_in_one_storage_are_told_apart() -> None:
    flat = torch.randn(200)
    weights = [nn.Parameter(flat[2 * i : 2 * i + 2]) for i in range(100)]
    run = compiled(lambda x, given: torch.stack([x @ w for w in given]))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2)
            assert_same(run(x, weights), torch.stack([x @ w for w in weights]))
            flat.mul_(-1)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_storages_at_one_address_are_told_apart(target: str) -> None:
    module = nn.Linear(4, 4, bias=False)

    def function(x: Any, rows: Any) -> Any:
        return module(x) + rows

    run = compiled(function, target=target)
    # DLPack makes another storage of the same bytes.
    rows, x = torch.from_dlpack(module.weight.detach())[:1], torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(4):
            assert_same(run(x, rows), function(x, rows))
            rows.mul_(2)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_bytes_that_torch_reads_negated_are_read_so(target: str) -> None:
    run = compiled(lambda x: x + 1, target=target, dynamic=False)
    plain = torch.randn(2, 3)
    # One place in one storage, of which a bit of the tensor says how it is read.
    negated = torch._neg_view(plain)
    for tensor in (plain, plain, negated, negated, negated, plain):
        assert_same(run(tensor), tensor + 1)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_addresses_that_a_parameter_has_left_are_forgotten(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_storage, "MAX_PARTS", 10)
    module, flat = nn.Linear(2, 1, bias=False), torch.randn(600)
    run, account = compiled(module, target=target), storage_of(target=target)
    x = torch.randn(2, 2)

    before = account.places_lent
    with torch.no_grad():
        for start in [*range(0, 500, 2), 0, 2, 4]:
            module.weight.data = flat[start : start + 2].view(1, 2)
            assert_same(run(x), module(x))
    account.clean_up()
    assert account.places_lent - before <= 10 + CALLS_BETWEEN_CLEANUPS + 1


def test_a_parameter_whose_memory_was_taken_back_is_read_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_storage, "MAX_PARTS", 0)
    idle, busy, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
    run_idle = compiled(idle, target="host", dynamic=False)
    run_busy = torch.compile(busy, backend="stitch", options={"target": "host"}, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                assert_same(run_idle(x), idle(x))
            for _ in range(3 * CALLS_BETWEEN_CLEANUPS):
                run_busy(x)


def test_a_graph_over_the_budget_is_refused_and_runs_with_a_larger_one() -> None:
    module, x = nn.Linear(64, 64), torch.randn(8, 64)
    refused = torch.compile(module, backend="stitch", options={"max_memory": "64kB"})
    with pytest.raises(stitch.OutOfMemoryError, match="Gemm"):
        refused(x)
    torch._dynamo.reset()
    enough = BUDGET.taken_nbytes + 10**9
    assert_same(
        torch.compile(module, backend="stitch", options={"max_memory": enough})(x), module(x)
    )

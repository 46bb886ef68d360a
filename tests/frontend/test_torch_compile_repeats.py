"""Calls that run again what ran before, with copies of its results: only on the very same tensors,
after failures and interrupts too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stitch.errors import TaskError
from tests.support.interrupts import interrupted
from tests.support.torch.compiled import assert_same, compiled, storage_of

#: Whose lines are interrupted.
INTERRUPTED = ("graph_program.py", "shared_storage.py")


def test_replayed_calls_give_the_results_of_eager_torch() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run, x = compiled(module), torch.randn(2, 8)
    device, held = storage_of().device, []
    before = device.statistics().replays
    with torch.no_grad():
        for number in range(8):
            x.fill_(number)
            module[0].weight.mul_(1.5)
            held.append((run(x), module(x)))
    assert device.statistics().replays >= before + 4
    for made, wanted in held:
        assert_same(made, wanted)


def test_random_numbers_differ_from_replay_to_replay() -> None:
    run = compiled(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64)
    with torch.no_grad():
        made = [run(x) for _ in range(8)]
    assert len({tuple(one.tolist()) for one in made}) == 8


def test_one_tensor_given_twice_is_not_taken_for_the_run_before() -> None:
    run = compiled(lambda x, y: x * 2 - y)
    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        for _ in range(2):
            # Dynamo knows objects, and not that these two begin at one place.
            for other in (y, x.detach()):
                for _ in range(5):
                    assert_same(run(x, other), x * 2 - other)


def test_weights_that_are_tied_by_their_data_are_read() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    run, x = compiled(lambda x: first(x) + 2 * second(x)), torch.randn(2, 4)
    own = second.weight.data
    with torch.no_grad():
        for data in (own, first.weight.data) * 2:
            second.weight.data = data
            for _ in range(5):
                assert_same(run(x), first(x) + 2 * second(x))


def test_after_a_call_that_failed_the_next_is_none_of_the_runs_before() -> None:
    run, table = compiled(lambda rows, table: table[rows] * 2), torch.randn(10, 8)
    good, bad = torch.tensor([1, 2]), torch.tensor([3, 4])
    with torch.no_grad():
        for rows in (bad, good):
            for _ in range(5):
                assert_same(run(rows, table), table[rows] * 2)
        bad[0] = 99
        with pytest.raises(TaskError, match="out of range"):
            run(bad, table)
        bad[0] = 5
        assert_same(run(bad, table), table[bad] * 2)


@pytest.mark.parametrize("changes", ["argument", "weights"])
def test_a_call_that_was_interrupted_anywhere_leaves_nothing_stale(changes: str) -> None:
    module = nn.Linear(4, 4)
    run, held = compiled(module), [torch.randn(2, 4) for _ in range(2)]
    at, came = 0, True
    with torch.no_grad():
        while came:
            at, x = at + 1, held[0]
            for _ in range(4):
                assert_same(run(held[1]), module(held[1]))
            for _ in range(4):
                assert_same(run(x), module(x))
            if changes == "argument":
                x = held[1]
            else:
                module.weight.data = torch.randn(4, 4)
            came = interrupted(lambda x=x: run(x), at, INTERRUPTED, but="with ")  # type: ignore[misc]  # it is known
            for _ in range(3):
                assert_same(run(x), module(x))
            # What lies elsewhere is seen, too.
            module.weight.data = module.weight.data + 1
            assert_same(run(x), module(x))
    assert at > 30

"""`statistics` counts what happened, for every form of call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.runtime import HookContext, PlanRun
from tests.support.stitched_models import consuming, integers, one, scaled

SHAPE = (4, 64)
Ways = dict[str, Callable[[Array], object]]


def ways(device: stitch.Device) -> Ways:
    """By way of the queue, past it, and partly so."""
    a, b = (device.load(scaled(n, 2.0, SHAPE, target=device.machine)) for n in "ab")
    eat = stitch.Pipeline([device.load(consuming("eat", 2.0, SHAPE, target=device.machine))])
    pipe, kept = stitch.Pipeline([a, b]), list[stitch.Tensor]()

    def keep(x: Array) -> None:
        kept.append(one(pipe(x)))
        del kept[:-3]

    return {
        "calls": lambda x: one(b(a(x))).numpy(),
        "pipeline": pipe,
        "kept": keep,
        "tensor": lambda x: pipe(device.tensor(x)),
        "donated": lambda x: eat(eat(eat(x))),
        "fed back": lambda x: pipe(pipe(x)),
    }


@pytest.mark.parametrize("window", [1, 64])
@pytest.mark.parametrize("target", ["tiny", "wormhole_n150"])
def test_every_run_of_a_known_plan_is_a_replay(target: str, window: int) -> None:
    with stitch.open_device(target, window=window) as device:
        runs = list[object]()
        for way in ways(device).values():
            for turn in range(12):
                # Half of them while nobody listens.
                stop = device.events.subscribe(runs.append) if turn % 2 else lambda: None
                runs.clear()
                before = device.statistics()
                way(integers(SHAPE, turn))
                device.flush()
                after = device.statistics()
                stop()
                again = after.replays - before.replays
                if turn % 2:
                    count = sum(isinstance(event, PlanRun) for event in runs)
                    assert again == count - (after.plans_made - before.plans_made)
                assert again > 0 or turn < 4
                if turn % 5 == 0:
                    device.history.clear()
                    assert device.statistics() == after, "since the device opened"


def test_the_first_run_of_a_plan_is_none_and_neither_is_one_that_fails() -> None:
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0, SHAPE))])
        is_bad = True

        def refuse(_: HookContext) -> None:
            if is_bad:
                raise ValueError("not now")

        remove = device.hooks.register(before_program=refuse)
        for _ in range(2):
            with pytest.raises(ValueError, match="not now"):
                pipe(integers(SHAPE))
            assert device.statistics().replays == 0
        is_bad = False
        made = device.statistics().plans_made
        assert made >= 1
        replays = []
        for turn in range(5):
            np.testing.assert_array_equal(
                one(pipe(integers(SHAPE))).numpy(), integers(SHAPE) * 2 + 1
            )
            replays.append(device.statistics().replays)
            if turn == 3:
                remove()
        assert device.statistics().plans_made == made
        assert [b - a for a, b in pairwise(replays)] == [1] * 4

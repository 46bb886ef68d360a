"""Random use with several inter-op threads: plans, copies and elements are those of one thread.

Windows are long, and every section counts as long enough to run concurrently.
"""

from __future__ import annotations

import contextlib
import gc
from random import Random

import pytest

from stitch.planner import Step
from stitch.runtime import Event, PlanMade, PlanRun, PlanStopped
from tests.support.faults import Mines, Planted
from tests.support.handle_world import World, fate
from tests.support.random_work import MACHINES, WITH_ROOM
from tests.support.short_threads import shorten
from tests.support.stitched_models import held_by

STEPS = 40
LONG = pytest.mark.campaign("threads")


def used(
    seed: int, inter_op_threads: int, executor: str = "numpy", *, watched: bool = True
) -> tuple[list[tuple[str, tuple[Step, ...]]], list[str]]:
    """What a device did, and how its handles ended; every element was looked at on the way."""
    draw, seen = Random(seed), list[tuple[str, tuple[Step, ...]]]()

    def note(event: Event) -> None:
        if isinstance(event, PlanMade | PlanRun):
            seen.append((type(event).__name__, event.plan.steps))

    world = World(
        seed % len(MACHINES), window=64, executor=executor, inter_op_threads=inter_op_threads
    )
    if watched:
        world.device.events.subscribe(note)
    for _ in range(STEPS):
        world.step(draw)
    world.flush()
    world.check()
    account = world.device.account()
    ended = [fate(held.tensor) for held in world.held]
    ended += [str(account.total.copies), str(account.total.nbytes), str(account.nbytes_seen)]
    world.close()
    return seen, ended


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=LONG) for n in (1, 2))])
@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "torch"])
def test_drawn_work_is_the_same_on_any_number_of_threads(
    executor: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if executor != "numpy":
        pytest.importorskip(executor)
    found = shorten(monkeypatch)
    for seed in range(part, 30 if executor == "numpy" else 15, 3):
        on_one = used(seed, 1, executor)
        assert on_one == used(seed, 2, executor)
        assert on_one == used(seed, 3, executor)
        assert on_one[1] == used(seed, 2, executor, watched=False)[1]
    widths = [len(fork.threads) for forks in found for fork in forks]
    print(executor, len(found), len(widths), widths.count(3))
    assert len(widths) > 6
    assert 3 in widths


def fails(
    seed: int, inter_op_threads: int, mines: Mines, places: set[int]
) -> tuple[list[str], int]:
    """The same work, in which some calls of its last window raise; how its handles ended."""
    world, draw = World(WITH_ROOM, window=64, inter_op_threads=inter_op_threads), Random(seed)
    mines.at, mines.count = set(), 0
    for _ in range(14):
        world.step(draw)
    world.flush()
    mines.at = {mines.count + place for place in places}
    before = mines.count
    stopped: list[PlanStopped] = []
    world.device.events.subscribe(
        lambda event: stopped.append(event) if isinstance(event, PlanStopped) else None
    )
    with contextlib.suppress(Planted):
        for _ in range(8):
            if draw.randrange(4):
                world.call(*(draw.randrange(64) for _ in range(4)))
            else:
                world.convert(draw.randrange(64), draw.randrange(64))
        # What the calls took over is no longer held: what is ready here stays ready.
        with world.attempt():
            world.device.flush()
    calls, mines.at = mines.count - before, set()
    world.check()
    ended = [fate(held.tensor) for held in world.held]
    for _ in range(6):
        world.step(draw)
    world.flush()
    world.check()
    device = world.device
    world.close()
    del world
    if held_by(device):
        gc.collect()
    assert held_by(device) == []
    return ended, calls


def fail_alike(seed: int, patch: pytest.MonkeyPatch, most: int) -> bool:
    """Failures in at most so many calls of the last window, and in two at once; whether anything in
    it is independent of something else, else nothing was tried."""
    with patch.context() as own:
        found = shorten(own)
        mines = Mines()
        mines.lay(own)
        _, calls = fails(seed, 2, mines, set())
        if not found:
            return False
        for place in range(0, calls, 1 + calls // most):
            assert fails(seed, 2, mines, {place})[0] == fails(seed, 1, mines, {place})[0], place
            fails(seed, 3, mines, {place, place + calls // 3, place + 2 * calls // 3})
    return True


@pytest.mark.parametrize("seed", [1, 4, 12])
def test_what_fails_in_any_thread_leaves_what_it_leaves_on_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fail_alike(seed, monkeypatch, 5)


@LONG
@pytest.mark.parametrize("block", range(2))
def test_what_fails_anywhere_in_any_thread(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [fail_alike(seed, monkeypatch, 16) for seed in range(block * 20, block * 20 + 20)]
    assert sum(tried) > 5

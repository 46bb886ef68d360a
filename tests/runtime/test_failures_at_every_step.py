"""A run that fails at any step, in any transfer: all lies where the records say, and work goes on.

What lies where is compared byte by byte with what was there, for every instance of every handle
that is held; a value that a failed task would have overwritten says that it is lost.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from random import Random

import numpy as np
import pytest

import stitch
from stitch.planner import Plan, Relocate
from stitch.program import DataType, Layout
from tests.support.faults import Fuse, Planted, lay
from tests.support.grids import every
from tests.support.handle_world import World
from tests.support.planner.small_requests import machine_with
from tests.support.random_work import HOST, L1, MACHINES
from tests.support.run_seed import SEED
from tests.support.stitched_models import binary_op, held_by, integers, one


def prepared(seed: int) -> tuple[World, Random]:
    """A device with something in it; the same each time."""
    draw = Random(seed)
    world = World(seed % len(MACHINES), window=64)
    for _ in range(14):
        world.step(draw)
    world.flush()
    return world, draw


def act(world: World, draw: Random) -> None:
    """The work that fails: calls and conversions, run in one window."""
    with world.attempt(*(h for h in world.held if not world.is_shared(h))):
        for _ in range(5):
            if draw.randrange(4):
                world.call(*(draw.randrange(64) for _ in range(4)))
            else:
                world.convert(draw.randrange(64), draw.randrange(64))
        world.device.flush()


def kinds_of(plans: list[Plan]) -> Counter[str]:
    done: Counter[str] = Counter(plans=len(plans))
    for plan in plans:
        for step in plan.copies:
            if isinstance(step, Relocate):
                done["move" if step.stage is None else "bounce"] += 1
                done["cycle"] += step.certificate is not None and step.certificate.kind == "cycle"
            else:
                done[step.kind] += 1
                target = step.target.desc.layout.space
                done["spill"] += step.kind == "evict" and target is HOST
        blocks = Counter(i.buffer for r in plan.request.residents for i in r.instances)
        done["view"] += any(count > 1 for count in blocks.values())
        done["address"] += any(
            d.layout.address is not None
            for t in plan.request.tasks
            for d in (*t.transformation.inputs, *t.transformation.outputs)
        )
    return done


def fails_everywhere(seed: int, patch: pytest.MonkeyPatch) -> Counter[str]:
    """One piece of work, stopped at each of its steps and transfers in turn."""
    fuse = Fuse()
    plans = lay(patch, fuse)
    world, draw = prepared(seed)
    state = draw.getstate()
    plans.clear()
    fuse.count = fuse.transfers = 0
    act(world, draw)
    done, places = kinds_of(plans), fuse.count
    done["transfers"] = fuse.transfers
    world.close()
    for place in range(places):
        world, draw = prepared(seed)
        draw.setstate(state)
        fuse.left = place
        with contextlib.suppress(Planted):
            act(world, draw)
        assert fuse.left is None, f"seed {seed}: the work is another at place {place}"
        world.check()
        draw.setstate(state)
        act(world, draw)
        world.flush()
        world.check()
        device = world.device
        world.close()
        del world
        if held_by(device):
            gc.collect()
        assert held_by(device) == [], f"seed {seed}, place {place}"
        done["places"] += 1
    return done


@pytest.mark.parametrize("seed", every(2, [25, 32]))
def test_what_fails_anywhere_leaves_what_the_records_say(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fails_everywhere(seed, monkeypatch)
    assert done["places"] > 20
    assert done["evict"] or done["bounce"]


@pytest.mark.campaign("injection")
@pytest.mark.parametrize("part", range(4))
def test_ninety_plans_that_fail_everywhere(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[str] = Counter()
    start = SEED + 24 * part
    for seed in range(start, start + 24):
        with monkeypatch.context() as patch:
            done += fails_everywhere(seed, patch)
    print(f"seeds from {start}: {dict(done)}")
    # What seeds from anywhere have: 26 to 36 plans, and 2 fixed addresses at least, in ten draws.
    assert done["plans"] >= 12 and done["view"] and (done["transfers"] or done["address"])


@pytest.mark.parametrize("place", every(3, range(16)))
def test_tensors_of_a_full_l1_that_change_places_are_whole_wherever_that_fails(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_with(l1_nbytes=512)
    base = machine.shape.space(L1).base
    placement = [
        f"input.x.address={base:#x}",
        f"input.w.address={base + 256:#x}",
        "output.y.space=dram",
    ]
    placement += ["input.x.space=l1", "input.w.space=l1"]
    least = binary_op("least", "Min", (4, 64), target=machine, placement=placement)
    there = Layout(DataType.FLOAT32, L1)
    fuse = Fuse()
    plans = lay(monkeypatch, fuse)
    with stitch.open_device(machine) as device:
        program = device.load(least)
        x, w = (device.tensor(integers(start=i)).to_layout(there) for i in (0, 7))
        device.flush()
        plans.clear()
        fuse.left = place
        with contextlib.suppress(Planted):
            one(program(x, w)).numpy()
        for tensor, start in ((x, 0), (w, 7)):
            np.testing.assert_array_equal(tensor.numpy(), integers(start=start))
        fuse.left = None
        right = np.minimum(integers(), integers(start=7))
        np.testing.assert_array_equal(one(program(x, w)).numpy(), right)
        assert kinds_of(plans)["bounce"]

"""Random functions whose closures change between calls, in mode parallel and on plain lists."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.changing_closures import random_program
from tests.support.run_seed import SEED


@pytest.fixture(scope="module")
def device() -> Iterator[stitch.Device]:
    with stitch.open_device("host", executor="numpy") as opened:
        yield opened


def check(seed: int, device: stitch.Device) -> None:
    """One program, called before and after each of its changes, and once more without one."""
    choose = random.Random(seed)
    program = random_program(seed)
    (run, changed), (expected, of_plain) = program.opened(ops), program.opened(plain)
    nest = program.nest(choose)
    changes = list(program.changes)
    choose.shuffle(changes)
    for change in ("", "", *changes):
        for space in (changed, of_plain):
            exec(change, space)
        if choose.random() < 0.3:
            nest = program.nest(choose)
        with ops.mode("parallel", device=device):
            found = run(FractalTensor(nest))
        where = f"seed {seed}, after {change!r} in {program.source}"
        with np.errstate(over="ignore", invalid="ignore"):  # Some grow beyond all numbers.
            wanted = expected(nest)
        plain.assert_same(plain.lists_of(found), wanted, 1e-4, where)


@pytest.mark.parametrize("part", range(4))
def test_what_changed_is_seen_at_the_next_call(part: int, device: stitch.Device) -> None:
    for seed in range(10):
        check(10 * part + seed, device)


@pytest.mark.campaign("random_work")
@pytest.mark.parametrize("part", range(25))
def test_what_changed_is_seen_in_many_programs(part: int, device: stitch.Device) -> None:
    first = 100 + SEED + 50 * part
    for seed in range(50):
        check(first + seed, device)

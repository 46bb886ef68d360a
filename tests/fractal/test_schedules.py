"""Random functions over nests: sequential, parallel, and each schedule by name give what lists
give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.compiler import SCHEDULES
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.grids import every, in_turn
from tests.support.plain_nests import assert_same, lists_of
from tests.support.random_nest_programs import nests_of, random_case

#: Machine and executor, taken in turn.
PLACES = [
    ("host", "numpy"), ("host", "onnxruntime"), ("host", "torch"), ("host", "auto"),
    ("wormhole_n150", "numpy"),
]  # fmt: skip


@pytest.fixture(scope="module")
def devices() -> Iterator[list[stitch.Device]]:
    opened = [stitch.open_device(machine, executor=executor) for machine, executor in PLACES]
    yield opened
    for device in opened:
        device.close()


# Of seeds with one remainder by 5 leaves are of one kind: places are taken in another turn. Every
# eleventh has all kinds of leaves and all places.
@pytest.mark.parametrize("seed", every(11, range(45)))
def test_modes_and_schedules_give_what_lists_give(seed: int, devices: list[stitch.Device]) -> None:
    case = random_case(seed)
    expected = case.program(plain, case.closed, case.nest)
    xs, closed = nests_of(case)
    device = devices[(seed + seed // 5) % len(devices)]
    with ops.mode("sequential", device=device):
        found = case.program(ops, closed, xs)
    assert_same(lists_of(found), expected, case.tolerance, f"sequential {case}")
    for schedule in (None, *SCHEDULES):
        words = f"{schedule} {case}"
        with ops.mode("parallel", device=device, schedule=schedule):
            found = case.program(ops, closed, xs)
        assert_same(lists_of(found), expected, case.tolerance, f"parallel {words}")
        compiled = ops.compile(
            lambda nest: case.program(ops, closed, nest), xs, target=device.machine,
            schedule=schedule,
        )  # fmt: skip
        assert_same(lists_of(compiled(xs)), expected, case.tolerance, f"compiled {words}")


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_nests_over_tensors_of_the_device_are_closed_over(
    number: int, devices: list[stitch.Device]
) -> None:
    with ops.mode("parallel", device=devices[number]):
        own = ops.map(lambda x: x * 2, FractalTensor([1.0, 2.0, 3.0]))
        state = ops.fold(lambda s, x: s + x, own)
        found = ops.scan(
            lambda s, p, k, more: s * state + p[0] * p[1] + k + more[0],
            ops.zip(own, FractalTensor([3.0, 4.0, 5.0])), own[0], 1.0, more=own,
        )  # fmt: skip

    def step(s: Any, p: Any) -> Any:
        return s * 12 + p[0] * p[1] + 1 + 2

    assert found.tolist() == plain.scanl(step, ([2.0, 4.0, 6.0], [3.0, 4.0, 5.0]), 2.0)


LOOPS: dict[str, Any] = {
    "a map of what is around": lambda o, xs, ys: o.map(
        lambda x: o.map(lambda _: np.tanh(x), ys), xs
    ),
    "a scan of what is around": lambda o, xs, ys: o.map(
        lambda x: o.scanl(lambda s, _: np.tanh(x), ys, np.float32(0)), xs
    ),
    "a map in a scan": lambda o, xs, ys: o.scanl(
        lambda s, x: o.foldl(lambda a, b: a + b, o.map(lambda _: np.tanh(s + x), ys)),
        xs, np.float32(0),
    ),
    "a map of nothing": lambda o, xs, ys: o.map(lambda _: np.float32(2) * xs[0], ys),
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "name"), in_turn([None, *SCHEDULES], LOOPS))
def test_loops_of_neither_states_nor_elements(name: str, schedule: str | None) -> None:
    """Nobody reads their elements, so these leave the loop: rounds have but what is around."""
    xs, ys = np.array([0.5, 1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
    with ops.mode("parallel", schedule=schedule):
        found = LOOPS[name](ops, FractalTensor(xs), FractalTensor(ys))
    assert_same(lists_of(found), LOOPS[name](plain, list(xs), list(ys)), 1e-6, str(schedule))

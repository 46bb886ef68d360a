"""Full spaces with all results held: one plan serves, whichever tensor is evicted."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.machine import Machine
from stitch.planner import Copy, Plan, plan, predicted_cost
from stitch.program import Array, DataType, Layout, Space
from stitch.runtime import RuntimeDevice
from tests.support.grids import every_row
from tests.support.stitched_models import model, one, scaled, tiny

SHAPE = (8, 64)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")
SMALL = tiny(l1_nbytes=8192, dram_nbytes=24_576)
DEEP = tiny(l1_nbytes=8192, dram_nbytes=1 << 20)
X = np.arange(512, dtype=np.float32).reshape(SHAPE)


def test_a_refusal_holds_nothing_once_it_is_caught() -> None:
    machine = tiny(l1_nbytes=4096, dram_nbytes=2048)

    def half(b: stitch.ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", SHAPE, "float32") * 0.5)

    def fill() -> int:
        held = []
        with pytest.raises(stitch.OutOfMemoryError):
            for _ in range(100):
                held.append(one(program(X)))  # noqa: PERF401 (it ends in an error)
        return len(held)

    with stitch.open_device(machine, window=1, spill=False) as device:
        program = device.load(model("half", half, target=machine, placement=IN_L1))
        # A cycle of the traceback would keep what the calls hold.
        gc.disable()
        try:
            assert len({fill() for _ in range(4)}) == 1
        finally:
            gc.enable()


def who_leaves(plan: Plan) -> list[int]:
    """The values that a plan evicts, in order."""
    return [s.value for s in plan.copies if isinstance(s, Copy) and s.kind == "evict"]


def sizes_leaving(plan: Plan) -> list[int]:
    """The bytes of what a plan evicts, in order."""
    return [step.nbytes for step in plan.copies if isinstance(step, Copy) and step.kind == "evict"]


FULL = pytest.mark.campaign("random_work")


@pytest.fixture
def placed_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Plan, Plan]]]:
    """Every plan that was placed, beside what would have been planned there and then: it never
    costs more, and where something leaves, the same tensors leave in the same order; or others of
    their sizes at the same cost, as where things lie says which of these needs no move."""
    pairs: list[tuple[Plan, Plan]] = []
    begin = RuntimeDevice.__init__

    def opened(self: RuntimeDevice, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made = 0

        def compare(found: Plan) -> None:
            nonlocal made
            before, made = made, self.statistics().plans_made
            if made != before:
                return  # It was planned for this.
            fresh = plan(found.request)
            costs = predicted_cost(found), predicted_cost(fresh)
            assert costs[0] <= costs[1]
            if who_leaves(found) != who_leaves(fresh):
                assert costs[0] == costs[1]
                assert sizes_leaving(found) == sizes_leaving(fresh)
            pairs.append((found, fresh))

        self.on_plan(compare)

    monkeypatch.setattr(RuntimeDevice, "__init__", opened)
    yield pairs


@pytest.mark.parametrize(
    ("machine", "window"),
    every_row(
        2,
        [
            pytest.param(machine, window, marks=FULL if machine is SMALL or window == 8 else ())
            for machine in (SMALL, DEEP)
            for window in (1, 8, 64)
        ],
    ),
)
def test_one_plan_serves_whatever_leaves(
    machine: Machine, window: int, placed_plans: list[tuple[Plan, Plan]]
) -> None:
    with stitch.open_device(machine, window=window) as device:
        programs = [device.load(scaled(n, f, SHAPE, target=machine, placement=IN_L1))
                    for n, f in (("a", 2.0), ("b", 0.5))]  # fmt: skip
        pipe, held = stitch.Pipeline(programs), []
        # The plans that serve are made by the 38th. What would be planned instead, each time anew,
        # takes as long as all before it together.
        for number in range(112):
            if number == 48:
                made = device.statistics().plans_made
            held.append(one(pipe(X + number)))
        device.run_queue()
        assert device.statistics().plans_made == made
        leaving = [plan for plan, _ in placed_plans if plan.leaving]
        assert len(leaving) >= 64
        for number, y in enumerate(held):
            assert np.array_equal(y.numpy(), ((X + number) * 2 + 1) / 2 + 1)


MIXED = tuple(
    scaled(f"s{index}", factor, shape, target=SMALL, placement=placement).encode()
    for index, (factor, shape, placement) in enumerate((
        (2.0, SHAPE, IN_L1),
        (0.5, SHAPE, IN_L1),
        (3.0, SHAPE, ("input.x.space=l1", "output.y.space=dram")),
        (4.0, (16, 64), IN_L1),
        (0.25, (3, 32), IN_L1),
    ))
)  # fmt: skip
SHAPES = (SHAPE, SHAPE, SHAPE, (16, 64), (3, 32))
FACTORS = (2.0, 0.5, 3.0, 4.0, 0.25)


def run_script(seed: int, steps: int) -> None:
    """Calls of programs on arrays and on what is held, most results held; some are read, dropped,
    copied or viewed. Whole rounds come again, so that what was planned may serve."""
    dice = random.Random(seed)
    with stitch.open_device(SMALL, window=dice.choice((1, 3, 8, 64))) as device:
        programs = [device.load(data) for data in MIXED]
        held: list[tuple[stitch.Tensor, Array]] = []
        few = dice.choice((20, 60, 200))
        rounds = [[dice.randrange(10) for _ in range(dice.randrange(1, 6))] for _ in range(3)]
        for number in range(steps):
            for what in rounds[number * 3 // steps]:
                which = what % 5
                x = np.full(SHAPES[which], 1 + number % 7, np.float32)
                fitting = [(t, a) for t, a in held[-8:] if a.shape == SHAPES[which]]
                if what >= 5 and fitting:
                    tensor, x = fitting[0]
                    y = one(programs[which](tensor))
                    del tensor
                else:
                    y = one(programs[which](x))
                fitting.clear()
                held.append((y, x * np.float32(FACTORS[which]) + 1))
                del y
            if not dice.randrange(6):
                tensor, truth = dice.choice(held)
                assert np.array_equal(tensor.numpy(), truth), (seed, number)
                held.append((tensor.to_layout(Layout(F32, dice.choice((Space.L1, Space.DRAM)))),
                             truth))  # fmt: skip
                del tensor
            if len(held) > few:
                del held[: dice.choice((0, 1, 1, len(held)))]
        for tensor, truth in held:
            assert np.array_equal(tensor.numpy(), truth), seed
        held.clear()
        del tensor


F32 = DataType.FLOAT32


@pytest.mark.parametrize("seed", [2, pytest.param(6, marks=FULL), pytest.param(10, marks=FULL)])
def test_what_is_placed_leaves_as_if_planned_anew(
    seed: int, placed_plans: list[tuple[Plan, Plan]]
) -> None:
    run_script(seed, 60)
    assert len(placed_plans) >= 5
    assert any(plan.leaving for plan, _ in placed_plans)


def holding(rows: int) -> stitch.CompiledModel:
    """A model with a table of so many rows in DRAM."""

    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (2, rows), "float32")
        b.output("y", x @ b.constant(np.ones((rows, 64), np.float32)))

    return model("big", build, target=SMALL)


def test_evictions_go_to_dram_again_once_it_has_room() -> None:
    with stitch.open_device(SMALL, window=1) as device:
        program = device.load(scaled("s", 2.0, SHAPE, target=SMALL, placement=IN_L1))
        big = device.load(holding(190))
        held: list[stitch.Tensor] = []

        def evicted(count: int) -> Counter[Space]:
            """Where so many passes send what leaves L1."""
            before = len(held)
            device.history.clear("passes")
            held.extend(one(program(X + number)) for number in range(before, before + count))
            return Counter({
                space: sum(
                    runs * sum(
                        isinstance(step, Copy) and step.kind == "evict"
                        and step.source.desc.layout.space is Space.L1
                        and step.target.desc.layout.space is space
                        for step in plan.steps
                    )
                    for plan, runs in device.account().plans
                )
                for space in Space
            })  # fmt: skip

        assert evicted(60)[Space.HOST] > 20
        del big
        gc.collect()
        after = evicted(20)
        assert after[Space.DRAM] == 20
        assert after[Space.HOST] == 0
        for number, y in enumerate(held):
            assert np.array_equal(y.numpy(), (X + number) * 2 + 1)

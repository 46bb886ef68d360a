"""How often work is planned: once where nothing but places would be different."""

from __future__ import annotations

import random

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.planner import Plan
from stitch.program import Array, DataType, InputKind, Layout, Space, TensorDesc
from stitch.runtime import LoadedProgram
from tests.support.grids import every
from tests.support.stitched_models import binary_op, consuming, one, scaled, tiny

SHAPE = (8, 64)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")


def test_callbacks_get_each_plan_and_may_end_themselves() -> None:
    got: list[str] = []

    def once(plan: Plan) -> None:
        got.append("once")
        end()
        end()

    def broken(plan: Plan) -> None:
        raise ValueError("mine")

    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        end = device.on_plan(once)
        device.on_plan(lambda plan: got.append("always"))
        with pytest.raises(UsageError, match=r"Device.on_plan takes a function"):
            device.on_plan(3)  # type: ignore[arg-type]
        x = np.ones((4, 64), np.float32)
        one(program(x)).numpy()
        assert got == ["once", "always"]
        end_broken = device.on_plan(broken)
        y = one(program(one(program(x))))
        with pytest.raises(ValueError, match="mine") as caught:
            y.numpy()
        assert "Device.on_plan" in caught.value.__notes__[0]
        end_broken()
        # The batch is queued still.
        assert y.numpy()[0, 0] == 7
        assert got == ["once", "always", "always", "always"]


#: The same graph again and again, on inputs that lie elsewhere each time.
ROOMY = tiny(l1_nbytes=16_384)
F32 = DataType.FLOAT32
L1, DRAM = Layout(F32, Space.L1), Layout(F32, Space.DRAM)
PROGRAMS = tuple(
    compiled.encode()
    for compiled in (
        scaled("in_l1", 2.0, SHAPE, target=ROOMY, placement=IN_L1),
        scaled("in_dram", 0.5, SHAPE, target=ROOMY,
               placement=("input.x.space=dram", "output.y.space=dram")),
        consuming("eat", 0.25, SHAPE, target=ROOMY, placement=("input.x.space=l1",)),
        binary_op("sub", "Sub", SHAPE, target=ROOMY, kind=InputKind.ACTIVATION,
                  placement=("input.x.space=l1", "input.w.space=l1", "output.y.space=l1")),
    )
)  # fmt: skip


def drawn_graph(dice: random.Random) -> tuple[list[Layout], list[tuple[int, tuple[int, int]]]]:
    """Layouts of sources, and tasks: a program and the numbers of two values that it may read."""
    sources = [dice.choice((L1, DRAM)) for _ in range(3)]
    tasks = []
    for number in range(dice.randrange(3, 9)):
        known = range(3 + number)
        tasks.append((dice.randrange(4), (dice.choice(known), dice.choice(known))))
    return sources, tasks


def run_graph(
    programs: list[LoadedProgram],
    tasks: list[tuple[int, tuple[int, int]]],
    values: list[stitch.Tensor],
    truth: list[Array],
) -> None:
    """Queues the tasks; the truth is kept beside every value. What is eaten is gone: None."""
    eaten: set[int] = set()
    for which, wanted in tasks:
        alive = [n for n in range(len(values)) if n not in eaten]
        x, w = (n if n in alive else alive[n % len(alive)] for n in wanted)
        if which == 3:
            values.append(one(programs[3](values[x], values[w])))
            truth.append(truth[x] - truth[w])
        else:
            values.append(one(programs[which](values[x])))
            factor, more = ((2.0, 1.0), (0.5, 1.0), (0.25, 0.0))[which]
            truth.append(truth[x] * np.float32(factor) + np.float32(more))
        if which == 2:
            eaten.add(x)
    for n in sorted(eaten, reverse=True):
        del values[n], truth[n]


@pytest.mark.parametrize("seed", every(4, range(24)))
def test_work_on_inputs_at_other_places_is_not_planned_anew(seed: int) -> None:
    dice = random.Random(seed)
    sources, tasks = drawn_graph(dice)
    with stitch.open_device(ROOMY) as device:
        programs = [device.load(data) for data in PROGRAMS]
        used = {s: u.used_nbytes for s, u in device.memory_use().items()}
        plans, bindings = [], []
        for run in range(6):
            blockers = [
                device.empty(TensorDesc((dice.randrange(1, 20), 8), dice.choice((L1, DRAM))))
                for _ in range(dice.randrange(8))
            ]
            places = list(range(len(sources)))
            dice.shuffle(places)
            lying: dict[int, stitch.Tensor] = {}
            for n in places:
                data = np.full(SHAPE, 1 + n + run, np.float32)
                lying[n] = device.tensor(data).to_layout(sources[n])
                device.run_queue()
                del blockers[: dice.randrange(2)]
            before = device.statistics()
            values = [lying[n] for n in range(len(sources))]
            truth = [np.full(SHAPE, 1 + n + run, np.float32) for n in range(len(sources))]
            lying.clear()
            run_graph(programs, tasks, values, truth)
            device.run_queue()
            after = device.statistics()
            plans.append(after.plans_made - before.plans_made)
            bindings.append(after.bindings_made - before.bindings_made)
            for value, expected in zip(values, truth, strict=True):
                np.testing.assert_array_equal(value.numpy(), expected)
            del values, value, blockers
        assert plans == [1, 0, 0, 0, 0, 0], (plans, bindings)
        device.make_room()
        assert {s: u.used_nbytes for s, u in device.memory_use().items()} == used


def test_a_plan_knows_the_slots_and_constants_of_other_programs_as_a_few_buffers() -> None:
    counts: list[int] = []
    x = np.ones(SHAPE, np.float32)
    with stitch.open_device("host") as device:
        device.on_plan(lambda plan: counts.append(len(plan.request.buffers)))
        programs = []
        for number in range(12):
            programs.append(device.load(scaled(f"p{number}", 2.0 + number, SHAPE, target="host")))
            one(programs[-1](x)).numpy()
    assert counts[-1] == counts[2]


def test_an_error_names_all_buffers_that_one_of_a_plan_stands_for() -> None:
    origins: set[str] = set()
    x = np.ones(SHAPE, np.float32)
    with stitch.open_device("host") as device:
        device.on_plan(lambda plan: origins.update(b.origin for b in plan.request.buffers))
        programs = []
        for number in range(3):
            programs.append(device.load(scaled(f"p{number}", 2.0 + number, SHAPE, target="host")))
            one(programs[-1](x)).numpy()
    assert any("'p0'" in origin and "'p1'" in origin for origin in origins), origins

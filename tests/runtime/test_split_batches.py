"""Long batches that repeat are split: one piece is planned, and results stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.runtime import Event, PlanRun, RuntimeDevice
from tests.support.grids import every
from tests.support.interrupts import interrupt_next_plan
from tests.support.stitched_models import consuming, integers, one, scaled, tiny

F32 = np.float32
SHAPE = integers().shape
HALVED = scaled("halved", 0.5)


def chain(program: stitch.LoadedProgram, start: stitch.Tensor, rounds: int) -> stitch.Tensor:
    for _ in range(rounds):
        start = one(program(start))
    return start


def expected(x: Array, rounds: int) -> Array:
    for _ in range(rounds):
        x = x * F32(0.5) + F32(1)
    return x


def lengths_of_plans(device: RuntimeDevice) -> list[int]:
    """How many tasks each plan has that runs from now on."""
    lengths: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, PlanRun):
            lengths.append(len(event.plan.request.tasks))

    device.events.subscribe(note)
    return lengths


@pytest.mark.parametrize("machine", ["tiny", "host"])
def test_what_is_planned_does_not_grow_with_a_window_that_repeats(machine: str) -> None:
    for rounds in (512, 2048):
        with stitch.open_device(machine, window=4096) as device:
            program = device.load(scaled("halved", 0.5, target=machine))
            lengths, given = lengths_of_plans(device), device.tensor(integers())
            result = chain(program, given, rounds)
            assert result.is_pending
            np.testing.assert_array_equal(result.numpy(), expected(integers(), rounds))
            plans = device.statistics().plans_made
            assert sum(sorted(lengths)[-plans:]) <= plans * 64 <= 256


@pytest.mark.parametrize("machine", ["tiny", "host"])
def test_in_the_steady_state_pieces_are_neither_planned_nor_bound_nor_written(machine: str) -> None:
    with stitch.open_device(machine, window=4096) as device:
        program = device.load(scaled("halved", 0.5, target=machine))
        given, counts = device.tensor(integers()), []
        for turn in range(1, 9):
            result = chain(program, given, 400)
            np.testing.assert_array_equal(result.numpy(), expected(integers(), 400))
            now = device.statistics()
            assert now.batches == turn
            counts.append((now.plans_made, now.bindings_made, now.code_written))
        assert counts[-1] == counts[-2] == counts[-3]


def test_all_results_that_are_held_are_there() -> None:
    with stitch.open_device("host", window=1024, debug=True) as device:
        program = device.load(scaled("halved", 0.5, target="host"))
        held = list[stitch.Tensor]()
        now = device.tensor(integers())
        for _ in range(400):
            now = one(program(now))
            held.append(now)
        for rounds in (0, 17, 63, 64, 200, 399):
            np.testing.assert_array_equal(held[rounds].numpy(), expected(integers(), rounds + 1))


def test_what_is_donated_from_task_to_task_is_handed_on() -> None:
    with stitch.open_device("tiny", window=1024, debug=True) as device:
        eat = device.load(consuming("eat", 0.5))
        for _ in range(3):
            result = chain(eat, device.tensor(integers()).to_layout(eat.input_layout(0)), 300)
            np.testing.assert_array_equal(result.numpy(), integers() * F32(0.5) ** 300)


@pytest.mark.parametrize("where", every(2, [0, 70, 100, 130, 159]))
def test_a_failure_cancels_what_depends_on_it_and_nothing_else(where: int) -> None:
    turns = iter(range(10_000))

    def step(x: Array) -> Array:
        if next(turns) == where:
            raise RuntimeError("stopped here")
        return x + F32(1)

    stepping = stitch.task(returns=stitch.TensorDesc(SHAPE, stitch.program.host_layout(
        stitch.DataType.FLOAT32)))(step)  # fmt: skip
    with stitch.open_device("tiny", window=2048, debug=True) as device:
        program = device.load(HALVED)
        held, beside = list[stitch.Tensor](), list[stitch.Tensor]()
        now, other = device.tensor(integers()), device.tensor(integers())
        for _ in range(160):
            now = device.call(stepping, now)
            other = one(program(other))
            held.append(now)
            beside.append(other)
        with pytest.raises(RuntimeError, match="stopped here"):
            device.flush()
        for rounds in {0, where - 1, where // 2} & set(range(where)):
            np.testing.assert_array_equal(held[rounds].numpy(), integers() + F32(rounds + 1))
        for rounds in {where, 159}:
            with pytest.raises(stitch.TaskError, match="was never made"):
                held[rounds].numpy()
        for rounds in (0, where, 159):
            np.testing.assert_array_equal(beside[rounds].numpy(), expected(integers(), rounds + 1))


def test_after_an_interrupt_between_pieces_the_rest_is_cancelled() -> None:
    left = 200

    def interrupt(context: stitch.runtime.HookContext) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with stitch.open_device("tiny", window=1024, debug=True) as device:
        program = device.load(HALVED)
        result = chain(program, device.tensor(integers()), 400)
        undo = device.hooks.register(before_program=interrupt)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        undo()
        with pytest.raises(stitch.TaskError, match="was never made"):
            result.numpy()
        np.testing.assert_array_equal(
            chain(program, device.tensor(integers()), 400).numpy(), expected(integers(), 400)
        )


def test_after_an_interrupt_before_anything_ran_all_of_it_is_queued() -> None:
    with stitch.open_device("tiny", window=1024, debug=True) as device:
        result = chain(device.load(HALVED), device.tensor(integers()), 400)
        interrupt_next_plan(device)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        assert result.is_pending
        np.testing.assert_array_equal(result.numpy(), expected(integers(), 400))


def test_where_room_may_be_scarce_a_window_is_planned_as_a_whole() -> None:
    machine = tiny(l1_nbytes=4096)
    placement = ("input.x.space=l1", "output.y.space=l1")
    compiled = scaled("halved", 0.5, target=machine, placement=placement)
    with stitch.open_device(machine, window=1024, debug=True) as device:
        lengths, program = lengths_of_plans(device), device.load(compiled)
        for _ in range(2):
            held, now = list[stitch.Tensor](), device.tensor(integers())
            for _ in range(200):
                now = one(program(now))
                held.append(now)
            for rounds in (0, 100, 199):
                wanted = expected(integers(), rounds + 1)
                np.testing.assert_array_equal(held[rounds].numpy(), wanted)
            assert min(lengths) == 200


def test_a_call_that_a_host_function_queues_runs_after_all_pieces() -> None:
    with stitch.open_device("tiny", window=1024) as device:
        program, order = device.load(HALVED), list[str]()

        def first() -> None:
            device.call(stitch.task(lambda: order.append("queued inside")))

        now = device.tensor(integers())
        device.call(stitch.task(first))
        note = stitch.task(lambda: order.append("part"))
        for _ in range(200):
            now = one(program(now))
            device.call(note)
        device.flush()
        assert order == 200 * ["part"] + ["queued inside"]

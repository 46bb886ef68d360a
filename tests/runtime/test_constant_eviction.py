"""Eviction of constants: no bytes are written, and the file provides them again at the next run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

import stitch
from stitch.cli.device_costs import copies_inside, planned_copies
from stitch.graph import ComputationGraphBuilder
from stitch.planner import Copy, Plan
from stitch.program import Array, DataType, Layout, Ownership, Space
from tests.support.faults import Fuse, Planted, lay
from tests.support.grids import every
from tests.support.stitched_models import held_by, integers, model, one, tiny

#: DRAM takes 4,096 bytes in each of two banks.
MACHINE = tiny(dram_nbytes=4096)
IN_DRAM = Layout(DataType.FLOAT32, Space.DRAM)
WIDTH = 32


def table(rows: int, seed: int) -> Array:
    drawn: Array = np.random.default_rng(seed).integers(-3, 4, (rows, WIDTH)).astype(np.float32)
    return drawn


def holding(name: str, rows: int, seed: int) -> stitch.CompiledModel:
    """y = x and a table of so many rows, 64 bytes per bank each, as products."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2, rows), "float32")
        b.output("y", x @ b.constant(table(rows, seed)))

    return model(name, build, target=MACHINE)


def comes(plan: Plan, of: str) -> list[Copy]:
    """The steps of a plan by which constants of a program come from the file."""
    return [s for s in plan.steps if isinstance(s, Copy)
            and s.reason.startswith("input 'constant ") and f" of '{of}' " in s.reason]  # fmt: skip


def loads(device: stitch.Device, of: str) -> int:
    """How often constants of a program came from the file."""
    return sum(runs * len(comes(plan, of)) for plan, runs in device.account().plans)


def placed(device: stitch.Device, count: int, rows: int) -> list[stitch.Tensor]:
    """Tensors in DRAM of so many rows, 64 bytes per bank each."""
    arrays = [np.full((rows, WIDTH), i + 1, np.float32) for i in range(count)]
    tensors = [device.to_layout(device.tensor(array), IN_DRAM) for array in arrays]
    device.flush()
    return tensors


@pytest.mark.parametrize("window", [1, 8, 64])
def test_constants_that_do_not_fit_together_are_evicted_in_turn(window: int) -> None:
    a, b = holding("a", 40, 1), holding("b", 48, 2)
    x, y = integers((2, 40)), integers((2, 48))
    with stitch.open_device(MACHINE, debug=True, window=window) as device:
        first, second = device.load(a), device.load(b)
        plans = []
        for _ in range(6):
            made = one(first(x)), one(second(y))
            np.testing.assert_array_equal(made[0].numpy(), x @ table(40, 1))
            np.testing.assert_array_equal(made[1].numpy(), y @ table(48, 2))
            plans.append(device.statistics().plans_made)
        assert (loads(device, "a"), loads(device, "b")) == (5, 6)
        assert "evict" not in device.explain()
        assert plans[3:] == plans[3:4] * 3, "the same rounds run again"


def test_a_constant_goes_before_a_tensor_that_costs_more() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        program, x = device.load(holding("small", 8, 1)), integers((2, 8))
        held = placed(device, 1, 48)
        more = placed(device, 1, 12)
        assert "evict" not in device.explain(), "512 bytes of the file make room"
        assert held[0].layout.space is more[0].layout.space is Space.DRAM
        np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(8, 1))
        assert loads(device, "small") == 1


def test_a_tensor_goes_before_a_constant_that_costs_more() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        program, x = device.load(holding("large", 48, 1)), integers((2, 48))
        made = one(program(x))
        held = [*placed(device, 2, 4), *placed(device, 1, 10)]
        assert {t.layout.space for t in held} == {Space.DRAM, Space.HOST}
        np.testing.assert_array_equal(made.numpy(), x @ table(48, 1))
        one(program(x)).numpy()
        assert loads(device, "large") == 0


def test_a_constant_is_evicted_for_a_fixed_address() -> None:
    dram = MACHINE.shape.dram
    assert dram is not None

    def doubled(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (8, WIDTH), "float32")
        b.output("y", b.op("Add", x, x))

    placement = ["output.y.space=dram", f"output.y.address={dram.limit - 512}"]
    names = model("names", doubled, target=MACHINE, placement=placement)
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        there, x = device.load(holding("there", 16, 1)), integers((2, 16))
        program, given = device.load(names), integers((8, WIDTH))
        for _ in range(3):
            y = one(program(given))
            np.testing.assert_array_equal(y.numpy(), given + given)
            np.testing.assert_array_equal(one(there(x)).numpy(), x @ table(16, 1))
        assert y.layout.address == dram.limit - 512
        assert loads(device, "there") <= 1


@pytest.mark.parametrize("seed", every(4, range(12)))
def test_random_runs_in_a_crowded_dram_with_failures_are_right(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, fuse = Random(seed), Fuse()
    lay(monkeypatch, fuse)
    with stitch.open_device(MACHINE, debug=True, window=draw.choice([1, 3, 64])) as device:
        rows = [draw.choice([8, 16, 24, 40, 48]) for _ in range(4)]
        programs = [device.load(holding(f"p{i}", n, i)) for i, n in enumerate(rows)]
        held: list[tuple[stitch.Tensor, Array]] = []
        failed = 0
        for _ in range(60):
            if draw.random() < 0.1:
                fuse.left = draw.randrange(12)
            try:
                if draw.random() < 0.6:
                    i = draw.randrange(len(rows))
                    x = integers((2, rows[i]), draw.randrange(50))
                    held.append((one(programs[i](x)), x @ table(rows[i], i)))
                else:
                    array = integers((draw.randrange(1, 24), WIDTH), draw.randrange(50))
                    held.append((device.to_layout(device.tensor(array), IN_DRAM), array))
                if draw.random() < 0.5:
                    device.flush()
            except Planted:
                failed += 1
            while len(held) > draw.randrange(3, 9):
                tensor, expected = held.pop(draw.randrange(len(held)))
                try:
                    np.testing.assert_array_equal(tensor.numpy(), expected)
                except (Planted, stitch.TaskError):
                    failed += 1
        fuse.left = None
        for i, program in enumerate(programs):
            x = integers((2, rows[i]), 3)
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(rows[i], i))
        assert any(loads(device, f"p{i}") for i in range(4))
        assert failed


@pytest.mark.parametrize("data_type", ["bfloat16", "float32"])
def test_constants_with_padding_leave_and_move_as_tensors_do(data_type: str) -> None:
    def times(drawn: Array) -> Callable[[ComputationGraphBuilder], None]:
        def build(b: ComputationGraphBuilder) -> None:
            x = b.input("x", (60, 10), data_type)
            b.output("y", x * b.cast(b.constant(drawn), data_type))

        return build

    tables = [integers((60, 10), i) for i in range(6)]
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        models = [model(f"p{i}", times(t), target=MACHINE) for i, t in enumerate(tables)]
        programs = list(map(device.load, models))
        for program, drawn in zip(programs * 3, tables * 3, strict=True):
            y = one(program(np.ones((60, 10), DataType(data_type).dtype))).numpy()
            np.testing.assert_array_equal(y.astype(np.float32), drawn)
        assert sum(loads(device, f"p{i}") for i in range(6)) > 4


def adding(name: str, seed: int) -> stitch.CompiledModel:
    """y = x + a table of 20 rows, in place of x."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (20, WIDTH), "float32", ownership=Ownership.DONATE)
        b.output("y", b.op("Add", x, b.constant(table(20, seed))))

    placement = ["input.x.space=dram", "output.y.space=dram"]
    return model(name, build, target=MACHINE, placement=placement)


def test_donated_tensors_are_overwritten_while_constants_are_evicted() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        programs = [device.load(adding(f"p{i}", i)) for i in range(3)]
        h, expected = placed(device, 1, 20)[0], np.ones((20, WIDTH), np.float32)
        for i in (0, 1, 2, 0, 1, 2):
            h = one(programs[i](h))
            expected = expected + table(20, i)
            device.flush()
        assert h.layout.space is Space.DRAM
        np.testing.assert_array_equal(h.numpy(), expected)
        assert sum(loads(device, f"p{i}") for i in range(3)) >= 3


def crowded() -> tuple[stitch.Device, list[stitch.LoadedProgram]]:
    """A device in which one constant of two has its place."""
    device = stitch.open_device(MACHINE, debug=True)
    return device, [device.load(holding(f"p{i}", 40, i)) for i in range(2)]


def test_a_failure_at_any_step_while_constants_are_loaded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fuse, x = Fuse(), integers((2, 40))
    lay(monkeypatch, fuse)
    device, programs = crowded()
    before = fuse.count
    one(programs[1](x)).numpy()
    places = fuse.count - before
    device.close()
    assert places > 1
    for place in range(places):
        device, programs = crowded()
        held = placed(device, 1, 16)[0]
        fuse.left = place
        with pytest.raises(Planted):
            one(programs[1](x)).numpy()
        np.testing.assert_array_equal(held.numpy(), np.ones((16, WIDTH)))
        for i in (0, 1, 0, 1):
            np.testing.assert_array_equal(one(programs[i](x)).numpy(), x @ table(40, i))
        del held
        programs.clear()
        gc.collect()
        assert held_by(device) == [], place
        device.close()


def test_constants_from_the_file_are_not_counted_as_inputs() -> None:
    with stitch.open_device(MACHINE, window=1) as device:
        first, second = device.load(holding("a", 40, 1)), device.load(holding("b", 48, 2))
        for _ in range(3):
            one(first(integers((2, 40)))).numpy()
            one(second(integers((2, 48)))).numpy()
        total = device.account().total
        assert total.entries == 6, "an array for each run"
        assert total.copies - total.entries >= loads(device, "a") + loads(device, "b") == 5
        assert sum(line.times for line in copies_inside(device)) >= 5
        assert planned_copies(device) >= 1


def test_forbidden_copies_of_an_evicted_constant_are_named() -> None:
    with stitch.open_device(MACHINE, window=1) as device:
        first, second = device.load(holding("a", 40, 1)), device.load(holding("b", 48, 2))
        x = device.to_layout(device.tensor(integers((2, 40))), first.input_layout("x"))
        one(first(x)).numpy()
        one(second(integers((2, 48)))).numpy()
        with (
            pytest.raises(stitch.TaskError, match="room for the constants of all"),
            stitch.forbid_copies(device),
        ):
            one(first(x)).numpy()


def test_loading_without_spilling_names_program_and_reason() -> None:
    with stitch.open_device(MACHINE, spill=False) as device:
        kept = device.load(holding("a", 40, 1))
        with pytest.raises(stitch.OutOfMemoryError, match=r"(?s)loading 'b'.*spill=False.*turns"):
            device.load(holding("b", 48, 2))
        np.testing.assert_array_equal(
            one(kept(integers((2, 40)))).numpy(), integers((2, 40)) @ table(40, 1)
        )

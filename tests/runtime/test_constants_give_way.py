"""Constants lie in their program's file: where memory is short they give way without a byte, and
come back from the file when their program runs; what costs less than that gives way before."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import stitch
from stitch.cli.device_costs import copies_inside, planned_copies
from stitch.graph import ComputationGraphBuilder
from stitch.planner import Copy, Plan, check_plan
from stitch.program import Array, DataType, Layout, Ownership, Space
from stitch.report import ChromeTrace, Recorder, read_record, replay
from tests.support import plans_that_ran
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
def test_constants_that_do_not_fit_together_take_turns(window: int) -> None:
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


def test_a_recording_notices_that_its_constants_are_gone_and_that_they_are_back() -> None:
    with stitch.open_device(MACHINE, debug=True) as device:
        program, x = device.load(holding("a", 40, 1)), integers((2, 40))
        for _ in range(4):
            one(program(x)).numpy()
        plans = device.statistics().plans_made
        held = placed(device, 1, 60)
        assert device.statistics().plans_made > plans and loads(device, "a") == 0
        np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert loads(device, "a") == 1 and held[0].layout.space is Space.HOST
        plans = device.statistics().plans_made
        for _ in range(4):
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert loads(device, "a") == 1
        assert device.statistics().plans_made <= plans + 1
        np.testing.assert_array_equal(held[0].numpy(), np.ones((60, WIDTH)))


def test_what_is_loaded_into_a_full_space_comes_when_it_runs() -> None:
    with stitch.open_device(MACHINE, debug=True) as device:
        held = placed(device, 1, 60)
        program, x = device.load(holding("late", 40, 1)), integers((2, 40))
        assert held[0].layout.space is Space.DRAM
        np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert loads(device, "late") == 1


def test_memory_that_nobody_uses_is_taken_before_the_room_of_constants() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        first, x = device.load(holding("first", 20, 1)), integers((2, 20))
        held = placed(device, 1, 30)
        late = device.load(holding("late", 20, 2))
        held.clear()
        placed(device, 1, 30)
        assert device.memory_report().count("constant 'constant'") == 1
        for program, seed in ((late, 2), (first, 1), (late, 2)):
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(20, seed))
        assert (loads(device, "first"), loads(device, "late")) == (0, 1)


def test_a_constant_gives_way_to_what_a_program_names() -> None:
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


def test_where_nothing_may_spill_constants_stay() -> None:
    with stitch.open_device(MACHINE, debug=True, spill=False, window=1) as device:
        program, x = device.load(holding("a", 40, 1)), integers((2, 40))
        with pytest.raises(stitch.OutOfMemoryError, match="dram cannot hold"):
            placed(device, 1, 60)
        with pytest.raises(stitch.OutOfMemoryError, match="no hole of"):
            device.load(holding("b", 40, 2))
        np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert loads(device, "a") == 0


def test_dropped_programs_leave_nothing_wherever_their_constants_lay() -> None:
    with stitch.open_device(MACHINE, debug=True) as device:
        programs = [device.load(holding(f"p{i}", 40, i)) for i in range(3)]
        for program in programs:
            one(program(integers((2, 40)))).numpy()
        assert any("constant" in held for held in held_by(device))
        programs.clear()
        del program
        gc.collect()
        device.wait()
        assert held_by(device) == []


def test_the_checker_asks_where_each_constant_lies() -> None:
    plans_that_ran.taken()
    with stitch.open_device(MACHINE, debug=True) as device:
        programs = [device.load(holding(f"p{i}", 40, i)) for i in range(2)]
        for program in programs:
            one(program(integers((2, 40)))).numpy()
    plan = next(p for p in plans_that_ran.taken() if comes(p, "p1"))
    (step,) = comes(plan, "p1")
    assert check_plan(plan) == ()
    without = replace(plan, steps=tuple(s for s in plan.steps if s is not step))
    assert any(problem.kind == "content" for problem in check_plan(without))


def test_records_and_traces_tell_of_constants_that_come_and_go() -> None:
    x = integers((2, 40))
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        trace, recorder = ChromeTrace(device), Recorder(device)
        programs = [device.load(holding(f"p{i}", 40, i)) for i in range(2)]
        for program in (*programs, *programs):
            one(program(x)).numpy()
        record = recorder.text()
        assert "constant" in json.dumps(trace.as_json())
    assert replay(record).runs == 4
    assert [problem for plan in read_record(record).plans.values()
            for problem in check_plan(plan)] == []  # fmt: skip


@pytest.mark.parametrize("seed", every(4, range(12)))
def test_programs_run_anyhow_where_little_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, tensors and results crowd DRAM; some runs fail at any step. Every result that is
    there is right, and the records are those of what lies there."""
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


@pytest.mark.parametrize("executor", ["numpy", "null"])
def test_three_programs_of_which_two_fit_take_turns_whatever_computes(executor: str) -> None:
    names = ("a", "b", "c")
    with stitch.open_device(MACHINE, debug=True, window=1, executor=executor) as device:
        programs = [device.load(holding(name, 30, i)) for i, name in enumerate(names)]
        assert device.memory_report().count("constant 'constant'") == 2
        for _ in range(5):
            for i, program in enumerate(programs):
                y = one(program(integers((2, 30))))
                device.flush()
                assert f"B  constant 'constant' of '{names[i]}'" in device.memory_report()
                if executor == "numpy":
                    np.testing.assert_array_equal(y.numpy(), integers((2, 30)) @ table(30, i))
        assert 5 <= sum(loads(device, name) for name in names) <= 13


def test_a_constant_that_is_read_by_each_task_stays_and_a_result_that_is_read_late_leaves() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        program, x = device.load(holding("often", 40, 1)), integers((2, 40))
        late = placed(device, 1, 12)[0]
        for i in range(6):
            fresh = placed(device, 1, 16)[0]
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
            assert fresh.layout.space is Space.DRAM, i
            del fresh
        assert loads(device, "often") == 0 and late.layout.space is Space.HOST
        np.testing.assert_array_equal(late.numpy(), np.ones((12, WIDTH)))


def test_programs_with_equal_tables_do_not_take_turns() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        programs = [device.load(holding(name, 40, 1)) for name in "ab"]
        x = integers((2, 40))
        for program in programs * 3:
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert (loads(device, "a"), loads(device, "b")) == (0, 0)


def test_bytes_that_are_exported_stay_where_constants_take_turns() -> None:
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        held = placed(device, 1, 20)[0]
        exported = np.from_dlpack(held)
        where = exported.ctypes.data
        programs = [device.load(holding(name, 40, i)) for i, name in enumerate("ab")]
        x = integers((2, 40))
        for i in (0, 1, 0, 1):
            np.testing.assert_array_equal(one(programs[i](x)).numpy(), x @ table(40, i))
        assert held.layout.space is Space.DRAM and exported.ctypes.data == where
        np.testing.assert_array_equal(exported, np.ones((20, WIDTH)))


@pytest.mark.parametrize("data_type", ["bfloat16", "float32"])
def test_constants_with_padding_leave_and_move_as_tensors_do(data_type: str) -> None:
    """Rows of 10 numbers: debug mode looks at the bytes between them where they leave."""

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


def test_what_is_given_away_is_overwritten_while_constants_take_turns() -> None:
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


def test_a_run_that_stops_anywhere_while_constants_come_leaves_all_as_it_was(
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


def test_what_comes_from_a_file_is_no_input_on_its_way_in() -> None:
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


def test_where_copies_are_forbidden_a_constant_that_is_away_is_told_apart() -> None:
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


def test_where_nothing_may_leave_loading_says_what_it_was_and_why() -> None:
    with stitch.open_device(MACHINE, spill=False) as device:
        kept = device.load(holding("a", 40, 1))
        with pytest.raises(stitch.OutOfMemoryError, match=r"(?s)loading 'b'.*spill=False.*turns"):
            device.load(holding("b", 48, 2))
        np.testing.assert_array_equal(
            one(kept(integers((2, 40)))).numpy(), integers((2, 40)) @ table(40, 1)
        )

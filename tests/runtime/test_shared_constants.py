"""Constants lie on a device once, however many programs and values of a binary they are."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.machine import footprint
from stitch.planner import check_plan
from stitch.program import Space
from stitch.ttb import Binary, encode, inspect_sizes, load
from tests.support.stitched_models import held_by, integers, model, one, tiny, together

#: DRAM takes 4,096 bytes in each of two banks.
MACHINE = tiny(dram_nbytes=4096)
WIDTH = 32


def holding(name: str, rows: int, seed: int, factor: float = 1.0) -> stitch.CompiledModel:
    """y = factor * x @ a table of so many rows, 64 bytes per bank each."""
    drawn = np.random.default_rng(seed).integers(-3, 4, (rows, WIDTH)).astype(np.float32)

    def build(b: ComputationGraphBuilder) -> None:
        b.output("y", (b.input("x", (2, rows), "float32") @ b.constant(drawn)) * factor)

    return model(name, build, target=MACHINE)


def _read(*models: stitch.CompiledModel) -> Binary:
    """The programs of several models as one file holds them: equal constants are one segment."""
    return load(encode(together(*models)))


def _tables(device: stitch.Device, rows: int) -> int:
    """How many tables of so many rows lie in DRAM."""
    device.drain()
    size = footprint(_desc(rows), device.machine.shape).size_per_bank
    return sum(found == size for _, found, _ in device.memory_use()[Space.DRAM].buffers)


def _desc(rows: int) -> stitch.TensorDesc:
    program = holding("m", rows, 1).binary.programs[0]
    value = next(
        c.value for c in program.constants if program.values[c.value].type.shape[0] == rows
    )
    return program.values[value].desc


def test_programs_of_one_binary_share_what_they_both_read() -> None:
    binary = _read(holding("a", 40, 1), holding("b", 40, 1, 2.0))
    x = integers((2, 40))
    with stitch.open_device(MACHINE, debug=True) as device:
        a, b = device.load(binary, "a"), device.load(binary, "b")
        again = device.load(binary, "a")
        assert _tables(device, 40) == 1
        for _ in range(4):  # They fit together, and so nobody takes turns.
            once, twice, third = one(a(x)), one(b(x)), one(again(x))
            np.testing.assert_array_equal(once.numpy() * 2, twice.numpy())
            np.testing.assert_array_equal(once.numpy(), third.numpy())
        assert "from the file" not in device.explain() and "constant" not in device.explain()
        del a, again
        gc.collect()
        assert _tables(device, 40) == 1
        np.testing.assert_array_equal(one(b(x)).numpy(), twice.numpy())
        del b, once, twice, third
        gc.collect()
        assert held_by(device) == [] and device.records.constants == {}
        np.testing.assert_array_equal(one(device.load(binary, "b")(x)).shape, (2, WIDTH))


def test_binaries_read_apart_share_what_is_equal(tmp_path: Path) -> None:
    compiled = holding("a", 20, 1)
    compiled.save(tmp_path / "a.ttb")
    with stitch.open_device(MACHINE) as device:
        first, second = (device.load(tmp_path / "a.ttb") for _ in range(2))
        third, fourth = (device.load(compiled) for _ in range(2))
        assert _tables(device, 20) == 1
        x = integers((2, 20))
        found = [one(each(x)).numpy() for each in (first, second, third, fourth)]
        assert all(np.array_equal(found[0], other) for other in found)


def test_a_program_linked_to_itself_has_its_constants_once() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        drawn = np.eye(WIDTH, dtype=np.float32)[::-1].copy()
        b.output("y", b.input("x", (2, WIDTH), "float32") @ b.constant(drawn) + 1.0)

    turn = model("turn", build, target=MACHINE)
    linked = stitch.link([turn.encode()] * 8)
    assert len(linked.program.constants) == len(turn.binary.programs[0].constants)
    assert len(inspect_sizes(linked.binary).segments) == len(linked.program.constants)
    with stitch.open_device(MACHINE, debug=True) as device:
        program = device.load(linked)
        assert _tables(device, WIDTH) == 1
        x = integers((2, WIDTH))
        np.testing.assert_array_equal(one(program(x)).numpy(), x + 8)


def test_a_file_that_names_a_segment_twice_has_it_on_the_device_once() -> None:
    drawn = np.arange(20 * WIDTH, dtype=np.float32).reshape(20, WIDTH)

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (20, WIDTH), "float32")
        b.output("y", (x + b.parameter("v", drawn)) * b.parameter("w", drawn + 1))

    compiled = model("both", build, target=MACHINE, placement=["output.y.space=dram"])
    program = compiled.binary.programs[0]
    assert len(program.constants) == 2
    equal = tuple(replace(c, data=drawn.copy()) for c in program.constants)
    binary = replace(compiled.binary, programs=(replace(program, constants=equal),))
    with stitch.open_device(MACHINE, debug=True) as device:
        loaded = device.load(encode(binary))
        assert _tables(device, 20) == 1
        x, held = integers((20, WIDTH)), []
        for _ in range(6):  # Then there is no room for all that is held.
            held.append(one(loaded(x)))
            np.testing.assert_array_equal(held[-1].numpy(), (x + drawn) * drawn)
        assert "evict" in device.explain() or "constant" in device.explain()
        assert [check_plan(plan) for plan, _ in device.account().plans] == [()] * len(
            device.account().plans
        )


def test_what_is_shared_gives_way_and_comes_back_for_all() -> None:
    binary = _read(holding("a", 40, 1), holding("b", 40, 1, 2.0), holding("other", 48, 2))
    x, y = integers((2, 40)), integers((2, 48))
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        a, b, other = (device.load(binary, name) for name in ("a", "b", "other"))
        expected = one(a(x)).numpy()
        for _ in range(4):
            one(other(y)).numpy()
            assert _tables(device, 40) == 0
            np.testing.assert_array_equal(one(b(x)).numpy(), expected * 2)
            assert _tables(device, 40) == 1
            plans = len(device.account().plans)
            np.testing.assert_array_equal(one(a(x)).numpy(), expected)
            assert _tables(device, 40) == 1 and plans
        one(other(y)).numpy()
        late = device.load(binary, "a")
        np.testing.assert_array_equal(one(late(x)).numpy(), expected)
        del a, b, late
        gc.collect()
        assert _tables(device, 40) == 0


def test_a_load_that_fails_leaves_what_others_hold() -> None:
    binary = _read(holding("a", 40, 1), holding("b", 40, 1, 2.0))
    wide = _read(holding("a", 40, 3), _two_tables())
    x = integers((2, 40))
    with stitch.open_device(MACHINE, debug=True, spill=False) as device:
        a = device.load(binary, "a")
        expected = one(a(x)).numpy()
        with pytest.raises(stitch.OutOfMemoryError):
            device.load(wide, "both")
        np.testing.assert_array_equal(one(a(x)).numpy(), expected)
        assert _tables(device, 40) == 1
        b = device.load(binary, "b")
        np.testing.assert_array_equal(one(b(x)).numpy(), expected * 2)


def _two_tables() -> stitch.CompiledModel:
    drawn = np.random.default_rng(3).integers(-3, 4, (40, WIDTH)).astype(np.float32)

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2, 40), "float32")
        b.output("y", x @ b.constant(drawn))
        b.output("z", x[:, :10] @ b.constant(np.ones((10, WIDTH), np.float32)))

    return model("both", build, target=MACHINE)

"""Equal constants, of one file or of several, lie on a device once while a program reads them."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.planner import check_plan
from stitch.program import Array, Space
from stitch.report import ChromeTrace, Recorder, read_record, replay
from stitch.ttb import Binary, encode, inspect_sizes, load
from tests.support.stitched_models import held_by, integers, model, one, tiny, together

#: DRAM takes 4,096 bytes in each of two banks.
MACHINE = tiny(dram_nbytes=4096)
WIDTH = 32


def table(rows: int, seed: int) -> Array:
    drawn: Array = np.random.default_rng(seed).integers(-3, 4, (rows, WIDTH)).astype(np.float32)
    return drawn


def holding(name: str, *tables: Array) -> stitch.CompiledModel:
    """A product for each of the tables, of 64 bytes per bank a row, with as many numbers of x."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (2, len(tables[0])), "float32")
        for i, drawn in enumerate(tables):
            b.output(f"y{i}", x[:, : len(drawn)] @ b.parameter(f"w{i}", drawn))

    return model(name, build, target=MACHINE)


def read(*compiled: stitch.CompiledModel) -> list[Binary]:
    """Each as its own file holds it."""
    return [load(each.encode()) for each in compiled]


def constants(device: stitch.Device) -> list[str]:
    """What lies in DRAM and is a constant, as the memory report calls it."""
    device.drain()
    found = device.memory_use()[Space.DRAM].buffers
    return [origin for _, _, origin in found if origin.startswith("constant")]


def at(compiled: stitch.CompiledModel, address: int) -> stitch.CompiledModel:
    """The same, with its constant at a fixed address."""
    (program,) = compiled.binary.programs
    values = list(program.values)
    value = values[program.constants[0].value]
    assert value.layout is not None
    values[program.constants[0].value] = replace(
        value, layout=replace(value.layout, address=address)
    )
    binary = replace(compiled.binary, programs=(replace(program, values=tuple(values)),))
    return replace(compiled, binary=binary)


def test_equal_constants_of_two_files_are_stored_once_and_reported_with_their_readers() -> None:
    first, second = read(holding("a", table(40, 1)), holding("b", table(40, 1)))
    with stitch.open_device(MACHINE, debug=True) as device:
        a, b = device.load(first), device.load(second)
        assert constants(device) == ["constant 'w0' of 'a', shared by 'b'"]
        assert "constant 'w0' of 'a', shared by 'b'" in device.memory_report()
        x = integers((2, 40))
        for program in (a, b, a, b):
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(40, 1))
        assert "constant" not in device.explain(), "both fit, and so nobody takes turns"


def test_the_address_of_a_dropped_files_bytes_is_not_taken_for_its_constant() -> None:
    kept, gone = read(holding("kept", table(20, 1)), holding("gone", table(20, 1)))
    with stitch.open_device(MACHINE, debug=True) as device:
        first, second = device.load(kept), device.load(gone)
        assert constants(device) == ["constant 'w0' of 'kept', shared by 'gone'"]
        del second, gone
        gc.collect()
        assert constants(device) == ["constant 'w0' of 'kept'"]
        x = integers((2, 20))
        np.testing.assert_array_equal(one(first(x)).numpy(), x @ table(20, 1))


def test_constants_that_differ_in_bytes_or_form_are_two() -> None:
    files = read(holding("a", table(20, 1)), holding("b", table(20, 2)))
    turned = model(
        "c",
        lambda b: b.output("y", b.input("x", (2, 32), "float32") @ b.constant(
            table(20, 1).reshape(32, 20))),
        target=MACHINE,
    )  # fmt: skip
    with stitch.open_device(MACHINE, debug=True) as device:
        held = [device.load(each) for each in (*files, turned)]
        assert len(constants(device)) == len(held) == 3
        assert "shared" not in device.memory_report()


@pytest.mark.parametrize(("address", "count"), [(0, 1), (1024, 2)])
def test_constants_with_fixed_addresses_are_shared_where_these_agree(
    address: int, count: int
) -> None:
    dram = MACHINE.shape.dram
    assert dram is not None
    first = at(holding("a", table(8, 1)), dram.base)
    second = at(holding("b", table(8, 1)), dram.base + address)
    with stitch.open_device(MACHINE, debug=True) as device:
        programs = [device.load(each) for each in read(first, second)]
        assert len(constants(device)) == count
        x = integers((2, 8))
        for program in programs:
            np.testing.assert_array_equal(one(program(x)).numpy(), x @ table(8, 1))


@pytest.mark.parametrize("file_first", [False, True])
def test_a_file_and_what_was_compiled_here_share(file_first: bool) -> None:
    made = holding("a", table(20, 1), table(8, 2))
    pair: list[stitch.CompiledModel | Binary] = [made, load(made.encode())]
    with stitch.open_device(MACHINE, debug=True) as device:
        programs = [device.load(each) for each in (pair[::-1] if file_first else pair)]
        assert all(each.endswith("of 'a', shared by 'a'") for each in constants(device))
        assert len(constants(device)) == len(made.program.constants)
        programs.clear()
        gc.collect()
        device.drain()
        assert constants(device) == []


def test_damaged_bytes_are_not_shared_and_fail_when_read() -> None:
    compiled = holding("a", table(20, 1)), holding("b", table(20, 1))
    damaged = bytearray(encode(compiled[1].binary))
    damaged[-1] ^= 1
    with stitch.open_device(MACHINE, debug=True) as device:
        a, b = device.load(compiled[0].encode()), device.load(bytes(damaged))
        assert len(constants(device)) == 2
        x = integers((2, 20))
        np.testing.assert_array_equal(one(a(x)).numpy(), x @ table(20, 1))
        with pytest.raises(stitch.FormatError, match="CRC-32"):
            one(b(x)).numpy()


def test_each_program_reads_its_own_file(tmp_path: Path) -> None:
    for name in "ab":
        holding(name, table(20, 1)).save(tmp_path / f"{name}.ttb")
    with stitch.open_device(MACHINE, debug=True) as device:
        a, b = (device.load(tmp_path / f"{name}.ttb") for name in "ab")
        assert len(constants(device)) == 1
        x = integers((2, 20))
        one(a(x)).numpy()
        with (tmp_path / "a.ttb").open("r+b") as file:
            file.seek(-20 * WIDTH * 4, 2)
            file.write(bytes(20 * WIDTH * 4))
        np.testing.assert_array_equal(one(b(x)).numpy(), x @ table(20, 1))


def test_a_failed_load_releases_what_it_shares() -> None:
    files = read(
        holding("a", table(40, 1)), holding("b", table(8, 2)),
        holding("c", table(40, 1), table(20, 3)),
    )  # fmt: skip
    with stitch.open_device(MACHINE, debug=True, spill=False) as device:
        a, b = device.load(files[0]), device.load(files[1])
        with pytest.raises(stitch.OutOfMemoryError):
            device.load(files[2])
        assert sorted(constants(device)) == ["constant 'w0' of 'a'", "constant 'w0' of 'b'"]
        assert b.name == "b"
        x = integers((2, 40))
        np.testing.assert_array_equal(one(a(x)).numpy(), x @ table(40, 1))


def test_shared_constants_are_evicted_and_loaded_again_in_plans_records_and_traces() -> None:
    a, b, other = read(
        holding("a", table(40, 1)), holding("b", table(40, 1)), holding("other", table(48, 2))
    )
    x, y = integers((2, 40)), integers((2, 48))
    with stitch.open_device(MACHINE, debug=True, window=1) as device:
        trace, recorder = ChromeTrace(device), Recorder(device)
        first, second, third = map(device.load, (a, b, other))
        for _ in range(4):
            np.testing.assert_array_equal(one(first(x)).numpy(), x @ table(40, 1))
            np.testing.assert_array_equal(one(second(x)).numpy(), x @ table(40, 1))
            assert constants(device) == ["constant 'w0' of 'a', shared by 'b'"]
            np.testing.assert_array_equal(one(third(y)).numpy(), y @ table(48, 2))
        assert trace.as_json() and (record := recorder.text())
        plans = [plan for plan, _ in device.account().plans]
        assert [check_plan(plan) for plan in plans] == [()] * len(plans)
    assert replay(record).runs == 12
    assert [p for plan in read_record(record).plans.values() for p in check_plan(plan)] == []


def test_training_weights_that_were_equal_to_a_constant_leaves_it_as_it_is() -> None:
    drawn = np.eye(WIDTH, dtype=np.float32)

    def build(b: ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", (2, WIDTH), "float32") @ b.parameter("w", drawn))

    builder = ComputationGraphBuilder("net")
    build(builder)
    loss, optimizer = stitch.losses.MSELoss(), stitch.SGD(lr=0.5)
    trained = stitch.compile(builder.build(), target="tiny", loss=loss, optimizer=optimizer)
    x = integers((2, WIDTH))
    with stitch.open_device("tiny", debug=True) as device:
        fixed = device.load(load(model("fixed", build).encode()))
        twin = device.load(load(model("twin", build).encode()))
        instance = trained.start(device)
        loss(instance(x), np.zeros((2, WIDTH), np.float32)).backward()
        optimizer.step()
        assert not np.array_equal(np.asarray(instance.state_dict()["w"]), drawn)
        for program in (fixed, twin):
            np.testing.assert_array_equal(one(program(x)).numpy(), x)
        instance.close()


def test_programs_of_one_binary_share_what_they_both_read() -> None:
    binary = load(encode(together(holding("a", table(40, 1)), holding("b", table(40, 1)))))
    x = integers((2, 40))
    with stitch.open_device(MACHINE, debug=True) as device:
        a, b = device.load(binary, "a"), device.load(binary, "b")
        again = device.load(binary, "a")
        assert len(constants(device)) == 1
        for _ in range(4):  # They fit together, and so nobody takes turns.
            once, twice, third = one(a(x)), one(b(x)), one(again(x))
            np.testing.assert_array_equal(once.numpy(), twice.numpy())
            np.testing.assert_array_equal(once.numpy(), third.numpy())
        assert "from the file" not in device.explain() and "constant" not in device.explain()
        del a, again
        gc.collect()
        assert len(constants(device)) == 1
        np.testing.assert_array_equal(one(b(x)).numpy(), twice.numpy())
        del b, once, twice, third
        gc.collect()
        assert held_by(device) == []
        np.testing.assert_array_equal(one(device.load(binary, "b")(x)).shape, (2, WIDTH))


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
        assert len(constants(device)) == len(linked.program.constants)
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
        assert len(constants(device)) == 1
        x, held = integers((20, WIDTH)), []
        for _ in range(6):  # Then there is no room for all that is held.
            held.append(one(loaded(x)))
            np.testing.assert_array_equal(held[-1].numpy(), (x + drawn) * drawn)
        assert "evict" in device.explain() or "constant" in device.explain()
        assert [check_plan(plan) for plan, _ in device.account().plans] == [()] * len(
            device.account().plans
        )

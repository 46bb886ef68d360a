"""Calls: when arrays are captured, which inputs are refused and how, strict types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, UsageError
from stitch.machine import Machine, load_machine
from stitch.program import Array, DataType, Layout, Space
from tests.support.stitched_models import binary_op, integers, model, one, scaled, tiny


def test_a_borrowed_array_is_read_when_the_queue_runs() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        x = integers()
        y = one(a(device.tensor(x, borrow=True)))
        x += 3
        np.testing.assert_array_equal(y.numpy(), (integers() + 3) * 2 + 1)


def test_a_read_only_view_of_a_writable_array_is_captured_as_well() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        x = integers()
        view = x.view()
        view.flags.writeable = False
        row = np.broadcast_to(x[1], (4, 64))
        lent = np.asarray(x.data.toreadonly())
        y, z, w = one(a(view)), one(a(row)), one(a(lent))
        expected = np.broadcast_to(integers()[1], (4, 64)) * 2 + 1
        x[:] = -5
        np.testing.assert_array_equal(y.numpy(), integers() * 2 + 1)
        np.testing.assert_array_equal(z.numpy(), expected)
        np.testing.assert_array_equal(w.numpy(), integers() * 2 + 1)


def test_what_an_array_was_is_kept_whether_or_not_the_call_follows_another() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        sub = device.load(binary_op("sub", "Sub", (4, 64)))
        wide = integers().astype(np.float64)
        for w in (integers(start=3), integers(start=3), wide, integers(start=3), wide.tolist()):
            x = integers()
            y = one(sub(x, w))
            x[:] = 77
            wanted = integers() - np.asarray(w, np.float32)
            np.testing.assert_array_equal(y.numpy(), wanted)


def test_arguments_come_by_position_and_by_name() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        sub = device.load(binary_op("sub", "Sub", (4, 64)))
        x, w = integers(), integers(start=3)
        for y in (sub(x, w), sub(x, w=w), sub(w=w, x=x)):
            np.testing.assert_array_equal(one(y).numpy(), x - w)


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((), {}, "missing: x, w"),
        ((0,), {}, "missing: w"),
        ((0, 0, 0), {}, r"surplus: argument 2\n(.*\n)*  try: inputs are the arguments"),
        (({"x": 0, "w": 0},), {}, r"missing: w\n(.*\n)*  try: .*: x=\.\.\., w=\.\.\."),
        ((0,), {"q": 0}, r"missing: w; surplus: q"),
        ((0,), {"x": 0, "w": 0}, "given twice: x"),
    ],
)
def test_wrong_sets_of_inputs_name_program_and_slots(
    arguments: tuple[object, ...], named: dict[str, int], said: str
) -> None:
    with stitch.open_device("tiny") as device:
        sub = device.load(binary_op("sub", "Sub", (4, 64)))
        with pytest.raises(UsageError, match=f"'sub': {said}") as refused:
            sub(*arguments, **named)
        assert "x: 4x64xf32, w: 4x64xf32" in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (integers((4, 32)), ("[4, 64]", "[4, 32]")),
        (integers((64, 4)), ("[4, 64]", "[64, 4]")),
        (integers().astype(np.int32), ("float32", "int32")),
        (integers() > 3, ("float32", "bool")),
        ([[1, 2], [3, 4]], ("[4, 64]", "[2, 2]")),
    ],
    ids=["narrow", "transposed", "int", "bool", "list"],
)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
def test_a_wrong_argument_names_slot_program_and_both_sides(
    wrong: Array, words: tuple[str, ...], as_tensor: bool
) -> None:
    with stitch.open_device("tiny") as device:
        sub = device.load(binary_op("sub", "Sub", (4, 64)))
        with pytest.raises(stitch.LinkError) as refused:
            sub(integers(), device.tensor(np.asarray(wrong)) if as_tensor else wrong)
        message = str(refused.value)
        assert "'w'" in message or ".w" in message
        assert "sub" in message
        if not as_tensor:
            assert all(word in message for word in words)
        device.flush()
        assert device.statistics().plans_made == 0


def test_a_link_error_names_both_programs_and_both_descriptors() -> None:
    with stitch.open_device("tiny") as device:
        maker, taker = device.load(scaled("maker", 2.0)), device.load(scaled("taker", 2.0, (8, 8)))
        h = one(maker(integers()))
        with pytest.raises(stitch.LinkError) as refused:
            taker(h)
        message = str(refused.value)
        assert "maker" in message
        assert "taker.x" in message
        assert "4x64xf32:l1" in message
        assert "8x8xf32:l1" in message
        np.testing.assert_array_equal(h.numpy(), integers() * 2 + 1)


def test_integers_never_become_floats_nor_the_reverse() -> None:
    with stitch.open_device("tiny") as device:
        ints = device.load(scaled("ints", 2, data_type="int32"))
        floats = device.load(scaled("floats", 2.0))
        with pytest.raises(stitch.LinkError, match="int32 never turns into float32"):
            floats(one(ints(integers().astype(np.int32))))
        with pytest.raises(stitch.LinkError, match="float32 never turns into int32"):
            ints(one(floats(integers())))


def test_integers_convert_only_where_every_value_fits() -> None:
    with stitch.open_device("tiny") as device:
        ints = device.load(scaled("ints", 2, data_type="int32"))
        fits = integers().astype(np.int64)
        np.testing.assert_array_equal(one(ints(fits)).numpy(), fits * 2 + 1)
        with pytest.raises(stitch.LinkError, match="some values do not fit"):
            ints(fits + 2**40)


@pytest.mark.parametrize("strict", [False, True])
def test_strict_types_refuse_a_link_that_changes_the_storage_type(strict: bool) -> None:
    narrow = scaled("narrow", 2.0, placement=("output.y.data_type=bfloat16",))
    with stitch.open_device("tiny", strict_types=strict, debug=True) as device:
        a, b = device.load(narrow), device.load(scaled("b", 3.0))
        h = one(a(integers()))
        if strict:
            for _ in range(2):
                with pytest.raises(stitch.LinkError, match="strict_types is set"):
                    b(h)
        else:
            np.testing.assert_array_equal(one(b(h)).numpy(), (integers() * 2 + 1) * 3 + 1)


def test_addresses_of_pending_tensors_run_the_queue() -> None:
    with stitch.open_device("tiny") as device:
        y = one(device.load(scaled("a", 2.0))(integers()))
        assert y.is_pending
        assert y.layout.address is None
        assert y.address is not None
        assert not y.is_pending
        assert y.layout.address == y.address


def test_the_window_closes_when_it_is_full() -> None:
    with stitch.open_device("tiny", window=4) as device:
        a = device.load(scaled("a", 2.0))
        results = [one(a(integers(start=i))) for i in range(6)]
        assert [r.is_pending for r in results] == [False] * 4 + [True] * 2
    with stitch.open_device("tiny", window=1) as device:
        assert not one(device.load(scaled("a", 2.0))(integers())).is_pending
    with pytest.raises(UsageError, match="at least 1 task"):
        stitch.open_device("tiny", window=0)


def test_a_binary_for_another_machine_lists_every_difference() -> None:
    with stitch.open_device("tiny") as device, pytest.raises(StitchError) as refused:
        device.load(scaled("a", 2.0, target="wormhole_n150"))
    message = str(refused.value)
    assert "compiled for 'wormhole_n150' does not run on 'tiny'" in message
    assert all(word in message for word in ("core grid", "dram banks", "l1 banks"))
    assert refused.value.exit_code == 4


def times_ones(
    rows: int, target: str | Machine = "tiny", *, factor: int = 1
) -> stitch.CompiledModel:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (1, rows), "float32")
        w = b.parameter("w", np.full((rows, 1024), factor, np.float32))
        b.output("y", b.op("MatMul", x, w))

    return model("big", build, target=target)


@pytest.mark.parametrize("spill", [True, False])
def test_constants_that_do_not_fit_by_themselves_are_refused_when_they_are_loaded(
    spill: bool,
) -> None:
    """No compiler makes such a file: it claims another machine than it was made for."""
    roomy = tiny(dram_nbytes=4 << 20)
    made = times_ones(1024, roomy).binary
    forged = replace(made, machine=load_machine("tiny").shape)
    with stitch.open_device("tiny", spill=spill) as device:
        before = device.memory_report()
        with pytest.raises(stitch.OutOfMemoryError, match="no hole of"):
            device.load(forged)
        assert device.memory_report() == before


def test_unknown_executors_machines_and_programs_are_named() -> None:
    with pytest.raises(UsageError, match="unknown executor 'abacus'"):
        stitch.open_device("tiny", executor="abacus")
    with pytest.raises(StitchError, match="nowhere"):
        stitch.open_device("nowhere")
    with stitch.open_device("tiny") as device, pytest.raises(StitchError, match="'b'"):
        device.load(scaled("a", 2.0), "b")


@pytest.mark.parametrize(
    "wrong",
    [[[1.0], [2.0, 3.0]], None, "text", (i for i in range(3)), np.ones((4, 64), np.complex64)],
    ids=["ragged", "none", "text", "generator", "complex"],
)
def test_what_is_no_array_of_numbers_is_refused_with_slot_and_program(wrong: object) -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        with pytest.raises(stitch.LayoutError, match="input 'x' of 'a'"):
            a(wrong)


def test_arrays_of_the_other_byte_order_and_tensors_of_any_layout_are_taken_over() -> None:
    with stitch.open_device("tiny", debug=True) as device, stitch.open_device("tiny") as other:
        a = device.load(scaled("a", 2.0, (32, 32)))
        expected = integers((32, 32)) * 2 + 1
        np.testing.assert_array_equal(one(a(integers((32, 32)).astype(">f4"))).numpy(), expected)
        tile = stitch.program.TILE_SHAPE
        for layout in (
            Layout(DataType.FLOAT32, Space.L1, tile),
            Layout(DataType.BFLOAT16, Space.L1),
        ):
            theirs = other.tensor(integers((32, 32))).to_layout(layout)
            mine = device.tensor(theirs)
            assert mine.data_type is layout.data_type
            np.testing.assert_array_equal(one(a(mine)).numpy(), expected)
            room = device.empty(stitch.TensorDesc((32, 32), Layout(DataType.FLOAT32, Space.L1)))
            device.write(room, theirs)
            np.testing.assert_array_equal(room.numpy(), integers((32, 32)))

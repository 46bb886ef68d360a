"""Programs: every way in which the parts do not fit is an error that names the part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Scratch,
    Seam,
    Space,
    Value,
    ValueType,
)

F32 = ValueType((4,), DataType.FLOAT32)
L1 = Layout(DataType.FLOAT32, Space.L1)
BACKWARDS = (Operation("Relu", (2,), (3,)), Operation("Relu", (0,), (2,)))


def chain(**changes: Any) -> Program:
    """y = Relu(Add(x, c)): an input, a constant, an intermediate value, an output."""
    parts: dict[str, Any] = {
        "name": "p",
        "inputs": (InputSlot("x", 0),),
        "outputs": (OutputSlot("y", 3),),
        "values": (
            Value("x", F32, L1),
            Value("c", F32, Layout(DataType.FLOAT32, Space.DRAM)),
            Value("h", F32, replace(L1, address=0)),
            Value("y", F32, L1),
        ),
        "operations": (Operation("Add", (0, 1), (2,)), Operation("Relu", (2,), (3,))),
        "constants": (Constant(1, np.ones(4, np.float32)),),
        "scratch": Scratch(Space.L1, 64),
    }
    return Program(**(parts | changes))


def test_the_text_shows_every_part() -> None:
    assert chain().text() == (
        "program @p role=forward {\n"
        "  input x: %x 4xf32:l1:row_major:interleaved\n"
        "  constant %c 4xf32:dram:row_major:interleaved\n"
        "  %h = Add(%x, %c) : 4xf32:l1:row_major:interleaved@0x0\n"
        "  %y = Relu(%h) : 4xf32:l1:row_major:interleaved\n"
        "  output y: %y\n"
        "  scratch l1 64 B/bank\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"inputs": (InputSlot("x", 9),)}, "bad_index"),
        ({"inputs": (InputSlot("x", 0), InputSlot("x", 0))}, "defined_twice"),
        ({"operations": BACKWARDS}, "undefined"),
        ({"constants": (Constant(1, np.ones(3, np.float32)),)}, "constant_type"),
        ({"constants": (Constant(1, np.ones(4, np.int32)),)}, "constant_type"),
        ({"outputs": ()}, "no_output"),
        ({"outputs": (OutputSlot("y", 0),)}, "output_value"),
        ({"outputs": (OutputSlot("y", 3), OutputSlot("z", 3))}, "output_value"),
        ({"outputs": (OutputSlot("y", 3), OutputSlot("y", 2))}, "duplicate_name"),
        ({"outputs": (OutputSlot("y", 3, aliases_input=0),)}, "bad_alias"),
        ({"outputs": (OutputSlot("y", 3, aliases_input=5),)}, "bad_alias"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_by_kind(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(CompileError, match=kind):
        chain(**changes)


def test_every_value_of_a_program_has_a_layout_that_can_hold_it() -> None:
    values = chain().values
    with pytest.raises(CompileError, match="unplaced"):
        chain(values=(*values[:2], replace(values[2], layout=None), values[3]))
    wrong = replace(values[3], layout=Layout(DataType.INT32, Space.L1))
    with pytest.raises(CompileError, match="storage_type"):
        chain(values=(*values[:3], wrong))
    host = replace(values[3], layout=Layout(DataType.FLOAT32, Space.HOST, address=64))
    with pytest.raises(CompileError, match="host_address"):
        chain(values=(*values[:3], host))


def test_an_output_may_take_the_place_of_a_donated_input() -> None:
    program = chain(
        inputs=(InputSlot("x", 0, ownership=Ownership.DONATE),),
        outputs=(OutputSlot("y", 3, aliases_input=0),),
    )
    assert "donate" in program.text()
    assert "aliases x" in program.text()


def test_constants_are_read_only_and_equal_by_their_bytes() -> None:
    nan = Constant(1, np.full(4, np.nan, np.float32))
    assert nan == Constant(1, np.full(4, np.nan, np.float32))
    assert nan != Constant(1, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        nan.data[0] = 1


def test_seams_stand_in_the_text() -> None:
    linked = chain(seams=(Seam(0, (2,)), Seam(1)))
    assert "  seams before operations 0 (gives %h), 1\n" in linked.text()
    assert "seams" not in chain().text()


@pytest.mark.parametrize(
    ("seams", "what"),
    [
        ((Seam(1),), "begins at operation 1 of 2, expected 0"),
        ((Seam(0), Seam(2)), "begins at operation 2 of 2, expected behind 0"),
        ((Seam(0), Seam(1), Seam(1)), "begins at operation 1 of 2, expected behind 1"),
        ((Seam(0, (3,)), Seam(1)), "value 3 of 4 is not made in its operations 0 to 0"),
        ((Seam(0), Seam(1, (7,))), "value 7 of 4 is not made in its operations 1 to 1"),
        ((Seam(0, (3, 2)),), "the values that it holds do not rise"),
        ((Seam(0, (2, 2)),), "the values that it holds do not rise"),
    ],
)
def test_seams_that_do_not_fit_are_refused(seams: tuple[Seam, ...], what: str) -> None:
    with pytest.raises(CompileError, match="bad_seam") as caught:
        chain(seams=seams)
    assert what in str(caught.value)


def test_what_depends_on_constants_alone_is_fixed() -> None:
    assert chain().fixed_values() == {1}
    operations = (Operation("Relu", (1,), (2,)), Operation("Clip", (2, ABSENT, 1), (3,)))
    assert chain(operations=operations).fixed_values() == {1, 2, 3}
    # What is made of nothing may be another each time.
    operations = (Operation("RandomNormal", (), (2,)), Operation("Relu", (2,), (3,)))
    assert chain(operations=operations).fixed_values() == {1}

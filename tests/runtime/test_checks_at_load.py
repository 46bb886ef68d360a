"""Types and scratch that a file claims are checked when a device loads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stitch
from stitch.errors import CompileError, FormatError
from stitch.graph import ComputationGraphBuilder
from stitch.program import Ownership, Program, Value
from stitch.ttb import Binary, encode
from tests.support.stitched_models import scaled


def damaged(program: Program, value: Value, index: int) -> bytes:
    """The file of a program in which one value is another."""
    model = scaled("a", 2.0)
    values = list(program.values)
    values[index] = value
    changed = replace(program, values=tuple(values))
    return encode(Binary((changed,), model.binary.machine, "a test"))


def intermediate(program: Program) -> int:
    """The index of a value that is neither slot nor constant."""
    known = {s.value for s in program.inputs} | {s.value for s in program.outputs}
    known |= {c.value for c in program.constants}
    return next(i for i in range(len(program.values)) if i not in known)


@pytest.mark.parametrize(
    ("address", "said"),
    [(1 << 32, "scratch"), (64, "scratch"), (None, "scratch"),
     (1, "multiple of 64"), (4, "multiple of 64"), (32, "multiple of 64")],
)  # fmt: skip
def test_an_intermediate_value_outside_the_scratch_or_off_its_alignment_is_refused(
    address: int | None, said: str
) -> None:
    program = scaled("a", 2.0).binary.programs[0]
    index = intermediate(program)
    value = program.values[index]
    assert value.layout is not None
    moved = replace(value, layout=replace(value.layout, address=address))
    with stitch.open_device("tiny") as device, pytest.raises(FormatError, match=said):
        device.load(damaged(program, moved, index))


def test_types_that_do_not_follow_are_refused() -> None:
    program = scaled("a", 2.0).binary.programs[0]
    index = intermediate(program)
    value = program.values[index]
    other = replace(value, type=replace(value.type, shape=(3, 3)))
    with (
        stitch.open_device("tiny") as device,
        pytest.raises(CompileError, match="differs from the inferred one"),
    ):
        device.load(damaged(program, other, index))


def test_an_unknown_operator_is_refused_with_its_place() -> None:
    binary = scaled("a", 2.0).binary
    program = binary.programs[0]
    first = replace(program.operations[0], op="Addd", location="model.src:3")
    changed = replace(program, operations=(first, *program.operations[1:]))
    with stitch.open_device("tiny") as device, pytest.raises(CompileError) as caught:
        device.load(encode(replace(binary, programs=(changed,))))
    assert (caught.value.where, caught.value.remedy) == ("model.src:3", "did you mean Add?")


@pytest.mark.parametrize(
    "reads_later, why", [(True, "still reads input 'x' afterwards"), (False, "not elementwise")]
)
def test_an_output_on_an_input_that_is_not_proved_to_be_done_with_is_refused(
    reads_later: bool, why: str
) -> None:
    """The compiler proves each alias; what a file claims would be computed over live elements."""
    b = ComputationGraphBuilder("forged")
    x = b.input("x", (8, 8), "float32", ownership=Ownership.DONATE)
    b.output("y", x + 1.0 if reads_later else b.op("Transpose", x, perm=[1, 0]))
    if reads_later:
        b.output("later", x * 2.0)
    placement = ("input.x.space=l1", "output.y.space=l1")
    binary = stitch.compile(b.build(), target="tiny", placement=placement).binary
    program = binary.programs[0]
    slots = tuple(
        replace(slot, aliases_input=0 if slot.name == "y" else None) for slot in program.outputs
    )
    forged = encode(replace(binary, programs=(replace(program, outputs=slots),)))
    with stitch.open_device("tiny") as device, pytest.raises(FormatError, match=why):
        device.load(forged)

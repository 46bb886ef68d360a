"""TTNN binaries as programs of ours: slots, operations as names, lifetimes, the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.machine import load_machine
from stitch.program import ABSENT, InputKind, MathFidelity, Scratch, Space
from stitch.ttb import load
from tests.support.files.ttnn_files import HEAD, LAYER, REAL, STRANGERS, lacking, program_of


def test_the_slots_of_a_real_binary_lie_where_its_text_says() -> None:
    program = program_of(REAL)
    assert [program.input_desc(i).text() for i in range(2)] == [
        "64x128xbf16:host:row_major:interleaved",
        "128x96xbf16:host:row_major:interleaved",
    ]
    assert program.output_desc(0).text() == "64x96xbf16:host:row_major:interleaved"


def test_operations_are_names_with_their_own_text_and_place() -> None:
    program = program_of(REAL)
    assert [o.op for o in program.operations] == [
        "GetDeviceOp", "ToLayoutOp", "ToDeviceOp", "ToLayoutOp", "ToDeviceOp", "EmptyOp",
        "MatmulOp", "ToLayoutOp", "FromDeviceOp",
    ]  # fmt: skip
    matmul = program.operations[6]
    assert str(matmul.attributes["text"]).startswith('%6 = "ttnn.matmul"(%2, %4, %5) : (tensor<')
    assert matmul.location == '"simple_matmul_ttnn.mlir":19:10'
    assert all(o.is_opaque and o.body == ABSENT for o in program.operations)


def with_text(tmp_path: Path, told: str) -> Path:
    """The real binary, the types in the text of its product written over."""
    content = REAL.read_bytes()
    at = content.index(b" : (tensor<", content.index(b'"ttnn.matmul"'))
    file = tmp_path / "told.ttnn"
    file.write_bytes(content[:at] + told.encode() + content[at + len(told) :])
    return file


@pytest.mark.parametrize(
    ("told", "fidelity"),
    [
        ("{compute_config = <math_fidelity = hifi4, fp32>}", MathFidelity.HIFI4),
        ("{math_fidelity = lofi, math_fidelity = lofi}", MathFidelity.LOFI),
        # Two kernels that differ, and one that nobody knows.
        ("{math_fidelity = lofi, math_fidelity = hifi2}", MathFidelity.BY_TYPE),
        ("{math_fidelity = hifi5}", MathFidelity.BY_TYPE),
    ],
)
def test_the_math_fidelity_in_an_operations_text_is_its_own(
    tmp_path: Path, told: str, fidelity: MathFidelity
) -> None:
    operations = program_of(with_text(tmp_path, told)).operations
    assert operations[6].math_fidelity is fidelity
    assert {o.math_fidelity for o in operations[:6]} == {MathFidelity.BY_TYPE}


def test_a_result_that_is_there_before_is_written_in_place() -> None:
    program = program_of(REAL)
    empty, matmul, back = program.operations[5:8]
    names = [program.values[v].name for v in (*matmul.inputs, *matmul.outputs, *back.inputs)]
    assert names == ["t4", "t6", "t7", "t7.1", "t7.1"]
    assert empty.outputs == matmul.inputs[2:]


def test_a_tensor_written_in_place_is_one_in_memory() -> None:
    origin = load(REAL).origin
    assert origin is not None
    assert [(one.name, one.first, one.last) for one in origin.lives] == [
        ("t3", 1, 8), ("t4", 2, 8), ("t5", 3, 8), ("t6", 4, 8), ("t7", 5, 8), ("t8", 7, 8)
    ]  # fmt: skip
    assert program_of(REAL).scratch == Scratch(Space.DRAM, 5 * 2048)


def test_a_tensor_lives_until_it_is_deallocated() -> None:
    origin = load(LAYER).origin
    assert origin is not None
    lives = {(one.name, one.program): (one.first, one.last) for one in origin.lives}
    assert lives == {("t3", "layer"): (1, 3), ("t4", "layer"): (2, 5)}
    assert program_of(LAYER).scratch == Scratch(Space.L1, 8192)


def test_the_kind_of_an_operation_stands_beside_its_name() -> None:
    (relu,) = [o for o in program_of(LAYER).operations if o.op == "EltwiseUnaryOp"]
    assert relu.attributes["kind"] == "Relu"


def test_an_input_that_only_hoisted_constants_read_is_a_parameter() -> None:
    kinds = [slot.kind for slot in program_of(LAYER).inputs]
    assert kinds == [InputKind.ACTIVATION, InputKind.PARAMETER]


def test_programs_that_only_others_call_stand_behind() -> None:
    assert [p.name for p in load(LAYER).programs] == ["layer", "layer_const_eval_0"]


def test_an_input_that_is_given_back_is_a_result_of_its_own_and_named() -> None:
    binary = load(HEAD)
    program = binary.programs[0]
    last = program.operations[-1]
    assert (last.op, last.inputs) == ("GivenBack", (program.inputs[1].value,))
    assert program.outputs[1].value == last.outputs[0]
    assert "a result that is an input, or given twice" in lacking(binary)


def test_a_program_that_gives_nothing_is_named_and_the_rest_shown() -> None:
    binary = load(STRANGERS)
    assert [p.name for p in binary.programs] == ["strangers"]
    assert "a program that gives nothing is not shown: silent" in lacking(binary)


def test_the_embedded_descriptor_is_the_machine() -> None:
    binary = load(REAL)
    shape, origin = binary.machine, binary.origin
    assert origin is not None
    assert origin.machine.shape == shape
    assert shape.core_grid == (8, 8)
    assert shape.l1 is not None
    assert shape.dram is not None
    # What the top of L1 keeps for L1_SMALL no descriptor says: that is n150's.
    assert (shape.l1.banks, shape.l1.base, shape.l1.limit) == (64, 107_360, 1_499_136 - 32_768)
    assert (shape.dram.banks, shape.dram.base, shape.dram.limit) == (12, 32, 1_073_097_664)
    assert origin.machine.paths == load_machine("wormhole_n150").paths

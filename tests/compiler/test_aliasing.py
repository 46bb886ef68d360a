"""Aliasing: an output takes a donated input's buffer only where the graph proves that it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stitch.compiler import CompileOptions, compile_graph
from stitch.errors import CompileError
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.placement import parse_placement
from stitch.machine import load_machine
from stitch.program import (
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Space,
    Value,
    ValueType,
)

N150 = load_machine("wormhole_n150")
KIND = ValueType((8, 8), DataType.FLOAT32)


def graph(
    operations: Sequence[Operation], outputs: dict[str, int], count: int, donated: str = "s"
) -> ComputationGraph:
    """Inputs s (state, donated) and x; values are all 8x8 float32."""
    inputs = (
        InputSlot(
            "s", 0, InputKind.STATE, Ownership.DONATE if "s" in donated else Ownership.BORROW
        ),
        InputSlot("x", 1, ownership=Ownership.DONATE if "x" in donated else Ownership.BORROW),
    )
    slots = tuple(OutputSlot(name, value) for name, value in outputs.items())
    values = tuple(Value(f"v{i}", KIND) for i in range(count))
    return ComputationGraph("g", inputs, slots, values, tuple(operations))


def compiled(body: ComputationGraph, *placement: str, **options: Any) -> Program:
    asked = tuple(parse_placement(option) for option in placement)
    return compile_graph(body, N150, CompileOptions(placement=asked, **options)).program


UPDATE = [Operation("Mul", (1, 1), (2,)), Operation("Sub", (0, 2), (3,))]


def test_a_donated_input_gives_its_buffer_to_the_elementwise_output_that_reads_it_last() -> None:
    program = compiled(graph(UPDATE, {"new": 3}, 4), "output.new.alias=s")
    assert program.outputs[0].aliases_input == 0
    assert program.output_desc(0) == program.input_desc(0)
    assert program.output_desc(0).layout.space is Space.DRAM


def test_a_proof_that_holds_is_used_without_a_option() -> None:
    assert compiled(graph(UPDATE, {"new": 3}, 4)).outputs[0].aliases_input == 0


def test_a_later_reader_forbids_the_alias_and_is_named() -> None:
    body = graph(
        [*UPDATE, Operation("Exp", (0,), (4,), location="late.py:7")], {"new": 3, "e": 4}, 5
    )
    assert compiled(body).outputs[0].aliases_input is None
    with pytest.raises(CompileError) as caught:
        compiled(body, "output.new.alias=s")
    assert "operation 2 (Exp at late.py:7) still reads input 's' afterwards" in str(caught.value)
    assert "output 'new' over input 's'" in str(caught.value)


def test_a_writer_that_is_not_elementwise_forbids_the_alias() -> None:
    body = graph([Operation("MatMul", (0, 1), (2,))], {"new": 2}, 3)
    assert compiled(body).outputs[0].aliases_input is None
    with pytest.raises(CompileError, match=r"operation 0 \(MatMul\) writes it and is not element"):
        compiled(body, "output.new.alias=s")


def test_a_writer_that_does_not_read_the_input_itself_forbids_the_alias() -> None:
    body = graph([Operation("Exp", (0,), (2,)), Operation("Neg", (2,), (3,))], {"new": 3}, 4)
    with pytest.raises(CompileError, match=r"operation 1 \(Neg\) writes it without reading"):
        compiled(body, "output.new.alias=s")


def test_an_input_that_is_only_borrowed_is_never_overwritten() -> None:
    body = graph(UPDATE, {"new": 3}, 4, donated="")
    assert compiled(body).outputs[0].aliases_input is None
    with pytest.raises(CompileError, match=r"not donated \(--set input.s.ownership=donate; in Py"):
        compiled(body, "output.new.alias=s")
    asked = compiled(body, "output.new.alias=s", "input.s.ownership=donate")
    assert asked.outputs[0].aliases_input == 0


def test_types_must_agree() -> None:
    body = graph([], {}, 2)
    values = (*body.values, Value("b", ValueType((8, 8), DataType.BOOL)))
    greater = (Operation("Greater", (0, 1), (2,)),)
    with_bool = ComputationGraph("g", body.inputs, (OutputSlot("new", 2),), values, greater)
    with pytest.raises(CompileError, match="8x8xi1 is not 8x8xf32"):
        compiled(with_bool, "output.new.alias=s")


def test_two_outputs_never_take_one_buffer() -> None:
    body = graph([Operation("Exp", (0,), (2,)), Operation("Neg", (0,), (3,))], {"a": 2, "b": 3}, 4)
    assert [s.aliases_input for s in compiled(body).outputs] == [None, 0]
    with pytest.raises(CompileError, match="alias the same input: 's'"):
        compiled(body, "output.a.alias=s", "output.b.alias=s")


def test_layout_placement_of_either_side_hold_for_both() -> None:
    program = compiled(graph(UPDATE, {"new": 3}, 4), "output.new.alias=s", "output.new.space=l1")
    assert program.input_desc(0).layout.space is Space.L1
    assert program.output_desc(0) == program.input_desc(0)


def test_layout_placement_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(CompileError, match=r"output\.new\.space=l1 contradicts input\.s\.space="):
        compiled(
            graph(UPDATE, {"new": 3}, 4),
            "output.new.alias=s", "output.new.space=l1", "input.s.space=dram",
        )  # fmt: skip


def test_an_input_passed_through_may_give_its_buffer() -> None:
    program = compiled(graph([], {"same": 0}, 2), "output.same.alias=s")
    assert [o.op for o in program.operations] == ["Identity"]
    assert program.outputs[0].aliases_input == 0

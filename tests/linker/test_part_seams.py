"""Seams: a linked program remembers its parts, and what each of them gave."""

from __future__ import annotations

from stitch.linker import Wire, chain_wires, link_programs
from stitch.machine import load_machine
from stitch.program import DataType, Program
from stitch.ttb import Binary, encode, load
from tests.linker.test_static_linking import Sketch

TINY = load_machine("tiny").shape


def chain(name: str, *operators: str, stored: DataType | None = None) -> Program:
    """One operator after the other."""
    sketch = Sketch(name)
    value = sketch.input("x")
    for operator in operators:
        value = sketch.op(operator, value)
    sketch.output("y", value, stored)
    return sketch.program()


def forked(name: str) -> Program:
    """`h`, an output, which is read inside too; `y`; and `z`, of operations that only it needs."""
    sketch = Sketch(name)
    h = sketch.op("Exp", sketch.input("x"))
    t = sketch.op("Tanh", h)
    sketch.output("y", sketch.op("Relu", t))
    sketch.output("z", sketch.op("Neg", sketch.op("Abs", t)))
    sketch.output("h", h)
    return sketch.program()


def linked(*programs: Program, name: str = "whole") -> Program:
    return link_programs(programs, chain_wires(programs), machine=TINY, name=name)


def parts(program: Program) -> list[list[str]]:
    """The operators of each part."""
    return [[program.operations[i].op for i in part] for part in program.parts()]


def held(program: Program) -> list[list[str]]:
    """Which operators make what each part holds."""
    makers = {v: o.op for o in program.operations for v in o.outputs}
    return [[makers[v] for v in seam.held] for seam in program.seams]


def test_each_program_is_a_part_and_so_is_each_cast_between() -> None:
    whole = linked(chain("a", "Tanh", "Abs", stored=DataType.BFLOAT16), chain("b", "Exp", "Neg"))
    assert parts(whole) == [["Tanh", "Abs"], ["Cast"], ["Cast"], ["Exp", "Neg"]]
    assert held(whole) == [[], [], [], []]


def test_a_part_holds_what_it_gave_and_what_dropped_operations_read() -> None:
    programs = [forked("a"), chain("b", "Sqrt")]
    whole = link_programs(programs, [Wire(0, 0, 1, 0)], machine=TINY, name="w", keep=[(1, 0)])
    assert parts(whole) == [["Exp", "Tanh", "Relu"], ["Sqrt"]]
    # h was an output, and Abs, which is gone, read what Tanh makes; y is read by the next part.
    assert held(whole) == [["Exp", "Tanh"], []]
    further = linked(whole, chain("c", "Neg"))
    assert held(further) == [["Exp", "Tanh"], [], []]


def test_a_part_of_which_nothing_is_left_is_gone() -> None:
    programs = [chain("a", "Tanh"), chain("b", "Exp"), chain("c", "Neg")]
    wires = [Wire(0, 0, 1, 0), Wire(0, 0, 2, 0)]
    whole = link_programs(programs, wires, machine=TINY, name="w", keep=[(2, 0)])
    assert parts(whole) == [["Tanh"], ["Neg"]]
    assert held(whole) == [[], []]


def test_seams_go_through_a_file_which_names_the_feature() -> None:
    programs = [forked("a"), chain("b", "Sqrt")]
    whole = link_programs(programs, [Wire(0, 0, 1, 0)], machine=TINY, name="w", keep=[(1, 0)])
    binary = Binary((whole,), TINY, "test")
    assert binary.requires == ("seams",)
    assert load(encode(binary), verify="full").programs == (whole,)
    assert Binary((programs[1],), TINY, "test").requires == ()

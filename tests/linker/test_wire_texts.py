"""Wiring in words: what texts, names and indices mean, and what is said of those that mean none."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.errors import LinkError, UsageError
from stitch.linker import ProgramNames, Wire, chain_in_words, wires_in_words
from stitch.program import Program
from tests.linker.test_static_linking import Sketch


def _program(name: str, inputs: str = "x", outputs: str = "y", size: int = 4) -> Program:
    sketch = Sketch(name)
    taken = [sketch.input(slot, shape=(size, size)) for slot in inputs.split()]
    for slot in outputs.split():
        sketch.output(slot, sketch.op("Tanh", taken[0]))
    return sketch.program()


def _names(*programs: Program, labels: tuple[str, ...] = ()) -> ProgramNames:
    return ProgramNames(programs, labels)


A, B, CELL = _program("a", outputs="y z"), _program("b"), _program("cell", "x h")


@pytest.mark.parametrize(
    "wiring",
    [
        ["a.y=b.x", "b.y=cell.h", "a.z=cell.x"],
        ["0.0=1.0", "1.0=2.1", "0.1=2.0"],
        ["front.y=b.x", "back.y=cell.1", "0.z=2.x"],
        {("b", "x"): ("a", "y"), ("cell", "h"): ("b", "y"), ("cell", "x"): ("a", "z")},
        {(1, 0): (0, 0), (2, 1): (1, 0), (2, 0): (0, 1)},
        {"b.x": "a.y", "cell.h": (1, "y"), (2, "x"): "front.z"},
    ],
)
def test_texts_pairs_and_indices_mean_the_same(wiring: Any) -> None:
    names = _names(A, B, CELL, labels=("front", "back", ""))
    assert wires_in_words(names, wiring) == (Wire(0, 0, 1, 0), Wire(0, 1, 2, 0), Wire(1, 0, 2, 1))


def test_slots_with_dots_and_digits_for_names_are_found() -> None:
    dotted = _program("m.net", "0 1", "out.y")
    names = _names(_program("a"), dotted)
    assert wires_in_words(names, "a.y=m.net.1") == (Wire(0, 0, 1, 1),)
    swapped = _names(_program("a"), _program("b", "1 0"))
    assert wires_in_words(swapped, "a.y=b.1") == (Wire(0, 0, 1, 0),)
    by_index: Any = {(1, 1): (0, 0)}
    assert wires_in_words(swapped, by_index) == (Wire(0, 0, 1, 1),)


@pytest.mark.parametrize(
    ("wiring", "said"),
    [
        ("a.y", "'a.y' is not a wire"),
        ([3], "3 is not a wire"),
        ("a.q=b.x", "'a' has no output 'q' (it has y, z)"),
        ("a.y=b.xx", "'b' has no input 'xx' (it has x); did you mean 'x'?"),
        ("c.y=b.x", "no module is called 'c'"),
        ("9.0=b.x", "no module is called '9'"),
        ({("a", "y"): ("b", "x")}, "'b' has no output 'x'"),
        ({("b", "x"): 7}, "7 names no output"),
        ({("b", "x"): ("a", -1)}, "'a' has no output -1"),
        ({("b", "x"): ("a", "y", "z")}, "names no output"),
        ({("b", True): ("a", "y")}, "names no input"),
        (["a.y=b.x", "a.z=b.x"], "an input is fed twice: a.y=b.x and a.z=b.x"),
        ("b.y=a.x", "'b.y=a.x' leads backwards"),
        ("b.y=b.x", "'b.y=b.x' leads backwards"),
    ],
)
def test_words_that_mean_nothing_are_said(wiring: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        wires_in_words(_names(A, B, CELL), wiring)
    assert said in str(caught.value)


def test_slots_that_do_not_fit_are_all_said_with_both_descriptors() -> None:
    small, big = _names(A, _program("c", "x h", size=8)).programs, "8x8xf32"
    with pytest.raises(LinkError) as caught:
        wires_in_words(ProgramNames(small), "a.y=c.x")
    assert "program 'a' output 'y' cannot feed program 'c' input 'x'" in str(caught.value)
    assert "4x4xf32:dram" in str(caught.value) and f"{big}:dram" in str(caught.value)
    with pytest.raises(LinkError) as caught:
        wires_in_words(ProgramNames(small), ["a.y=c.x", "a.z=c.h"])
    assert "2 wires do not fit" in str(caught.value)
    assert str(caught.value).count("4x4xf32:dram") == str(caught.value).count(f"{big}:dram") == 2


def test_programs_of_one_name_are_called_by_index() -> None:
    twice = _names(B, B)
    with pytest.raises(UsageError, match=r"several modules are called 'b'(.|\n)*indices"):
        wires_in_words(twice, "b.y=b.x")
    assert wires_in_words(twice, "0.y=1.x") == (Wire(0, 0, 1, 0),)
    labelled = _names(B, B, labels=("one", "two"))
    assert wires_in_words(labelled, "one.y=two.x") == (Wire(0, 0, 1, 0),)


def test_a_chain_that_does_not_fit_is_told_the_words_that_would_connect_it() -> None:
    with pytest.raises(LinkError, match=r"wiring=\['front\.y=cell\.x'\]"):
        chain_in_words(_names(B, CELL, labels=("front", "")))
    assert chain_in_words(_names(B, B, A)) == (Wire(0, 0, 1, 0), Wire(1, 0, 2, 0))

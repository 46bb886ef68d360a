"""The wires of a chain: by position, or by name around programs where numbers differ."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.errors import LinkError
from stitch.graph import ComputationGraphBuilder
from stitch.linker import Wire, chain_wires
from stitch.program import Program


def program(name: str, takes: str, gives: str) -> Program:
    """Takes slots named by letters, and gives the sum of all of them for each output."""
    b = ComputationGraphBuilder(name)
    total = None
    for letter in takes:
        value = b.input(letter, (4,), "float32")
        total = value if total is None else b.op("Add", total, value)
    for letter in gives:
        b.output(letter, b.op("Mul", total, np.float32(ord(letter) - ord("a") + 1)))
    return stitch.compile(b.build(), target="host").binary.programs[0]


def test_equal_numbers_are_wired_by_position_whatever_the_names() -> None:
    programs = [program("p", "x", "ab"), program("q", "ba", "x"), program("r", "y", "z")]
    assert chain_wires(programs) == (Wire(0, 0, 1, 0), Wire(0, 1, 1, 1), Wire(1, 0, 2, 0))


def test_values_go_around_programs_by_name() -> None:
    programs = [program("p", "x", "ab"), program("q", "b", "c"), program("r", "ca", "y")]
    assert chain_wires(programs) == (Wire(0, 1, 1, 0), Wire(1, 0, 2, 0), Wire(0, 0, 2, 1))


def test_a_name_means_the_nearest_program_before() -> None:
    programs = [program("p", "x", "ab"), program("q", "a", "a"), program("r", "ab", "y")]
    assert chain_wires(programs) == (Wire(0, 0, 1, 0), Wire(1, 0, 2, 0), Wire(0, 1, 2, 1))


def test_an_activation_without_a_namesake_is_refused() -> None:
    programs = [program("p", "x", "ab"), program("q", "b", "c"), program("r", "cd", "y")]
    with pytest.raises(LinkError, match="'p' output 'b' has no input to feed"):
        chain_wires(programs)

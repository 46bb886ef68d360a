"""What is found once stays with its object, and leaves the object as fast as it was."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import stitch
from stitch.runtime.executors.executor import cached_attribute
from tests.support.stitched_models import integers, scaled


@dataclass(frozen=True)
class Square:
    """Counts in a list, as it is frozen."""

    side: int
    asked: tuple[list[int], ...]

    @cached_attribute
    def area(self) -> int:
        self.asked[0].append(1)
        return self.side**2


def has_a_dictionary(thing: object) -> bool:
    """Whether CPython has made one for the attributes, in which each is looked up from then on."""
    return any(isinstance(found, dict) for found in gc.get_referents(thing))


def test_it_is_found_once_and_makes_no_dictionary() -> None:
    square = Square(3, ([],))
    assert not has_a_dictionary(square)
    assert (square.area, square.area, square.asked) == (9, 9, ([1],))
    assert not has_a_dictionary(square)


def test_a_program_that_ran_has_no_dictionary() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        program(integers())
        device.flush()
        assert not has_a_dictionary(program)

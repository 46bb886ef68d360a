"""Which values depend on which: through operations, and through the rounds of a scan."""

from __future__ import annotations

from stitch.compiler.dependence import propagate_over_rounds, reachable_from
from stitch.program import ABSENT, Operation

CHAIN = (
    Operation("Relu", (0,), (3,)),
    Operation("Clip", (1, ABSENT), (4,)),
    Operation("Add", (3, 4), (5,)),
)


def test_a_value_is_reached_through_all_that_reads_it() -> None:
    assert reachable_from(CHAIN, [0]) == {0, 3, 5}
    assert reachable_from(CHAIN, [1]) == {1, 4, 5}


def test_an_operand_that_is_absent_reaches_nothing() -> None:
    assert reachable_from(CHAIN, [ABSENT]) == set()


def test_what_is_always_reached_is_so_whatever_it_reads() -> None:
    assert reachable_from(CHAIN, [], lambda operation: operation.op == "Clip") == {4, 5}


def test_a_state_hands_on_what_reaches_it_to_the_next_round() -> None:
    # Each state becomes the one before it; an element comes into the last.
    shifted = [Operation("Relu", (i + 1,), (10 + i,)) for i in range(3)]
    places, values = propagate_over_rounds(
        [3], (0, 1, 2, 3), (10, 11, 12), 3, lambda of: reachable_from(shifted, of)
    )
    assert places == {0, 1, 2, 3}
    assert values == {0, 1, 2, 3, 10, 11, 12}


def test_what_rounds_collect_is_handed_on_to_none() -> None:
    once = (Operation("Relu", (1,), (10,)), Operation("Relu", (0,), (11,)))
    places, _ = propagate_over_rounds([1], (0, 1), (11, 10), 1, lambda of: reachable_from(once, of))
    assert places == {1}

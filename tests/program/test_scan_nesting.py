"""Scans: what does not fit is named; how deep they go, and what they come to, is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stitch.errors import CompileError
from stitch.ops import program_work
from stitch.program import MAX_EXPANSION, MAX_SCAN_DEPTH, DataType, Operation, ScanForm, ValueType
from tests.support.files.scanned_specimens import (
    scan_changed,
    scanned_program,
    scans_within_scans,
    unchecked,
)

PROGRAM = scanned_program()
SCAN = PROGRAM.operations[0]
ROUND = PROGRAM.bodies[2]


def attributes(body: int | None = None, **changes: Any) -> dict[str, Any]:
    """Other attributes of the program's scan, or of the one in a body; None takes one away."""
    scan = SCAN if body is None else PROGRAM.bodies[body].operations[0]
    changed = {k: v for k, v in {**scan.attributes, **changes}.items() if v is not None}
    return scan_changed(PROGRAM, body, attributes=changed)


def state_that_changes() -> dict[str, Any]:
    """The outer round gives a matrix where its state is a row."""
    return {"bodies": (*PROGRAM.bodies[:2], replace(ROUND, outputs=(6, 5)))}


def narrow_state() -> dict[str, Any]:
    """A round that takes numbers of four bits."""
    kind = ValueType((8,), DataType.INT4)
    held = PROGRAM.bodies[1]
    first = replace(held.values[0], type=kind)
    return {"bodies": (PROGRAM.bodies[0], replace(held, values=(first, *held.values[1:])), ROUND)}


def condition_of_numbers() -> dict[str, Any]:
    """A scan that asks its first state, which is a row."""
    words = {"count": 3, "num_states": 1, "has_condition": 1}
    scan = Operation("Scan", (0,), (3,), words, "stitch", body=0)
    return {"operations": (scan,), "outputs": PROGRAM.outputs[:1]}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no count": (attributes(count=None), "bad_scan", "does not say its count"),
    "a count below none": (attributes(count=-1), "bad_scan", "count is -1"),
    "a condition that is no number": (
        attributes(has_condition="yes"), "bad_scan", "has_condition is 'yes', not 0 or 1"),
    "a condition and sequences": (
        attributes(has_condition=1), "bad_scan", "a scan with a condition has states"),
    "a condition that is no truth value": (
        condition_of_numbers(), "bad_scan", "its condition is 8xf32, not i1"),
    "a count of text": (attributes(count="5"), "bad_scan", "not a whole number"),
    "a count beyond any": (attributes(count=2**40), "bad_scan", "is more than 2147483648"),
    "a count that the sequences lack": (
        attributes(count=6), "bad_body",
        "operand 1 is 5x3x8xf32, for 6 rounds of body 2 6x3x8xf32"),
    "a large count that the sequences lack": (
        attributes(count=2**31), "bad_body", "2147483648x3x8xf32"),
    "an inner count that the sequences lack": (
        attributes(2, count=4), "bad_body", "for 4 rounds of body 1 4x8xf32"),
    "more states than operands": (
        attributes(num_states=9), "bad_scan", "9 states and 1 sequences, 3 operands"),
    "more sequences than operands": (
        attributes(num_scan_inputs=3), "bad_scan", "1 states and 3 sequences, 3 operands"),
    "fewer states than none": (attributes(num_states=-1), "bad_scan", "num_states is -1"),
    "more states than results": (
        attributes(num_states=3, num_scan_inputs=0, scan_input_directions=None),
        "bad_scan", "3 states, 2 results"),
    "directions for more": (
        attributes(scan_input_directions=(1, 0)), "bad_scan", "not 1 times 0 (forward)"),
    "a direction that is none": (
        attributes(scan_input_directions=(2,)), "bad_scan", "scan_input_directions is (2,)"),
    "a direction that is no whole number": (
        attributes(scan_output_directions=(1.0,)), "bad_scan", "scan_output_directions is (1.0,)"),
    "a direction of text": (
        attributes(scan_output_directions=""), "bad_scan", "scan_output_directions is ''"),
    "an attribute of no scan": (attributes(axis=0), "bad_scan", "no attribute 'axis'"),
    "a state that changes its type": (
        state_that_changes(), "bad_scan", "state 0 is 8xf32, and 3x8xf32 after a round"),
    "a state of four bits": (narrow_state(), "bad_scan", "no round takes or makes int4"),
    "an operand that is not there": (
        scan_changed(PROGRAM, inputs=(0, 1, -1)), "bad_scan", "always there"),
    "no body": (scan_changed(PROGRAM, body_carried=-1), "bad_scan", "carries none"),
    "a body beyond all": (scan_changed(PROGRAM, body_carried=3), "bad_body", "body 3 of 3"),
    "a body inside itself": (scan_changed(PROGRAM, 2, body_carried=2), "bad_body", "body 2 of 2"),
    "a body inside one before it": (
        scan_changed(PROGRAM, 1, op="Scan", domain="stitch", body_carried=2),
        "bad_body", "body 2 of 1"),
    "a value from outside": (
        scan_changed(PROGRAM, 2, inputs=(0, 1, 77)), "undefined", "input value 77"),
    "a value of a later operation": (
        scan_changed(PROGRAM, 2, inputs=(0, 1, 5)), "undefined", "not defined before it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    changes, kind, detail = WRONG[name]
    with pytest.raises(CompileError) as caught:
        replace(PROGRAM, **changes)
    assert f"[{kind}]" in str(caught.value) and detail in str(caught.value)


def test_a_body_is_bound_twice_only_where_states_take_turns() -> None:
    def sides(count: int, states: int) -> int:
        return ScanForm(count, states, 0, 1, (), (False,)).sides

    found = {(n, s): sides(n, s) for n in (0, 1, 2, 9) for s in (0, 1)}
    assert found == {
        (0, 0): 0, (0, 1): 0, (1, 0): 1, (1, 1): 1, (2, 0): 1, (2, 1): 2, (9, 0): 1, (9, 1): 2,
    }  # fmt: skip


def test_so_many_scans_may_stand_within_each_other_and_no_more() -> None:
    assert len(scans_within_scans(MAX_SCAN_DEPTH).bodies) == MAX_SCAN_DEPTH
    with pytest.raises(CompileError, match=f"scans stand within scans, 17 deep: .* {16}"):
        scans_within_scans(MAX_SCAN_DEPTH + 1)


@pytest.mark.parametrize(("many", "count"), [(2, 1), (1, 2), (2, 2)])
def test_what_scans_come_to_is_bounded(many: int, count: int) -> None:
    assert len(scans_within_scans(6, many, count).bodies) == 6
    with pytest.raises(CompileError, match=f"more than {MAX_EXPANSION}"):
        scans_within_scans(MAX_SCAN_DEPTH, many, count)


def test_scans_count_as_often_as_they_are_bound() -> None:
    """Of 16 levels, those whose body is bound once are let through, and those bound twice not."""
    assert scans_within_scans(MAX_SCAN_DEPTH, 1, 1).bodies
    with pytest.raises(CompileError, match="too_large"):
        scans_within_scans(MAX_SCAN_DEPTH, 1, 3)


def test_the_work_of_a_body_is_found_once_however_many_carry_it() -> None:
    """By paths there are 2 to the 60th: who walked them would never end."""
    work = program_work(scans_within_scans(60, 2, 3, make=unchecked))
    assert work.other_flops == 2**60 * 4 * 3**60


def test_an_operator_of_another_domain_is_no_scan() -> None:
    with pytest.raises(CompileError, match="operand 1 is 5x3x8xf32, in body 2 3x8xf32"):
        replace(PROGRAM, **scan_changed(PROGRAM, domain="own"))

"""Executors agree on random operations of ordinary values, or refuse them by name at load.

Each operator is drawn with all of its attributes. Operations over operands without elements run in
a process of their own, which what goes wrong there may end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stitch.ops import OpDef, operators
from tests.support.executors.differences import originals
from tests.support.operators.drawn_operations import GENERATORS, drawn_operators
from tests.support.operators.draws_by_executors import (
    compare,
    drawn_operation,
    every_executor,
    in_own_process,
    magnification,
)
from tests.support.run_seed import SEED

OPERATORS = drawn_operators()
NAMES = [definition.name for definition in OPERATORS]
EXECUTORS = every_executor()
#: Draws of each operator in the quick run, and in its campaign.
FEW, MANY = 3, 60
#: The share of lengths that are 0.
ZEROS = 0.25


def named(definitions: Sequence[OpDef]) -> list[object]:
    return [pytest.param(definition, id=definition.name) for definition in definitions]


def first_seed() -> int:
    """Of a campaign, whose draws are none of the quick run's."""
    return 1_000 + 10_000 * SEED


def test_every_operator_is_drawn() -> None:
    known = {(definition.domain, definition.name) for definition in operators()}
    assert {*GENERATORS, ("stitch", "Scan")} == known


@pytest.mark.parametrize("definition", named(OPERATORS))
def test_executors_agree_on_random_operations(definition: OpDef) -> None:
    for seed in range(FEW):
        assert not compare(definition, seed, 0, EXECUTORS).differences


def test_executors_agree_on_cubic_images_of_length_1() -> None:
    (resize,) = [each for each in operators() if each.name == "Resize"]
    assert not compare(resize, 1023, 0, EXECUTORS).differences


def test_executors_agree_on_a_number_without_axes_shifted_by_a_constant_with_one() -> None:
    (shift,) = [each for each in operators() if each.name == "BitShift"]
    assert not compare(shift, 207861003, 0, EXECUTORS).differences


def test_a_normalization_of_two_nearly_equal_numbers_magnifies_their_roundings() -> None:
    """0.8832886 and 0.8787382: ONNX Runtime's own GroupNormalization of the plain file, too, gives
    5.40798 where float64 gives 5.40864 (NumPy 5.40867)."""
    (group,) = [each for each in operators() if each.name == "GroupNormalization"]
    assert not compare(group, 1045, 0, EXECUTORS).differences
    row, one = drawn_operation(group, 1045, 0)
    assert 500 < magnification(row, one.operands) < 1500


@pytest.mark.campaign("executors")
@pytest.mark.parametrize("definition", named(OPERATORS))
def test_executors_agree_on_many_random_operations(definition: OpDef) -> None:
    for seed in range(first_seed(), first_seed() + MANY):
        assert not compare(definition, seed, 0, EXECUTORS).differences


def check_originals(first: int, count: int, names: Sequence[str]) -> None:
    """ONNX's reference evaluator and ONNX Runtime differ from the kernels where the table says."""
    listed = originals()
    for text in in_own_process("original", first, count, names):
        op, who, _ = text.split(" ", 2)
        assert (op, who) in listed, text


def test_kernels_agree_with_both_of_onnx_but_where_the_table_says() -> None:
    check_originals(0, 1, NAMES)


@pytest.mark.campaign("executors")
@pytest.mark.parametrize("definition", named(OPERATORS))
def test_kernels_agree_with_both_of_onnx_in_many_draws(definition: OpDef) -> None:
    check_originals(first_seed(), MANY, [definition.name])


def test_the_table_of_both_names_operators_and_who_differs() -> None:
    names = {*NAMES, "AffineGrid", "DynamicQuantizeLinear"}
    assert len(originals()) > 40
    for op, who in originals():
        assert op in names
        assert who in ("reference", "onnxruntime", "both")


def test_executors_agree_on_operands_without_elements() -> None:
    assert not in_own_process(ZEROS, 0, 1, NAMES)


@pytest.mark.campaign("empty_operands")
@pytest.mark.parametrize("definition", named(OPERATORS))
def test_executors_agree_on_many_operands_without_elements(definition: OpDef) -> None:
    assert not in_own_process(ZEROS, first_seed(), MANY, [definition.name])

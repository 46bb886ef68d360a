"""Operations of any rank, type, attribute and data: a result, or an error of ours that says why."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError, StitchError, TaskError
from stitch.ops import operators
from stitch.ops.applying import evaluate, infer_types, kernel_workspace
from stitch.program import SCAN, DataType, ValueType
from tests.support.operators.hostile_operations import Drawn, cases_by_operator, damaged
from tests.support.run_seed import SEED

CASES = cases_by_operator()
#: Results of more elements are inferred, and not computed.
COMPUTED = 20_000
#: Nor are those whose kernels say that they take more: a device refuses them before.
WORKSPACE = 1 << 26
KEY = lambda key: ".".join(filter(None, key))  # noqa: E731


def test_every_operator_has_a_sound_case_to_damage() -> None:
    # Scans are damaged with their bodies: tests/hostile/test_hostile_scans.py.
    assert {(d.domain, d.name) for d in operators()} == {*CASES, SCAN}


def survive(case: Drawn, draw: random.Random) -> bool:
    """Infer and compute; whether there was a result. Anything but our own errors passes out."""
    types = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype))
        for a in case.operands
    ]
    known = [a if draw.random() < 0.7 else None for a in case.operands]
    how: dict[str, Any] = {
        "domain": case.op.domain, "attributes": case.attributes, "outputs": case.outputs,
    }  # fmt: skip
    try:
        for constants in (known, case.operands):
            found = infer_types(case.op.name, types, constants=constants, **how)
            assert all(min(kind.shape, default=0) >= 0 for kind in found)
    except CompileError as error:
        assert str(error)
        return False
    words: dict[str, Any] = {"domain": case.op.domain, "attributes": case.attributes}
    taken = kernel_workspace(case.op.name, types, found, **words)
    if sum(math.prod(kind.shape) for kind in found) > COMPUTED or taken > WORKSPACE:
        return False
    try:
        evaluate(case.op.name, case.operands, **how)
    except StitchError as error:
        assert str(error)
        return False
    return True


def campaign(key: tuple[str, str], rounds: int, seed: int) -> None:
    draw = random.Random(f"{seed} {key}")
    for _ in range(rounds):
        case = damaged(draw, draw.choice(CASES[key]))
        try:
            survive(case, draw)
        except Exception as error:
            raise AssertionError(f"{case.text()}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("key", sorted(CASES), ids=KEY)
def test_a_damaged_operation_gives_a_result_or_says_why_not(key: tuple[str, str]) -> None:
    campaign(key, 60, 20261122)


@pytest.mark.campaign("hostile")
@pytest.mark.parametrize("key", sorted(CASES), ids=KEY)
def test_two_thousand_damaged_operations_give_results_or_say_why_not(key: tuple[str, str]) -> None:
    campaign(key, 2000, SEED)


F32, I64 = DataType.FLOAT32, DataType.INT64


def refused(op: str, *types: ValueType, constants: Any = None, **attributes: Any) -> str:
    with pytest.raises(CompileError) as caught:
        infer_types(op, types, constants=constants, attributes=attributes)
    return str(caught.value)


def test_a_concat_of_different_ranks_is_refused_with_both_shapes() -> None:
    for axis in (-1, 0, 1):
        text = refused("Concat", ValueType((2, 3), F32), ValueType((2,), F32), axis=axis)
        assert "[2, 3]" in text and "[2]" in text


def test_the_diagonal_of_an_einsum_is_of_axes_of_one_size() -> None:
    assert "diagonal" in refused("Einsum", ValueType((1, 3), F32), equation="ii->i")


def test_a_result_that_no_array_can_have_is_refused() -> None:
    target = np.array([0, 2**62])
    shape = ValueType((2,), I64)
    assert "too large" in refused("ConstantOfShape", shape, constants=[target])
    ranks = ValueType((40,), I64)
    ones = np.ones(40, np.int64)
    assert "has rank 40" in refused("ConstantOfShape", ranks, constants=[ones])


@pytest.mark.parametrize("name", ["strides", "dilations"])
def test_steps_of_windows_that_no_address_reaches_are_refused(name: str) -> None:
    image, weights = ValueType((1, 1, 5, 5), F32), ValueType((1, 1, 1, 1), F32)
    assert name in refused("Conv", image, weights, **{name: [1, 2**62]})


IMAGE = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)


def roi_align(region: list[float], **attributes: Any) -> Any:
    regions = np.array([region], np.float32)
    return evaluate("RoiAlign", [IMAGE, regions, np.zeros(1, np.int64)], attributes=attributes)[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e5, 1e30])
@pytest.mark.parametrize("ratio", [0, 2])
def test_a_region_that_is_no_number_or_far_beyond_its_image_is_refused(
    bad: float, ratio: int
) -> None:
    with pytest.raises(TaskError, match="a region is not finite or too large"):
        roi_align([0, 0, bad, 3], sampling_ratio=ratio)


def test_more_samples_of_a_region_than_any_image_has_are_refused() -> None:
    with pytest.raises(CompileError, match="too many points"):
        roi_align([0, 0, 3, 3], sampling_ratio=10**6)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_a_long_region_is_sampled_in_pieces_with_the_same_result(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"mode": mode, "output_height": 3, "output_width": 2}
    whole = roi_align([-2, 1, 13, 14], **words)
    monkeypatch.setattr("stitch.ops.steps.PIECE_NBYTES", 1)
    np.testing.assert_allclose(roi_align([-2, 1, 13, 14], **words), whole, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_resize_to_a_region_that_is_no_number_gives_numbers_or_says_why_not(bad: float) -> None:
    operands = [
        IMAGE,
        np.array([0, 0, 0, bad, 1, 1, 1, 1], np.float32),
        None,
        np.array([1, 2, 4, 4]),
    ]
    words = {"coordinate_transformation_mode": "tf_crop_and_resize"}
    for mode in ("nearest", "linear", "cubic"):
        made = evaluate("Resize", operands, attributes={**words, "mode": mode})[0]
        assert made.shape == IMAGE.shape

"""Every node test of ONNX is right or refused by name: with NumPy's kernels as the table says, with
ONNX Runtime too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import stitch
from tests.support.grids import in_turn
from tests.support.onnx import node_tests as suite
from tests.support.onnx.node_tests import CRASH, REFERENCE, REFUSED, RIGHT, WRONG, Verdict

ONNX = pytest.mark.campaign("onnx")
#: Node tests whose loops stay; other loops end early or change their types.
KEPT = ("test_scan9_", "test_linear_attention_")


@cache
def verdicts() -> tuple[Verdict, ...]:
    return tuple(suite.run_all(suite.cases()))


def assert_right_or_refused(found: Sequence[Verdict], right: float) -> None:
    """None is wrong, refusals say why, and so many are right."""
    assert [v for v in found if v.outcome in (WRONG, CRASH)] == []
    assert [v.case for v in found if v.outcome == REFUSED and len(v.detail) < 12] == []
    assert sum(v.outcome in (RIGHT, REFERENCE) for v in found) >= right


def test_of_every_32nd_case_none_is_wrong() -> None:
    chosen = suite.cases()[::32]
    assert_right_or_refused(suite.run_all(chosen), 0.9 * len(chosen))


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=ONNX) for n in range(1, 12))])
def test_with_onnxruntime_none_is_wrong_and_refusals_say_why(part: int) -> None:
    chosen = suite.cases()[part::12]
    with stitch.open_device("host", executor="onnxruntime") as device:
        found = [suite.run(case, device) for case in chosen]
    assert_right_or_refused(found, 0.65 * len(chosen))


@ONNX
def test_no_case_is_wrong() -> None:
    assert_right_or_refused(verdicts(), 0)


@ONNX
def test_at_least_1776_cases_are_right_with_our_own_kernels() -> None:
    assert sum(v.outcome == RIGHT for v in verdicts()) >= 1776


@ONNX
def test_the_checked_in_table_says_what_holds() -> None:
    """`python -m tests.support.onnx.node_tests --write` renews it."""
    assert suite.TABLE.read_text(encoding="utf-8") == suite.table_text(verdicts())


def test_a_difference_is_noticed() -> None:
    """The comparison itself: values, types and shapes count."""
    ones = np.ones(3, np.float32)
    assert not suite.difference(ones, ones.copy(), 1e-3, 1e-7)
    assert suite.difference(ones, ones * 1.01, 1e-3, 1e-7)
    assert suite.difference(ones, ones.astype(np.float64), 1e-3, 1e-7)
    assert suite.difference(ones, ones[:2], 1e-3, 1e-7)
    assert suite.difference(np.array([1, 2]), np.array([1, 3]), 1e-3, 1e-7)


# Loops ---------------------------------------------------------------------------------------


def has_loop(graph: Any) -> bool:
    return any(
        one.op_type in ("Scan", "Loop")
        or any(has_loop(a.g) for a in one.attribute if a.HasField("g"))
        for one in graph.node
    )


@cache
def cases_with_loops() -> tuple[Any, ...]:
    found = (c for c in suite.cases() if has_loop(c.model.graph) and suite.opset_of(c) >= 9)
    return tuple(case for case in found if case.name != "test_scan_sum")


@pytest.mark.parametrize(("executor", "unroll"), in_turn(["numpy", "onnxruntime"], [0, 4096]))
def test_cases_with_loops_are_right_kept_and_written_out(unroll: int, executor: str) -> None:
    chosen = cases_with_loops()
    assert len(chosen) >= 25
    with stitch.open_device("host", executor=executor) as device:
        verdicts = {case.name: suite.run(case, device, unroll) for case in chosen}
        usual = {case.name: suite.run(case, device) for case in chosen}
    assert [v for v in verdicts.values() if v.outcome in (WRONG, CRASH)] == []
    refused = [v.case for v in verdicts.values() if v.outcome == REFUSED]
    assert refused == [v.case for v in usual.values() if v.outcome == REFUSED]
    for case in chosen if unroll == 0 else ():
        if case.name.startswith(KEPT):
            for compiled in suite.compiled_case(case, unroll)[1]:
                assert any(o.op == "Scan" for o in compiled.graph.operations), case.name

"""Plans of segments: every round of every row once, in as few loops as is cheapest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.compiler.loops.ragged_segments import plan_segments


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("beginning", [0.0, 2.0, 1e3])
def test_a_plan_holds_every_round_of_every_row_once(most: int, beginning: float) -> None:
    lengths = [9, 9, 7, 4, 4, 4, 1]
    found = plan_segments(lengths, lambda rows: 1.0 + rows, beginning, 0.1, most, may_run_on=True)
    assert found is not None
    plan, _ = found
    assert 1 <= len(plan.segments) <= most
    rows, rounds = plan.round_of()
    assert len(rows) == plan.size
    ran = list(zip(rows.tolist(), rounds.tolist(), strict=True))
    assert len(set(ran)) == len(ran)
    assert {(row, n) for row, length in enumerate(lengths) for n in range(length)} <= set(ran)
    assert np.array_equal(plan.places(rows, rounds), np.arange(plan.size))


def test_segments_are_as_many_as_is_cheapest() -> None:
    lengths = [100, 50, 50, 49, 1]

    def segments(beginning: float, most: int = 9, *, may_run_on: bool = True) -> Any:
        found = plan_segments(
            lengths, lambda rows: float(rows), beginning, 0.0, most, may_run_on=may_run_on
        )
        return found and [(s.first, s.count, s.rows, s.is_exact) for s in found[0].segments]

    exact = [(0, 1, 5, True), (1, 48, 4, True), (49, 1, 3, True), (50, 50, 1, True)]
    assert segments(0.0) == exact
    assert segments(3.0) == [(0, 1, 5, True), (1, 49, 4, False), (50, 50, 1, True)]
    assert segments(1e6) == [(0, 100, 5, False)]
    assert segments(0.0, most=3) == [(0, 1, 5, True), (1, 49, 4, False), (50, 50, 1, True)]
    assert segments(1e6, may_run_on=False) == exact
    assert segments(0.0, most=3, may_run_on=False) is None

"""How calls ran is said: their loops, what was not taken, why they went element by element."""

from __future__ import annotations

from typing import Any

from stitch import fractal as ops
from stitch.fractal import FractalTensor


def add(state: Any, x: Any) -> Any:
    return state + x


def test_a_report_names_schedules_their_costs_and_what_went_element_by_element() -> None:
    rows = FractalTensor([[1, 2, 3, 0], [4, 5, 6, 0]])
    with ops.mode("parallel") as report:
        assert report.explain() == "no calls in parallel"
        ops.map(lambda row: ops.scan(add, row), rows)
        ops.map(lambda row: ops.filter(lambda x: x > 2, row), rows)
    first, second, *filters = report.explain().splitlines()
    assert first.startswith("map: one program; loop of ")
    assert "loop of 2 rounds at test_reports_of_calls.py:" in first
    assert "batch (" in first and "not rounds (" in first and "loop of 3 rounds" in first
    assert second.startswith("map: element by element, as the length of the result of filter")
    assert [line.partition(";")[0] for line in filters] == ["filter: one program"] * 2


def test_calls_of_one_report_are_not_in_another() -> None:
    xs = FractalTensor([1, 2, 3])
    with ops.mode("parallel") as outer:
        with ops.mode("parallel") as inner:
            ops.reduce(add, xs)
        ops.fold(add, xs)
    assert inner.explain().startswith("reduce: ") and outer.explain().startswith("foldl: ")
    with ops.mode("sequential") as report:
        ops.fold(add, xs)
    assert report.explain() == "no calls in parallel"

"""What the quick run has of a grid: every value, or every two of them together."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.grids import (
    every,
    every_row,
    in_pairs,
    in_turn,
)


def quick(points: list[Any]) -> list[tuple[Any, ...]]:
    return [p.values for p in points if all(mark.name != "campaign" for mark in p.marks)]


def test_in_turn_has_all_points_and_runs_every_value_of_each_parameter() -> None:
    points = in_turn("abcd", [1, 2, 3])
    assert [p.values for p in points] == list(itertools.product("abcd", [1, 2, 3]))
    assert quick(points) == [("a", 1), ("b", 2), ("c", 3), ("d", 1)]


def test_in_pairs_runs_every_two_values_of_different_parameters() -> None:
    axes = ["abcde", [1, 2, 3], [True, False]]
    points = in_pairs(*axes)
    assert len(points) == 30
    ran = quick(points)
    assert len(ran) < 20
    for first, second in itertools.combinations(range(3), 2):
        wanted = set(itertools.product(axes[first], axes[second]))
        assert {(point[first], point[second]) for point in ran} == wanted


def test_every_third_runs_always() -> None:
    assert quick(every(3, range(7))) == [(0,), (3,), (6,)]
    assert len(every(3, range(7))) == 7
    assert quick(every_row(2, zip("abc", range(3), strict=True))) == [("a", 0), ("c", 2)]

"""Grids of parameters: the quick suite runs a few of their points, the campaign all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

CAMPAIGN = pytest.mark.campaign("grids")
#: A point of a grid: which value of each parameter.
Point = tuple[int, ...]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """All combinations. The quick run has every value at least once, of the longest parameter
    exactly once: beside it the others go round."""
    return _marked(axes, 1)


def in_pairs(*axes: Iterable[Any]) -> list[Any]:
    """All combinations. The quick run has every two values of different parameters together."""
    return _marked(axes, 2)


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """All values. The quick run has the first of each `step`."""
    return [_param((v,), number % step == 0) for number, v in enumerate(values)]


def every_row(step: int, rows: Iterable[Any]) -> list[Any]:
    """All rows, of several parameters each. The quick run has the first of each `step`."""
    return [
        _param((row,) if hasattr(row, "marks") else row, number % step == 0)
        for number, row in enumerate(rows)
    ]


def named(name: Callable[[Any], str], values: Iterable[Any]) -> list[Any]:
    """Values of one parameter with what they are called."""
    return [pytest.param(value, id=name(value)) for value in values]


def rows(values: Iterable[Sequence[Any]]) -> list[Any]:
    """Values of several parameters that belong together, as one axis of a grid."""
    return [pytest.param(*row) for row in values]


def _marked(axes: Sequence[Iterable[Any]], strength: int) -> list[Any]:
    values = [tuple(axis) for axis in axes]
    usual = [[at for at, value in enumerate(axis) if not _is_long(value)] for axis in values]
    found = covering([len(axis) for axis in usual], strength)
    quick = {tuple(axis[at] for axis, at in zip(usual, point, strict=True)) for point in found}
    points = itertools.product(*(range(len(axis)) for axis in values))
    return [
        _param([axis[at] for axis, at in zip(values, point, strict=True)], point in quick)
        for point in points
    ]


def _is_long(value: Any) -> bool:
    return any(mark.name == "campaign" for mark in getattr(value, "marks", ()))


def _param(values: Sequence[Any], is_quick: bool) -> Any:
    """Values may be params themselves: what they are called and marked with stays."""
    parts = [v if hasattr(v, "marks") else pytest.param(v) for v in values]
    marks = [mark for part in parts for mark in part.marks]
    ids = [_id_of(part) for part in parts]
    return pytest.param(
        *(value for part in parts for value in part.values),
        marks=marks + [CAMPAIGN] * (not is_quick),
        id=None if None in ids else "-".join(map(str, ids)),
    )


def _id_of(part: Any) -> str | None:
    """What a value is called: by its param, or as pytest calls plain values."""
    if isinstance(part.id, str):
        return part.id
    is_plain = all(isinstance(v, str | int | float | bool) for v in part.values)
    return "-".join(map(str, part.values)) if is_plain else None


def covering(sizes: Sequence[int], strength: int) -> set[Point]:
    """Points in which all values of every `strength` parameters meet; always the same ones.

    >>> sorted(covering([3, 2], 1))
    [(0, 0), (1, 1), (2, 0)]
    >>> len(covering([4, 3, 3], 2))
    12
    """

    # Along the diagonals, so that each of the first points has other values than those before.
    longest = max(sizes, default=0)
    if strength == 1:
        return {tuple(at % size for size in sizes) for at in range(longest)}

    def meetings(point: Point) -> set[tuple[Point, Point]]:
        chosen = itertools.combinations(range(len(sizes)), strength)
        return {(which, tuple(point[axis] for axis in which)) for which in chosen}

    points = [
        tuple((at + shift) % size for size, shift in zip(sizes, shifts, strict=True))
        for shifts in itertools.product(*(range(size) for size in sizes))
        for at in range(longest)
    ]
    points = list(dict.fromkeys(points))
    left = set().union(*map(meetings, points))
    found: set[Point] = set()
    while left:
        best = max(points, key=lambda point: len(meetings(point) & left))
        found.add(best)
        left -= meetings(best)
    return found

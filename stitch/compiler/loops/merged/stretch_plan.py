"""The plan of stretches: between which rounds the same rows run together.

Rows are numbered longest first, so that those still running are the first. A stretch may run on for
rows that end in it: what these compute past their end nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.program import Array

#: Of more lengths than that, only so many are weighed as ends of stretches.
MOST_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class RowStretch:
    """Some rounds of the first rows; of these the first `going_on` are not at their end after it.

    `is_exact`: all others end with its last round.
    """

    first: int
    count: int
    rows: int
    going_on: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class StretchPlan:
    """The lengths of the rows, longest first, and the stretches."""

    lengths: tuple[int, ...]
    stretches: tuple[RowStretch, ...]

    @property
    def size(self) -> int:
        """Rounds of rows, those past the end of a row among them."""
        return sum(s.count * s.rows for s in self.stretches)

    def round_of(self) -> tuple[Array, Array]:
        """In the order in which stretches run, the row and the round of each round of a row.

        >>> plan = StretchPlan((3, 1), (RowStretch(0, 1, 2, 1, True), RowStretch(1, 2, 1, 0, True)))
        >>> [each.tolist() for each in plan.round_of()]
        [[0, 1, 0, 0], [0, 0, 1, 2]]
        """
        rows = [np.tile(np.arange(s.rows), s.count) for s in self.stretches]
        rounds = [s.first + np.repeat(np.arange(s.count), s.rows) for s in self.stretches]
        return np.concatenate(rows), np.concatenate(rounds)

    def places(self, rows: Array, rounds: Array) -> Array:
        """Where in that order rounds of rows are."""
        firsts = np.array([s.first for s in self.stretches])
        widths = np.array([s.rows for s in self.stretches])
        sizes = np.array([s.count * s.rows for s in self.stretches])
        at = np.searchsorted(firsts, rounds, side="right") - 1
        found: Array = (np.cumsum(sizes) - sizes)[at] + (rounds - firsts[at]) * widths[at] + rows
        return found


def planned(
    lengths: Sequence[int], round_seconds: Callable[[int], float], stretch_seconds: float,
    kept_seconds: float, most: int, *, may_run_on: bool,
) -> tuple[StretchPlan, float] | None:  # fmt: skip
    """The cheapest plan of at most so many stretches for rows of these lengths, longest first, and
    what it costs; None where there is none.

    `round_seconds`: of a round of so many rows; `stretch_seconds`: what each stretch takes beside
    its rounds; `kept_seconds`: what a row takes more for a round of a stretch in which some end.
    """
    ends = np.unique(np.array(lengths))
    if len(ends) > most and not may_run_on:
        return None
    if len(ends) > MOST_LENGTHS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_LENGTHS).round().astype(int)]
    if ends[0] <= 0:
        return None
    falling = np.array(lengths)
    begins = np.concatenate([[0], ends[:-1]])
    running = [int(np.sum(falling > begin)) for begin in begins]
    each = np.array([round_seconds(n) for n in running])
    inexact = np.array([len(np.unique(falling[falling > begin])) for begin in begins])
    # By first round and end: what a stretch costs, infinite where it would end before it begins.
    spans = (ends[None, :] - begins[:, None]).astype(float)
    after = np.array([len(np.unique(falling[falling > end])) for end in ends])
    ending = inexact[:, None] - after[None, :]
    cost = spans * (each[:, None] + kept_seconds * np.array(running)[:, None] * (ending > 1))
    cost = np.where((spans > 0) & ((ending <= 1) | may_run_on), cost + stretch_seconds, np.inf)
    chosen = _cheapest(cost, most)
    if chosen is None:
        return None
    stretches, total, at = [], 0.0, 0
    for end in chosen:
        total += float(cost[at, end])
        going_on = running[end + 1] if end + 1 < len(ends) else 0
        stretches.append(
            RowStretch(
                int(begins[at]), int(spans[at, end]), running[at], going_on,
                bool(ending[at, end] <= 1),
            )
        )  # fmt: skip
        at = end + 1
    return StretchPlan(tuple(map(int, lengths)), tuple(stretches)), total


def _cheapest(cost: Array, most: int) -> list[int] | None:
    """The ends of the stretches of the cheapest way from the first round to the last, of at most so
    many; `cost[i, j]`: of one from begin i to end j."""
    many = len(cost)
    best = np.full(many + 1, np.inf)
    best[0] = 0.0
    ways: list[Array] = []
    found: tuple[float, int] = (np.inf, 0)
    for number in range(1, min(most, many) + 1):
        whole = best[:many, None] + cost
        ways.append(np.argmin(whole, axis=0))
        best = np.concatenate([[np.inf], np.min(whole, axis=0)])
        found = min(found, (float(best[many]), number))
    if not np.isfinite(found[0]):
        return None
    ends, at = [], many
    for way in reversed(ways[: found[1]]):
        ends.append(at - 1)
        at = int(way[at - 1])
    return ends[::-1]

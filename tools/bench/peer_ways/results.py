"""What was measured: rows, ratios, the table, and the goals that were missed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from peer_ways.cases import Goal

Side = Literal["ours", "linked", "calls", "other form", "peer", "yardstick"]
SIDES: tuple[Side, ...] = ("ours", "linked", "calls", "other form", "peer", "yardstick")


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one subject: microseconds per pass, one number for each round.

    `peer` is the name that `--peers` has for it; `stitched`: it runs the programs one by one.
    """

    way: str
    side: Side
    times_us: tuple[float, ...]
    peer: str = ""
    stitched: bool = True

    @property
    def least_us(self) -> float:
        """The fastest round."""
        return min(self.times_us)

    @property
    def median_us(self) -> float:
        """The middle round."""
        return median(self.times_us)

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "way": self.way, "side": self.side, "peer": self.peer, "stitched": self.stitched,
            "least_us": self.least_us, "median_us": self.median_us,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One subject: all ways, those that could not run and why, and the goal."""

    name: str
    text: str
    goal: float
    rows: tuple[Row, ...]
    absent: tuple[tuple[str, str], ...]
    stitched_only: bool = False
    more_goals: tuple[Goal, ...] = ()

    def best(self, side: str, peer: str | None = None, stitched_only: bool = False) -> Row | None:
        """The fastest way of a side, or of one peer."""
        found = (
            r for r in self.rows
            if r.side == side and peer in (None, r.peer) and (r.stitched or not stitched_only)
        )  # fmt: skip
        return min(found, key=lambda r: r.least_us, default=None)

    def ratio(self) -> float | None:
        """What the goal is about; nothing where ours or every peer is missing."""
        return self._over(self.best("peer", stitched_only=self.stitched_only))

    def ratio_to(self, side: Side) -> float | None:
        """Best of ours over the best of a side; nothing where one of them did not run."""
        return self._over(self.best(side))

    def _over(self, other: Row | None) -> float | None:
        mine = self.best("ours")
        return mine.least_us / other.least_us if mine and other else None

    def pairs(self) -> Iterator[tuple[Goal, Row, Row]]:
        """What the further goals are about, where both ways ran."""
        for goal in self.more_goals:
            mine = self.best(goal.side)
            other = next((row for row in self.rows if row.way == goal.peer_way), None)
            if mine is not None and other is not None:
                yield goal, mine, other

    def comparisons(self) -> Iterator[tuple[str, Row, Row]]:
        """Best of ours beside the best of each peer, and beside the best of all."""
        mine = self.best("ours")
        others = [(name, self.best("peer", name)) for name in dict.fromkeys(
            row.peer for row in self.rows if row.side == "peer"
        )]  # fmt: skip
        others.append(("best peer, stitched", self.best("peer", stitched_only=True)))
        others.append(("best peer", self.best("peer")))
        others.append(("NumPy by hand", self.best("yardstick")))
        for name, other in others:
            if mine is not None and other is not None:
                yield name, mine, other

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "name": self.name, "text": self.text,
            "goal": self.goal if math.isfinite(self.goal) else None,
            "rows": [row.as_data() for row in self.rows],
            "absent": dict(self.absent),
            "ratio": self.ratio(),
            "ratio_to_hand": self.ratio_to("yardstick"),
            "ratios": {
                name: {"least": mine.least_us / other.least_us, "median": paired(mine, other)}
                for name, mine, other in self.comparisons()
            },
            "more_goals": [
                {"side": goal.side, "peer": goal.peer_way, "goal": goal.most,
                 "more_us": goal.more_us, "way": mine.way,
                 "least": mine.least_us / other.least_us, "median": paired(mine, other)}
                for goal, mine, other in self.pairs()
            ],
        }  # fmt: skip


def paired(mine: Row, other: Row) -> float:
    """The median over the rounds of the ratio in one round."""
    return median(a / b for a, b in zip(mine.times_us, other.times_us, strict=True))


def table(result: Result) -> str:
    """A subject's rows by side, the fastest first, and its ratios."""
    peer = result.best("peer")
    lines = [f"{result.name}: {result.text}", f"{'':48}  least us  median us  / best peer"]
    for side in SIDES:
        rows = sorted((r for r in result.rows if r.side == side), key=lambda r: r.least_us)
        if not rows and side != "peer":
            continue
        lines.append(f"  {side}")
        for row in rows:
            over = f"{row.least_us / peer.least_us:12.2f}" if peer else f"{'-':>12}"
            lines.append(f"    {row.way:44} {row.least_us:9.2f} {row.median_us:10.2f} {over}")
    lines += [f"    {name:44} {reason}" for name, reason in result.absent]
    for name, mine, other in result.comparisons():
        lines.append(
            f"  ours / {name:20} {mine.least_us / other.least_us:6.2f} of least times, "
            f"{paired(mine, other):.2f} median of rounds ({mine.way} / {other.way})"
        )
    ratio = result.ratio()
    if ratio is not None and math.isfinite(result.goal):
        kind = "best peer, stitched" if result.stitched_only else "best peer"
        lines.append(f"  goal: ours / {kind} at most {result.goal}: {ratio:.2f}")
    for goal, mine, other in result.pairs():
        lines.append(
            f"  goal: {goal.side} / {goal.peer_way} at most {_said(goal)}: "
            f"{mine.least_us / other.least_us:.2f} of least times, {paired(mine, other):.2f} "
            f"median of rounds ({mine.way})"
        )
    return "\n".join(lines) + "\n"


def missed_goals(results: Sequence[Result]) -> list[str]:
    """What `--check` complains of."""
    missed = []
    for result in results:
        ratio = result.ratio()
        if ratio is None:
            missed.append(f"{result.name}: nothing to compare: ours or every peer is missing")
        elif ratio > result.goal:
            missed.append(f"{result.name}: {ratio:.2f} x the best peer, not {result.goal}")
        for goal, mine, other in result.pairs():
            over = mine.least_us / other.least_us
            if mine.least_us > goal.most * other.least_us + goal.more_us:
                missed.append(
                    f"{result.name}: {mine.way} {over:.2f} x {other.way}, not {_said(goal)}"
                )
    return missed


def _said(goal: Goal) -> str:
    return f"{goal.most}" + (f" and {goal.more_us:.0f} us" if goal.more_us else "")

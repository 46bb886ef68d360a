"""What was measured: rows of ways, single figures with goals, the tables, and the goals missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fractal_ways.cases import Absent, RatioGoal
from fractal_ways.measuring import Spent

#: Ours is what users get; with schedules by name, and in mode parallel, it stands beside.
OURS, NAMED, TRACED = "ours", "ours, schedules by name", "ours, mode parallel"
PEER, SLOW = "peer", "one operation after the other"


@dataclass(frozen=True, slots=True)
class Row:
    """A way and its least milliseconds, of the processor and of the clock."""

    way: str
    side: str
    processor_ms: float
    clock_ms: float
    note: str = ""

    @staticmethod
    def of(way: str, side: str, spent: Spent, note: str = "") -> Row:
        """A row of seconds."""
        return Row(way, side, spent.processor * 1e3, spent.clock * 1e3, note)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `most` is its goal, if it has one. No `value`: it could not be had, and `note`
    says why."""

    name: str
    value: float | None
    unit: str = ""
    most: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        """Whether there is a goal, and it is not met."""
        return self.most is not None and (self.value is None or self.value > self.most)

    def text(self) -> str:
        """A line of the table."""
        value = "-" if self.value is None else f"{self.value:.4g}"
        goal = "" if self.most is None else f"{self.most:g}, {'missed' if self.missed else 'met'}"
        return f"  {self.name:66} {value:>9} {self.unit:6} {goal:14} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one subject."""

    name: str
    text: str
    rows: tuple[Row, ...] = ()
    absent: tuple[Absent, ...] = ()
    goals: tuple[RatioGoal, ...] = ()
    more: tuple[Figure, ...] = ()

    def figures(self) -> Iterator[Figure]:
        """Best of ours over each peer, then what else was found."""
        mine = self._best(OURS)
        goals = {goal.peer: goal for goal in self.goals}
        peers = [row for row in self.rows if row.side == PEER]
        for row in peers:
            if mine is None:
                break
            goal = goals.pop(row.way, None)
            name = f"ours / {row.way}" + (f" ({goal.name})" if goal else "")
            ratio = mine.processor_ms / max(row.processor_ms, 1e-9)
            clock = mine.clock_ms / max(row.clock_ms, 1e-9)
            yield Figure(
                name, ratio, "x", goal.most if goal else None,
                f"by the clock {clock:.2f}; {mine.way}",
            )  # fmt: skip
        without = {each.name for each in self.absent}
        for goal in goals.values():
            if goal.peer not in without:
                yield Figure(
                    f"ours / {goal.peer} ({goal.name})", None, "x", goal.most, "not measured"
                )
        yield from self.more

    def _best(self, side: str) -> Row | None:
        rows = [row for row in self.rows if row.side == side]
        return min(rows, key=lambda row: row.processor_ms, default=None)

    def table(self) -> str:
        """Rows by side, the fastest first; what is absent; figures."""
        lines = [f"{self.name}: {self.text}"]
        if self.rows:
            lines.append(f"  {'way':50} {'cpu ms':>10} {'wall ms':>10}  loops")
        for side in dict.fromkeys(row.side for row in self.rows):
            lines.append(f"  {side}")
            rows = [row for row in self.rows if row.side == side]
            lines += [
                f"    {row.way:48} {row.processor_ms:10.3f} {row.clock_ms:10.3f}  "
                f"{row.note}".rstrip()
                for row in sorted(rows, key=lambda row: row.processor_ms)
            ]
        if self.absent:
            lines.append("  not measured")
        lines += [f"    {each.name:48} {each.reason}" for each in self.absent]
        figures = list(self.figures())
        if figures:
            lines.append(f"  {'figure':66} {'':>9} {'':6} goal")
        lines += [figure.text() for figure in figures]
        return "\n".join(lines) + "\n"

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "name": self.name, "text": self.text, "rows": [asdict(row) for row in self.rows],
            "absent": {each.name: each.reason for each in self.absent},
            "figures": [asdict(f) | {"missed": f.missed} for f in self.figures()],
        }  # fmt: skip


def missed_goals(results: Sequence[Result]) -> list[str]:
    """What `--check` complains of."""
    return [
        f"{result.name}: {figure.name} "
        + (figure.note if figure.value is None else f"{figure.value:.4g}{figure.unit and ' '}"
           f"{figure.unit}, not {figure.most:g}")
        for result in results
        for figure in result.figures()
        if figure.missed
    ]  # fmt: skip

"""Rows, what may be spent on them, and times of ways that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

#: Passes of a way before a stretch is timed.
SETTLE = 2
#: Makes one pass.
Pass = Callable[[], object]
#: Seconds per pass in each round.
Times = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, and how often.

    `stretch` is about how many programs run in one timed stretch: fewer than the system lets run in
    one go. `lengths` are programs of pipelines, `rings` how many results are held in turn, `kept`
    how many results are kept at most, `tasks` of how many the rate is taken.
    """

    rounds: int
    stretch: int
    lengths: tuple[int, ...]
    windows: tuple[int, ...]
    rings: tuple[int, ...]
    kept: int
    tasks: int
    warm: int


FULL = Effort(
    rounds=11, stretch=256, lengths=(1, 2, 4, 16, 64, 65, 200, 300), windows=(1, 8, 64),
    rings=(1, 2, 3, 5, 8, 13, 20), kept=1000, tasks=2000, warm=40,
)  # fmt: skip
QUICK = Effort(
    rounds=2, stretch=8, lengths=(2, 65), windows=(1, 64), rings=(3,), kept=50, tasks=200, warm=4
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One number and its goal: `value` is a ratio where `unit` is empty.

    `value` is None where it could not be had, and `note` says why, or what was the worst. Where
    `at_least`, more is better. `ours_us` and `peer_us` are the least times of a pass.
    """

    name: str
    value: float | None
    goal: float
    unit: str = ""
    at_least: bool = False
    ours_us: float | None = None
    peer_us: float | None = None
    median: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        """Whether the goal is missed; what could not be had is."""
        if self.value is None:
            return True
        return self.value < self.goal if self.at_least else self.value > self.goal

    def text(self) -> str:
        """A line of the table."""
        value = "-" if self.value is None else f"{self.value:,.2f}{self.unit and ' ' + self.unit}"
        goal = f"{'>=' if self.at_least else '<='} {self.goal:g}"
        times = "".join(
            f"{'' if us is None else format(us, '.2f'):>11}" for us in (self.ours_us, self.peer_us)
        )
        return f"{self.name:64} {value:>15} {goal:>9}{times}  {self.note}".rstrip()


def absent(name: str, goal: float, why: str) -> Row:
    """A row that could not be measured here."""
    return Row(name, None, goal, note=why)


def ratio(name: str, ours: Times, peer: Times, goal: float, note: str = "") -> Row:
    """Ours over a peer's by least times, and by the median of the ratios of each round."""
    mine, other = min(ours), min(peer)
    middle = median(a / b for a, b in zip(ours, peer, strict=True))
    return Row(name, mine / other, goal, "", False, mine * 1e6, other * 1e6, middle, note)


def interleaved(
    ways: Mapping[str, Pass], passes: int, effort: Effort, after: Pass | None = None
) -> dict[str, Times]:
    """Seconds per pass of each way in each round; every round begins with another way.

    Before that each way runs `effort.warm` passes, and before each stretch a few that are not
    timed: another way ran since. `after` is called, untimed, after each stretch.
    """
    for way in ways.values():
        for _ in range(effort.warm):
            way()
        if after is not None:
            after()
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(effort.rounds + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            way = ways[name]
            for _ in range(SETTLE):
                way()
            started = time.perf_counter()
            for _ in range(passes):
                way()
            spent = (time.perf_counter() - started) / passes
            if number:  # The first round warms up.
                times[name].append(spent)
            if after is not None:
                after()
    return {name: tuple(found) for name, found in times.items()}


def passes_of(programs: int, effort: Effort) -> int:
    """How many passes make a stretch."""
    return max(4, effort.stretch // programs)


def counts_of(device: Any) -> dict[str, int] | None:
    """What a device counts since it opened; None if it does not tell."""
    statistics = getattr(device, "statistics", None)
    if statistics is None:
        return None
    counted = statistics()
    told = counted if isinstance(counted, Mapping) else asdict(counted)
    return {name: int(told[name]) for name in ("plans_made", "code_written")}

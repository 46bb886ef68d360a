"""Notes: how a loop of a graph runs, for those who ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopNote:
    """How a loop runs: where it was written, its rounds, the schedule, the seconds that this is
    estimated to take and those of the schedules that were not taken, operators without a batching
    rule, how many rounds are computed at once, where the schedule is `blocks`; `merged`: what loops
    run together; `executor`: by whose rates the schedule was taken."""

    where: str
    count: int
    schedule: str
    costs: tuple[tuple[str, float], ...] = ()
    without_rule: tuple[str, ...] = ()
    lanes: int = 0
    merged: str = ""
    executor: str = ""

    def text(self) -> str:
        """One line.

        >>> costs = (("hoisted", 1e-3), ("rounds", 2e-3))
        >>> LoopNote("net.py:3", 64, "hoisted", costs, executor="numpy").text()
        'loop of 64 rounds at net.py:3: hoisted (1 ms by numpy); not rounds (2 ms)'
        >>> LoopNote("net.py:3", 64, "blocks", (("blocks", 1e-3),), lanes=16).text()
        'loop of 64 rounds at net.py:3: blocks of 16 (1 ms)'
        """
        costs = {name: f"{seconds * 1e3:.3g} ms" for name, seconds in self.costs}
        size = f" of {self.lanes}" if self.lanes else ""
        by = f" by {self.executor}" if self.executor else ""
        taken = f" ({costs.pop(self.schedule)}{by})" if self.schedule in costs else ""
        others = ", ".join(f"{name} ({text})" for name, text in costs.items())
        rules = ", ".join(self.without_rule)
        rounds = f"{self.count} round{'s' * (self.count != 1)}"
        return (
            f"loop of {rounds} at {self.where or 'an unknown line'}: {self.schedule}{size}"
            f"{self.merged and f', {self.merged}'}{taken}{f'; not {others}' if others else ''}"
            f"{f'; without a batching rule, one by one: {rules}' if rules else ''}"
        )

"""Budgets of a run: how much it may cost, by itself or beside an earlier run.

A budget is `KEY`, `KEY:+N`, `KEY:+P%` or `KEY:N`: it may not grow, may grow by N or by P percent,
or may be at most N. Keys are `copies`, `bytes`, `seconds` (simulated, of copies),
`program_seconds` (simulated) and `peak.SPACE` (bytes per bank).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

from stitch.budget import parse_nbytes
from stitch.errors import UsageError, unknown
from stitch.program import Space

if TYPE_CHECKING:
    from stitch.report.run_copies import RunCopies

PEAK_KEYS = tuple(f"peak.{space.value}" for space in Space)
BUDGET_KEYS = ("copies", "bytes", "seconds", "program_seconds", *PEAK_KEYS)
FORM = "KEY, KEY:+N, KEY:+P% or KEY:N, separated by commas"
#: Sums of simulated seconds differ in the last digits.
ROUNDING = 1e-9
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?")

Bound: TypeAlias = Literal["added", "percent", "most"]


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget: the key, and by how much it may grow, in units or percent, or the most."""

    key: str
    bound: Bound
    amount: float

    @property
    def compares(self) -> bool:
        """Return whether it depends on another run."""
        return self.bound != "most"

    @property
    def is_of_totals(self) -> bool:
        """Return whether it compares sums over two runs, which must be of one length."""
        return self.compares and self.key not in PEAK_KEYS

    def allowed(self, old: float) -> float:
        """Return the most that a run may have beside an earlier one; counts are exact.

        >>> [budget.allowed(1000) for budget in parse_budgets("copies:+0.3%,bytes:+0.29%")]
        [1003, 1002]
        """
        if self.bound != "percent":
            return self.amount + (old if self.bound == "added" else 0)
        if self.key.endswith("seconds"):
            return old * (1 + self.amount / 100)
        return math.floor(old * (1 + Fraction(repr(self.amount)) / 100))

    def text(self) -> str:
        """Return the budget as `parse_budgets` reads it.

        >>> [budget.text() for budget in parse_budgets("copies,bytes:+4KiB,seconds:+5%,peak.l1:2")]
        ['copies:+0', 'bytes:+4096', 'seconds:+5%', 'peak.l1:2']
        """
        sign = "" if self.bound == "most" else "+"
        number = f"{self.amount:.15g}" if isinstance(self.amount, float) else str(self.amount)
        return f"{self.key}:{sign}{number}" + ("%" if self.bound == "percent" else "")


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """A budget, what two runs have of it, and what the new one may have."""

    budget: Budget
    old: float
    new: float
    allowed: float

    @property
    def is_kept(self) -> bool:
        """Return whether the new run keeps the budget."""
        is_sum = self.budget.key.endswith("seconds")
        slack = ROUNDING * max(self.old, self.new) if is_sum else 0
        return self.new <= self.allowed + slack

    def text(self) -> str:
        """Describe the result.

        >>> (budget,) = parse_budgets("bytes:+10%")
        >>> BudgetResult(budget, 100, 128, budget.allowed(100)).text()
        'bytes: 128 B, at most 110 B allowed (bytes:+10%; 100 B before)'
        """
        key = self.budget.key
        text = f"{key}: {amount_text(key, self.new)}, at most {amount_text(key, self.allowed)} "
        before = f"; {amount_text(key, self.old)} before" if self.budget.compares else ""
        return f"{text}allowed ({self.budget.text()}{before})"


def parse_budgets(*texts: str) -> tuple[Budget, ...]:
    """Parse budgets; raise `UsageError` for an unknown key, a key twice, or no number.

    >>> parse_budgets("copies", "bytes:+5%")[1]
    Budget(key='bytes', bound='percent', amount=5.0)
    """
    budgets: dict[str, Budget] = {}
    for word in ",".join(texts).split(","):
        budget = _parse(word.strip())
        if budget.key in budgets:
            raise UsageError(f"two budgets for {budget.key!r}", got=", ".join(texts))
        budgets[budget.key] = budget
    return tuple(budgets.values())


def _parse(word: str) -> Budget:
    key, colon, bound = word.partition(":")
    key, bound = key.strip(), bound.strip()
    if key not in BUDGET_KEYS:
        what = f"there is no budget {key!r}" if key else "a budget has no key"
        raise unknown(what, key, BUDGET_KEYS, remedy=f"budgets are {FORM}")
    if not colon:
        return Budget(key, "added", 0)
    if bound.endswith("%"):
        number = bound[:-1].strip()
        if not number.startswith("+"):
            raise _wrong(word, "a percentage is the growth over the old run: +5%")
        return Budget(key, "percent", _number(word, key, number[1:], is_percent=True))
    if bound.startswith("+"):
        return Budget(key, "added", _number(word, key, bound[1:]))
    return Budget(key, "most", _number(word, key, bound))


def _number(word: str, key: str, text: str, *, is_percent: bool = False) -> float:
    text = text.strip()
    if _NUMBER.fullmatch(text):
        number = float(text)
        is_whole = is_percent or key.endswith("seconds") or number == int(min(number, 1e18))
        if math.isfinite(number) and is_whole:
            return number if is_percent or key.endswith("seconds") else int(number)
    elif not is_percent and (key == "bytes" or key in PEAK_KEYS):
        try:
            return parse_nbytes(text)
        except UsageError:
            pass
    kind = "a percentage" if is_percent else "an amount of " + key
    raise _wrong(word, f"{kind} is a number of at least 0", got=text)


def _wrong(word: str, expected: str, got: str | None = None) -> UsageError:
    return UsageError(f"the budget {word!r} is malformed", expected=expected, got=got,
                      remedy=f"budgets are {FORM}")  # fmt: skip


def check_budgets(
    budgets: Iterable[Budget], old: RunCopies, new: RunCopies
) -> tuple[BudgetResult, ...]:
    """Compare the budgets with two runs.

    Raises `UsageError` for the peak of a space that their machine lacks.
    """
    results = []
    for budget in budgets:
        space = budget.key.removeprefix("peak.")
        if budget.key in PEAK_KEYS and new.spaces and space not in new.spaces:
            raise UsageError(
                f"machine {new.machine!r} has no {space} for the budget {budget.text()!r}",
                expected=", ".join(f"peak.{one}" for one in new.spaces),
            )
        before, now = (amount(budget.key, run) for run in (old, new))
        results.append(BudgetResult(budget, before, now, budget.allowed(before)))
    return tuple(results)


def amount(key: str, run: RunCopies) -> float:
    """Return what a run has of a key."""
    if key in PEAK_KEYS:
        return run.peaks.get(key.removeprefix("peak."), 0)
    number: float = getattr(run.cost, "nbytes" if key == "bytes" else key)
    return number


def amount_text(key: str, number: float) -> str:
    """Return an amount with its unit.

    >>> amount_text("seconds", 1.5e-6), amount_text("peak.l1", 64), amount_text("copies", 3)
    ('1.500 us', '64 B per bank', '3')
    """
    if key.endswith("seconds"):
        return f"{number * 1e6:.3f} us"
    unit = {"copies": "", "bytes": " B"}.get(key, " B per bank")
    return f"{math.floor(number + 1e-6)}{unit}"

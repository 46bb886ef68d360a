"""What the benchmarks share that stand beside times of silicon: files of them, and errors."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Protocol, TypeVar

from stitch.errors import UsageError

_T = TypeVar("_T")


class Compared(Protocol):
    """A row of what was measured beside what is simulated."""

    @property
    def error(self) -> float: ...


def read_timed(
    path: Path, what: str, columns: Sequence[str], read: Callable[[dict[str, str], str], _T]
) -> list[_T]:
    """What `read` makes of each row of a file, by the names of its columns, and of where it stands.

    Raises `UsageError` for a file that cannot be read or lacks a column; `what` says what is timed.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.DictReader(stream)
            absent = [name for name in columns if name not in (lines.fieldnames or ())]
            if absent:
                raise UsageError(
                    f"{path} is no file of timed {what}", expected="columns " + ", ".join(columns),
                    got="without " + ", ".join(absent),
                )  # fmt: skip
            return [read(line, f"{path}:{lines.line_num}") for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}", got=str(error)) from error


def quantile(errors: Sequence[float], part: float) -> float:
    """The least error that so many of all do not exceed.

    >>> quantile([0.3, 0.1, 0.2], 0.5), quantile([0.3, 0.1, 0.2], 0.9)
    (0.2, 0.3)
    """
    return sorted(errors)[max(0, math.ceil(part * len(errors)) - 1)]


def summary_line(label: str, rows: Sequence[Compared], what: str, parts: Sequence[float]) -> str:
    """The errors of a group, without their signs, and how many of them are within each of `parts`.

    `label` is the group's name as wide as it is to be shown.
    """
    errors = [abs(row.error) for row in rows]
    within = [f"{sum(e <= part for e in errors) / len(errors):.0%} within {100 * part:.0f} %"
              for part in parts]  # fmt: skip
    return (
        f"{label} {len(errors):3} {what}: error median {median(errors):.1%}, 90 % within "
        f"{quantile(errors, 0.9):.1%}, worst {max(errors):.1%}; {', '.join(within)}"
    )


def missed_goals(
    groups: Mapping[str, Sequence[Compared]], what: str, goals: tuple[float, float]
) -> list[str]:
    """What is missed, of each group: a goal for the median, and one for the best 90 %."""
    missed = [] if groups else [f"there is no {what} to compare"]
    for label, rows in groups.items():
        errors = [abs(row.error) for row in rows]
        found = (median(errors), "the median of errors"), (quantile(errors, 0.9), "that of 90 %")
        for (value, name), goal in zip(found, goals, strict=True):
            if value > goal:
                missed.append(f"{label}: {name} is {value:.1%}, above {goal:.0%}")
    return missed

"""The long campaigns of the tests: their table, and which of them a run includes.

`python -m tests.support.campaigns` prints the table, `tests/campaigns.toml`; with `--day=N` the
names that a day runs.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = Path(__file__).parent.parent / "campaigns.toml"
#: Days in a row that have all campaigns.
DAYS = 10


@dataclass(frozen=True, slots=True)
class Campaign:
    """A name for long tests that run together.

    Attributes:
        seconds: What its tests took together on one core when it was last measured.
    """

    name: str
    description: str
    seconds: int


def read_table() -> dict[str, Campaign]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Campaign(name, **row) for name, row in rows.items()}


CAMPAIGNS = read_table()


def check_names(names: Iterable[str], where: str) -> None:
    """Raise `pytest.UsageError` for the first name that the table does not have."""
    for name in names:
        if name not in CAMPAIGNS:
            raise pytest.UsageError(
                f"{where}: unknown campaign {name!r}; {TABLE.name} has {', '.join(CAMPAIGNS)}"
            )


def campaign_of(item: pytest.Item) -> str | None:
    """Return the campaign that a test belongs to, or None if the quick suite runs it.

    The quick suite keeps tests with a wrong mark: `check_mark` tells of each.
    """
    mark = item.get_closest_marker("campaign")
    name = str(mark.args[0]) if mark and mark.args else None
    return name if name in CAMPAIGNS else None


def check_mark(item: pytest.Item) -> None:
    """Raise `pytest.UsageError` unless the test's mark names one campaign of the table."""
    mark = item.get_closest_marker("campaign")
    if mark is not None and (len(mark.args) != 1 or mark.kwargs):
        raise pytest.UsageError(f"{item.nodeid}: campaign takes one name: campaign('NAME')")
    check_names(mark.args if mark else (), item.nodeid)


def described() -> list[str]:
    """Return one line for each campaign: name, measured seconds, description."""
    return [f"{c.name:18}{c.seconds:>6} s  {c.description}" for c in CAMPAIGNS.values()]


def days(campaigns: Iterable[Campaign]) -> list[list[str]]:
    """Divide campaigns into `DAYS` parts that take about as long, by their measured seconds."""
    parts: list[list[Campaign]] = [[] for _ in range(DAYS)]
    for campaign in sorted(campaigns, key=lambda c: (-c.seconds, c.name)):
        min(parts, key=lambda part: (sum(c.seconds for c in part), len(part))).append(campaign)
    return [sorted(c.name for c in part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", type=int, help="days since 1970; ten in a row have all")
    day = parser.parse_args().day
    if day is None:
        print(*described(), sep="\n")
    else:
        print(*days(CAMPAIGNS.values())[day % DAYS])


if __name__ == "__main__":
    main()

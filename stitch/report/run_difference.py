"""Compare the copies of two runs: records, or saved plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stitch.errors import FormatError
from stitch.frozen_json import from_plain, read_json
from stitch.planner import Cost
from stitch.report.explanation import CopyLine, copy_lines, programs_of
from stitch.report.run_record import read_record

EXPECTED = "a file of stitch-run --record=FILE, or plans.json of --save_artifacts"


@dataclass(frozen=True, slots=True)
class RunCopies:
    """The cost of a run, its copies (`times` over all plans), and the runs of its programs."""

    cost: Cost
    lines: tuple[CopyLine, ...]
    runs: Counter[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The added cost of a run, and its additional and missing copies.

    `unequal` lists the programs (name, old runs, new runs) that ran a different number of times: if
    there are any, the runs have different lengths.
    """

    added: Cost
    more: tuple[CopyLine, ...]
    fewer: tuple[CopyLine, ...]
    unequal: tuple[tuple[str, int, int], ...] = ()


def read_copies(text: str) -> RunCopies:
    """Return the copies of a record or of saved plans; raise `FormatError` for other text."""
    body = read_json(text, EXPECTED)
    if isinstance(body, list):
        lines = _joined(line for at, plan in enumerate(body) for line in _saved(plan, f"[{at}]"))
        seconds = sum(plan["runs"] * plan["program_seconds"] for plan in body)
        names = ((_saved_programs(plan, f"[{at}]"), plan["runs"]) for at, plan in enumerate(body))
        return RunCopies(replace(_sum(lines), program_seconds=seconds), lines, _times(names))
    record = read_record(text)
    runs = Counter(str(e.get("plan")) for e in record.events if e.get("event") == "run")
    plans = [(plan, runs[str(index)]) for index, plan in record.plans.items()]
    lines = copy_lines(plans)
    _check_numbers(record.cost, "totals")
    programs = ((programs_of(plan), n) for plan, n in plans)
    return RunCopies(record.cost or _sum(lines), lines, _times(programs))


def _times(plans: Iterable[tuple[Iterable[str], int]]) -> Counter[str]:
    """Return the runs of each program, from the programs and the runs of each plan."""
    times: Counter[str] = Counter()
    for names, runs in plans:
        for name in names:
            times[name] += runs
    return times


def difference(old: RunCopies, new: RunCopies) -> Difference:
    """Compare the copies of two runs."""
    both = ((name, times, new.runs[name]) for name, times in old.runs.items() if name in new.runs)
    return Difference(
        new.cost - old.cost, _surplus(new.lines, old.lines), _surplus(old.lines, new.lines),
        tuple(one for one in both if one[1] != one[2]),
    )  # fmt: skip


def _surplus(lines: Iterable[CopyLine], others: Iterable[CopyLine]) -> tuple[CopyLine, ...]:
    """Return the copies that occur more often than in `others`, with the surplus."""
    times = {replace(line, times=0): line.times for line in others}
    more = ((line, line.times - times.get(replace(line, times=0), 0)) for line in lines)
    return tuple(replace(line, times=extra) for line, extra in more if extra > 0)


def _saved(plan: Any, where: str) -> Iterator[CopyLine]:
    """Yield the copies of a saved plan, times its runs."""
    if not isinstance(plan, dict) or not isinstance(plan.get("copies"), list):
        raise FormatError("a plan lacks `copies`", where=where, expected=EXPECTED)
    runs = from_plain(int, plan.get("runs"), f"{where}.runs")
    own = Cost(
        runs, 0, 0.0, from_plain(float, plan.get("program_seconds"), f"{where}.program_seconds")
    )
    _check_numbers(own, where)
    for at, copy in enumerate(plan["copies"]):
        place = f"{where}.copies[{at}]"
        line = from_plain(CopyLine, copy, place)
        line = replace(line, times=line.times * runs)
        _check_numbers(line, place)
        yield line


def _saved_programs(plan: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the programs of a saved plan; older files have its tasks, or nothing."""
    key = "programs" if "programs" in plan else "tasks"
    return from_plain(tuple[str, ...], plan.get(key, []), f"{where}.{key}")


def _check_numbers(counted: Cost | CopyLine | None, where: str) -> None:
    """Raise `FormatError` for negative or infinite numbers."""
    values = [] if counted is None else [getattr(counted, f.name) for f in fields(counted)]
    for value in values:
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise FormatError(
                "invalid count", where=where, expected="a finite number of at least 0",
                got=repr(value)[:60],
            )  # fmt: skip


def _joined(lines: Iterable[CopyLine]) -> tuple[CopyLine, ...]:
    """Add up equal copies."""
    times: Counter[CopyLine] = Counter()
    for line in lines:
        times[replace(line, times=0)] += line.times
    return tuple(replace(line, times=count) for line, count in times.items())


def _sum(lines: Iterable[CopyLine]) -> Cost:
    lines = tuple(lines)
    return Cost(
        sum(line.times for line in lines), sum(line.times * line.nbytes for line in lines),
        sum(line.times * line.seconds for line in lines),
    )  # fmt: skip

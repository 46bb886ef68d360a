"""Compare the copies of two runs: records, or saved plans."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stitch.errors import FormatError
from stitch.planner import Cost
from stitch.report.explanation import CopyLine, copy_lines, programs_of
from stitch.report.frozen_json import from_plain
from stitch.report.run_record import read_record

EXPECTED = "what stitch-run --record=FILE writes, or plans.json of --save_artifacts"


@dataclass(frozen=True, slots=True)
class RunCopies:
    """What a run copied: in sum, and by copy (`times` counts all runs of all plans); how often each
    of its programs ran, by name."""

    cost: Cost
    lines: tuple[CopyLine, ...]
    runs: Counter[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """What was added, less what was saved; the copies of which there are more, and fewer.

    `unequal`: the programs of both runs that ran more often in one (name, old, new): where there
    are any, these are sums over runs of different lengths.
    """

    added: Cost
    more: tuple[CopyLine, ...]
    fewer: tuple[CopyLine, ...]
    unequal: tuple[tuple[str, int, int], ...] = ()


def read_copies(text: str) -> RunCopies:
    """The copies of a record or of saved plans; raises `FormatError` for anything else."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("these are no copies of a run", expected=EXPECTED,
                          got=f"no JSON: {error}"[:200]) from error  # fmt: skip
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
    """How often each program ran, from those of each plan and how often it ran."""
    times: Counter[str] = Counter()
    for names, runs in plans:
        for name in names:
            times[name] += runs
    return times


def difference(old: RunCopies, new: RunCopies) -> Difference:
    """What the new run copies that the old one did not, and the other way round."""
    both = ((name, times, new.runs[name]) for name, times in old.runs.items() if name in new.runs)
    return Difference(
        new.cost - old.cost, _beyond(new.lines, old.lines), _beyond(old.lines, new.lines),
        tuple(one for one in both if one[1] != one[2]),
    )  # fmt: skip


def _beyond(lines: Iterable[CopyLine], others: Iterable[CopyLine]) -> tuple[CopyLine, ...]:
    """The copies that there are more often than among the others, with how much more often."""
    times = {replace(line, times=0): line.times for line in others}
    more = ((line, line.times - times.get(replace(line, times=0), 0)) for line in lines)
    return tuple(replace(line, times=extra) for line, extra in more if extra > 0)


def _saved(plan: Any, where: str) -> Iterator[CopyLine]:
    """The copies of one of the saved plans, as often as they happened."""
    if not isinstance(plan, dict) or not isinstance(plan.get("copies"), list):
        raise FormatError("a saved plan has `copies`", where=where, expected=EXPECTED)
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
    """The programs of a saved plan; older ones name all tasks alike, the oldest none."""
    key = "programs" if "programs" in plan else "tasks"
    return from_plain(tuple[str, ...], plan.get(key, []), f"{where}.{key}")


def _check_numbers(counted: Cost | CopyLine | None, where: str) -> None:
    """Raise `FormatError` for numbers that no run counts."""
    values = [] if counted is None else [getattr(counted, f.name) for f in fields(counted)]
    for value in values:
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise FormatError("a run counts from 0 on", where=where, got=repr(value)[:60])


def _joined(lines: Iterable[CopyLine]) -> tuple[CopyLine, ...]:
    """The same copy in several plans is one line."""
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

"""The copies of a run, read from its record or its result file, and the difference of two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stitch.errors import FormatError, IncompatibleError
from stitch.frozen_json import from_plain, read_json, shown, to_plain
from stitch.machine import Machine
from stitch.planner import WARNINGS, Cost, check_plan
from stitch.program import Space
from stitch.report.explanation import WRITTEN, CopyLine, copy_lines, plan_peaks, programs_of
from stitch.report.run_record import RUN_FILE, RunRecord, cost_of, event_text, record_of
from stitch.runtime import PlanRun, PlanStopped, Totals, totals_of


@dataclass(frozen=True, slots=True)
class RunCopies:
    """What of a run is compared with another.

    Args:
        machine: The name of its machine.
        description: The machine, None in a result file.
        cost: Its cost.
        lines: Its copies, with `times` over all plans.
        runs: The runs of its programs.
        peaks: The largest bytes per bank in use, by space.
    """

    machine: str
    description: Machine | None
    cost: Cost
    lines: tuple[CopyLine, ...]
    runs: Counter[str]
    peaks: Mapping[str, int]


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
    """Return the copies of a record or of a result file; raise `FormatError` for other text.

    The plans of a record are checked, and its totals are compared with its events: the error names
    the step that was changed.
    """
    body = read_json(text, RUN_FILE)
    if isinstance(body, dict) and body.get("stitch") != "run" and "result" in body:
        return _copies_of_result(body)
    return _copies_of_record(record_of(body))


def _copies_of_record(record: RunRecord) -> RunCopies:
    for index, plan in record.plans.items():
        problem = next((p for p in check_plan(plan) if p.kind not in WARNINGS), None)
        if problem is not None:
            raise FormatError(
                f"the plan is not sound: {problem.detail}", where=f"plan {index}, {problem.where}",
                remedy="the record was changed after the run: record it again",
            )  # fmt: skip
    runs: Counter[int] = Counter()
    writes: Counter[CopyLine] = Counter()
    stopped = Totals()
    peaks = {space.value: size for space, size in plan_peaks([*record.plans.values()]).items()}
    for number, event in enumerate(record.events):
        kind, index = event.get("event"), event.get("plan", -1)
        try:
            if kind == "run":
                runs[index] += 1
                used = event["used"].items()
                peaks |= {space: max(size, peaks.get(space, 0)) for space, size in used}
            elif kind == "stopped":
                done = event["steps"]
                steps = range(done) if isinstance(done, int) else done
                stopped += totals_of(PlanStopped(index, record.plans[index], steps))
            elif kind == "write":
                seconds = event.get("seconds", 0.0)
                writes[CopyLine("write", Space.HOST.value, event["desc"], event["nbytes"], seconds,
                                0, WRITTEN, None)] += 1  # fmt: skip
        except (LookupError, TypeError, AttributeError) as error:
            raise _malformed(number, event) from error
        if kind == "run" and index not in record.plans:
            raise _malformed(number, event)
    plans = [(plan, runs[index]) for index, plan in record.plans.items()]
    each = [(totals_of(PlanRun(0, plan, ())), times) for plan, times in plans]
    lines = (*copy_lines(plans), *(replace(one, times=many) for one, many in writes.items()))
    total = stopped.plus_all(each).plus(Totals(copies=1), writes.total())
    nbytes = total.nbytes + sum(line.nbytes * many for line, many in writes.items())
    _check_sum(record.cost, total.copies, nbytes, "the events")
    programs = Counter[str]()
    for plan, times in plans:
        for name in programs_of(plan):
            programs[name] += times
    return RunCopies(record.machine.name, record.machine, record.cost, lines, programs, peaks)


def _malformed(number: int, event: Mapping[str, Any]) -> FormatError:
    return FormatError(
        "malformed event, or the record lacks its plan", where=f"event {number}",
        got=event_text(event),
    )  # fmt: skip


def _check_sum(cost: Cost, copies: int, nbytes: int, of: str) -> None:
    if (cost.copies, cost.nbytes) != (copies, nbytes):
        raise FormatError(
            f"the totals are not the sum of {of}", where="totals",
            expected=f"{copies} copies, {nbytes} B", got=f"{cost.copies} copies, {cost.nbytes} B",
            remedy="the file was changed after the run: write it again",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ResultPlan:
    """What is read of a plan in a result file; `runs`: how often it ran."""

    programs: tuple[str, ...]
    copies: tuple[CopyLine, ...]
    runs: int


@dataclass(frozen=True, slots=True)
class _Result:
    """What is read of a result file."""

    machine: str
    plans: tuple[_ResultPlan, ...]
    other_copies: tuple[CopyLine, ...]
    peak_bytes_per_bank: dict[str, int]


def _copies_of_result(body: Mapping[str, Any]) -> RunCopies:
    """Return the copies of a result file, which `stitch run --result_file=FILE` writes."""
    if "machine" not in body:
        raise FormatError(
            "the result file has no copies to compare", expected="a run on one device",
            got=f"a run that failed: {body['error']}"[:300] if "error" in body
            else "a run on several devices",
        )  # fmt: skip
    part: dict[str, Any] = _only(_Result, body)
    if isinstance(part.get("plans"), list):
        part["plans"] = [_only(_ResultPlan, plan) for plan in part["plans"]]
    result = from_plain(_Result, part, "result file")
    times: Counter[CopyLine] = Counter()
    programs: Counter[str] = Counter()
    for plan in (*result.plans, _ResultPlan((), result.other_copies, 1)):
        for line in plan.copies:
            times[replace(line, times=0)] += line.times * plan.runs
        for name in plan.programs:
            programs[name] += plan.runs
    cost, older = cost_of(body.get("totals")), cost_of(body.get("older_copies"))
    nbytes = sum(line.nbytes * many for line, many in times.items())
    _check_sum(cost, older.copies + times.total(), older.nbytes + nbytes, "the copies")
    lines = tuple(replace(line, times=many) for line, many in times.items())
    return RunCopies(result.machine, None, cost, lines, programs, result.peak_bytes_per_bank)


def _only(kind: type, data: Any) -> Any:
    """Return an object without the keys that are no fields of a class."""
    names = {field.name for field in fields(kind)}
    return {k: v for k, v in data.items() if k in names} if isinstance(data, dict) else data


def difference(old: RunCopies, new: RunCopies) -> Difference:
    """Compare the copies of two runs; raise `IncompatibleError` for runs on two machines."""
    if old.machine != new.machine:
        raise IncompatibleError(
            "the runs are on two machines", expected=old.machine, got=new.machine,
            remedy="record both on one machine (stitch run --device=NAME)",
        )  # fmt: skip
    if None not in (old.description, new.description) and old.description != new.description:
        first = next(_unlike(to_plain(old.description), to_plain(new.description), "machine"))
        raise IncompatibleError(
            f"the runs are on two machines, both named {old.machine!r}", where=first[0],
            expected=first[1], got=first[2],
        )  # fmt: skip
    both = ((name, times, new.runs[name]) for name, times in old.runs.items() if name in new.runs)
    return Difference(
        new.cost - old.cost, _surplus(new.lines, old.lines), _surplus(old.lines, new.lines),
        tuple(one for one in both if one[1] != one[2]),
    )  # fmt: skip


def _unlike(one: Any, other: Any, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield where two plain data differ, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _unlike(one.get(key), other.get(key), f"{where}.{key}")
    elif one != other:
        yield where, shown(one), shown(other)


def _surplus(lines: Iterable[CopyLine], others: Iterable[CopyLine]) -> tuple[CopyLine, ...]:
    """Return the copies that occur more often than in `others`, with the surplus."""
    times = {replace(line, times=0): line.times for line in others}
    more = ((line, line.times - times.get(replace(line, times=0), 0)) for line in lines)
    return tuple(replace(line, times=extra) for line, extra in more if extra > 0)

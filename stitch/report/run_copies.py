"""The copies of a run, read from its record or its result file, and the difference of two runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stitch.errors import FormatError, IncompatibleError, TaskError
from stitch.frozen_json import from_plain, read_json, shown, to_plain
from stitch.machine import Machine
from stitch.planner import WARNINGS, Cost, check_plan, memory_rise
from stitch.program import Space
from stitch.report.explanation import (
    WRITTEN,
    CopyLine,
    copy_lines,
    programs_of,
)
from stitch.report.run_record import (
    RUN_FILE,
    RunRecord,
    cost_of,
    event_text,
    record_of,
    replay_record,
)
from stitch.runtime import PlanRun, PlanStopped, Totals, totals_of

#: Sums of simulated seconds differ in the last digits.
_ROUNDING = 1e-6
_CHANGED = "the record was changed after the run: record it again"


@dataclass(frozen=True, slots=True)
class RunCopies:
    """What of a run is compared with another.

    Args:
        machine: The name of its machine.
        description: The machine, None in a result file.
        digest: That of the machine, empty if unknown.
        cost: Its cost.
        lines: Its copies, with `times` over all plans.
        runs: The runs of its programs.
        peaks: The largest bytes per bank in use, by space.
        stopped: Its plans that failed in the middle.
    """

    machine: str
    description: Machine | None
    digest: str
    cost: Cost
    lines: tuple[CopyLine, ...]
    runs: Counter[str]
    peaks: Mapping[str, int]
    stopped: int = 0

    @property
    def spaces(self) -> tuple[str, ...]:
        """Return the spaces of the machine, nothing if unknown."""
        return tuple([s.value for s in self.description.shape.spaces] if self.description else [])


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


def machine_digest(machine: Machine) -> str:
    """Return a digest of a machine's description, by which runs on it are recognized."""
    text = json.dumps(to_plain(machine), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copies_of_record(record: RunRecord) -> RunCopies:
    for index, plan in record.plans.items():
        problem = next((p for p in check_plan(plan) if p.kind not in WARNINGS), None)
        if problem is not None:
            raise FormatError(
                f"the plan is not sound: {problem.detail}", where=f"plan {index}, {problem.where}",
                remedy=_CHANGED,
            )  # fmt: skip
    runs: Counter[int] = Counter()
    writes: Counter[CopyLine] = Counter()
    stopped, stops, has_seconds = Totals(), 0, True
    for number, event in enumerate(record.events):
        kind, index = event.get("event"), event.get("plan", -1)
        try:
            if kind == "run":
                runs[index] += 1
            elif kind == "stopped":
                done = event["steps"]
                steps = range(done) if isinstance(done, int) else done
                stopped += totals_of(PlanStopped(index, record.plans[index], steps))
                stops += 1
            elif kind == "write":
                has_seconds = has_seconds and "seconds" in event
                seconds = event.get("seconds", 0.0)
                writes[CopyLine("write", Space.HOST.value, event["desc"], event["nbytes"], seconds,
                                0, WRITTEN, None)] += 1  # fmt: skip
        except (LookupError, TypeError, AttributeError) as error:
            raise _malformed(number, event) from error
        if kind == "run" and index not in record.plans:
            raise _malformed(number, event)
    try:
        replay_record(record, are_sound=True)
    except TaskError as error:
        raise FormatError(
            error.what, where=error.where, expected=error.expected, got=error.got, remedy=_CHANGED
        ) from error
    plans = [(plan, runs[index]) for index, plan in record.plans.items()]
    each = [(totals_of(PlanRun(0, plan, ())), times) for plan, times in plans]
    lines = (*copy_lines(plans), *(replace(one, times=many) for one, many in writes.items()))
    total = stopped.plus_all(each).plus(Totals(copies=1), writes.total())
    nbytes = total.nbytes + sum(line.nbytes * many for line, many in writes.items())
    seconds = total.seconds + sum(line.seconds * many for line, many in writes.items())
    found = Cost(total.copies, nbytes, seconds if has_seconds else record.cost.seconds,
                 total.program_seconds)  # fmt: skip
    _check_sum(record.cost, found, "the events")
    programs = Counter[str]()
    for plan, times in plans:
        for name in programs_of(plan):
            programs[name] += times
    machine = record.machine
    return RunCopies(machine.name, machine, machine_digest(machine), record.cost, lines, programs,
                     _peaks(record), stops)  # fmt: skip


def _peaks(record: RunRecord) -> dict[str, int]:
    """Return the largest bytes per bank in use, by space; the events were replayed."""
    rises = {
        index: Counter({space.value: size for space, size in memory_rise(plan).items()})
        for index, plan in record.plans.items()
    }
    peaks: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for event in record.events:
        kind = event["event"]
        if kind in ("reserve", "free"):
            used[event["space"]] += event["size_per_bank"] * (1 if kind == "reserve" else -1)
        peaks |= used + rises[event["plan"]] if kind in ("run", "stopped") else used
        if kind == "run":
            used = Counter(event["used"])
    return dict(peaks | used)


def _malformed(number: int, event: Mapping[str, Any]) -> FormatError:
    return FormatError(
        "malformed event, or the record lacks its plan", where=f"event {number}",
        got=event_text(event),
    )  # fmt: skip


def _check_sum(cost: Cost, found: Cost, of: str) -> None:
    """Raise `FormatError` if totals differ from the sums that were found."""
    pairs = ((cost.seconds, found.seconds), (cost.program_seconds, found.program_seconds))
    same = all(math.isclose(one, other, rel_tol=_ROUNDING) for one, other in pairs)
    if (cost.copies, cost.nbytes) != (found.copies, found.nbytes) or not same:
        expected, got = [
            f"{one.copies} copies, {one.nbytes} B, {one.seconds!r} s, {one.program_seconds!r} s of "
            "programs" for one in (found, cost)
        ]  # fmt: skip
        raise FormatError(
            f"the totals are not the sum of {of}", where="totals", expected=expected, got=got,
            remedy="the file was changed after the run: write it again",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ResultPlan:
    """What is read of a plan in a result file; `runs`: how often it ran."""

    programs: tuple[str, ...]
    copies: tuple[CopyLine, ...]
    runs: int
    seconds: float = 0.0
    program_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Result:
    """What is read of a result file."""

    machine: str
    plans: tuple[_ResultPlan, ...]
    other_copies: tuple[CopyLine, ...]
    peak_bytes_per_bank: dict[str, int]
    machine_digest: str = ""


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
    if min(result.peak_bytes_per_bank.values(), default=0) < 0:
        raise FormatError("a peak is negative", where="result file.peak_bytes_per_bank",
                          got=str(result.peak_bytes_per_bank)[:200])  # fmt: skip
    times: Counter[CopyLine] = Counter()
    programs: Counter[str] = Counter()
    for plan in (*result.plans, _ResultPlan((), result.other_copies, 1)):
        for line in plan.copies:
            times[replace(line, times=0)] += line.times * plan.runs
        for name in plan.programs:
            programs[name] += plan.runs
    cost, older = cost_of(body.get("totals")), cost_of(body.get("older_copies"))
    others = [(line.seconds, line.times) for line in result.other_copies]
    found = Cost(
        older.copies + times.total(),
        older.nbytes + sum(line.nbytes * many for line, many in times.items()),
        older.seconds + sum(one * many for one, many in
                            [*((plan.seconds, plan.runs) for plan in result.plans), *others]),
        older.program_seconds + sum(plan.program_seconds * plan.runs for plan in result.plans),
    )  # fmt: skip
    _check_sum(cost, found, "the copies")
    lines = tuple(replace(line, times=many) for line, many in times.items())
    return RunCopies(result.machine, None, result.machine_digest, cost, lines, programs,
                     result.peak_bytes_per_bank)  # fmt: skip


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
    if old.digest != new.digest and old.digest and new.digest:
        where, one, other = "machine", f"digest {old.digest}", f"digest {new.digest}"
        if old.description is not None and new.description is not None:
            one, other = to_plain(old.description), to_plain(new.description)
            where, one, other = next(_unlike(one, other, where))
        raise IncompatibleError(
            f"the runs are on two machines, both named {old.machine!r}", where=where,
            expected=one, got=other,
        )  # fmt: skip
    return Difference(
        new.cost - old.cost, _surplus(new.lines, old.lines), _surplus(old.lines, new.lines),
        _unequal(old.runs, new.runs),
    )  # fmt: skip


def _unequal(old: Mapping[str, int], new: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
    """Return the programs of both runs that ran a different number of times.

    Without a common program these are all programs, if one run repeats its programs more often.

    >>> _unequal({"a": 1, "b": 1}, {"a": 1, "c": 3}), _unequal({"a": 1}, {"c": 3})
    ((), (('a', 1, 0), ('c', 0, 3)))
    """
    names = [name for name in old if name in new]
    if not names and set(old.values()) != set(new.values()):
        names = [*old, *new]
    each = [(name, old.get(name, 0), new.get(name, 0)) for name in names]
    return tuple(one for one in each if one[1] != one[2])


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

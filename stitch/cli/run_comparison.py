"""Compare two runs, and print the comparison in one of five forms."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any
from xml.etree import ElementTree

from stitch.cli.command import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_OVER_LIMIT,
    printable,
    prog,
    say,
    say_aside,
)
from stitch.cli.module_files import read_document
from stitch.cli.rehearsal import difference_text
from stitch.report import (
    BUDGET_KEYS,
    PEAK_KEYS,
    Budget,
    BudgetResult,
    CopyLine,
    Difference,
    RunCopies,
    amount,
    amount_text,
    check_budgets,
    counted,
    difference,
    read_copies,
)

#: Annotations that GitHub shows of one step, of each kind.
MAX_ANNOTATIONS = 10
#: Folders that are not searched for source files.
_SKIPPED = frozenset({"node_modules", "__pycache__", "build"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, how the new one differs, and the results of the budgets."""

    old: RunCopies
    new: RunCopies
    change: Difference
    results: tuple[BudgetResult, ...]

    def verdict(self, result: BudgetResult) -> str:
        """Return whether a budget is `kept`, `broken` or `unknown`, because of `obstacle`."""
        if self.stopped_text() or (self.change.unequal and result.budget.is_of_totals):
            return "unknown"
        return "kept" if result.is_kept else "broken"

    @property
    def verdicts(self) -> Counter[str]:
        """Return how many budgets have each verdict."""
        return Counter(self.verdict(result) for result in self.results)

    def obstacle(self) -> str:
        """Return why budgets cannot be checked, nothing if they can."""
        if self.change.unequal:
            uneven = f"these runs are of different lengths: {_lengths(self.change.unequal)}"
            return "; ".join(filter(None, (self.stopped_text(), uneven)))
        return self.stopped_text()

    def stopped_text(self) -> str:
        """Return which of the runs failed in the middle of a plan."""
        named = {"old": self.old.stopped, "new": self.new.stopped}
        each = [f"the {name} run failed in the middle of {counted(many, 'plan')}"
                for name, many in named.items() if many]  # fmt: skip
        return "; ".join(each)


def copies_text(change: Difference) -> Iterator[str]:
    """Yield three lines for each additional and missing copy: cost, reason, link and source."""
    for sign, copies in (("+", change.more), ("-", change.fewer)):
        for line in copies:
            yield f"  {sign} {_one_line(line.text())}"
            yield from (f"      {_one_line(text)}" for text in _why(line))


def _why(line: CopyLine) -> list[str]:
    """Return the reason and the link of a copy, as far as known."""
    return [text for text in (line.reason, line.link_text()) if text]


def _one_line(words: str) -> str:
    """Escape line breaks: files of others have names and locations with any characters.

    >>> _one_line("a\\n::error::b")
    'a\\\\n::error::b'
    """
    return printable(words.replace("\n", "\\n"))


def changes(old_text: str, new_text: str) -> list[str]:
    """Return the lines about copies and peaks that differ between two runs, given as files.

    Raises `FormatError` and `IncompatibleError`, as `read_copies` and `difference` do.
    """
    old, new = read_copies(old_text), read_copies(new_text)
    compared = Comparison(old, new, difference(old, new), ())
    return [*copies_text(compared.change), *peaks_text(compared)]


def peaks_text(compared: Comparison) -> Iterator[str]:
    """Yield a line for each peak that differs."""
    for key in PEAK_KEYS:
        old, new = (amount(key, run) for run in (compared.old, compared.new))
        if old != new:
            yield f"  {key}: {amount_text(key, old)} -> {amount_text(key, new)}"


def text(compared: Comparison) -> str:
    """Return lines for a terminal."""
    lines = [f"this change: {difference_text(compared.change.added)}"]
    lines += copies_text(compared.change)
    lines += peaks_text(compared)
    for result in compared.results:
        verdict = compared.verdict(result)
        lines.append(f"  budget {verdict.upper() if verdict != 'kept' else verdict}: "
                     f"{result.text()}")  # fmt: skip
    return "\n".join(lines)


def as_json(compared: Comparison) -> str:
    """Return everything as one JSON object."""
    body: dict[str, Any] = {"machine": compared.new.machine, **asdict(compared.change)}
    for name, run in (("old", compared.old), ("new", compared.new)):
        body[name] = {key: amount(key, run) for key in BUDGET_KEYS}
    body["obstacle"] = compared.obstacle()
    body["budgets"] = [
        {"budget": result.budget.text(), "old": result.old, "new": result.new,
         "allowed": result.allowed, "kept": compared.verdict(result) == "kept",
         "verdict": compared.verdict(result)}
        for result in compared.results
    ]  # fmt: skip
    return json.dumps(body, indent=2)


def markdown(compared: Comparison) -> str:
    """Return two tables, for a comment or a summary: the amounts, and the copies that differ."""
    budgets = {result.budget.key: result for result in compared.results}
    verdict = ""
    if budgets:
        found = compared.verdicts
        verdict = ": all budgets kept"
        if found["broken"] or found["unknown"]:
            verdict = f": a budget {'is broken' if found['broken'] else 'cannot be checked'}"
    lines = [f"### Stitched copies on {_code(compared.new.machine)}{verdict}", ""]
    if compared.obstacle():
        lines += [_code(compared.obstacle()), ""]
    lines += ["| | old | new | allowed | |", "|---|---:|---:|---:|---|"]
    for key in BUDGET_KEYS:
        old, new = amount(key, compared.old), amount(key, compared.new)
        result = budgets.get(key)
        if result is None and not old and not new:
            continue
        allowed = amount_text(key, result.allowed) if result else ""
        mark = compared.verdict(result) if result else ""
        mark = f"**{mark}**" if mark not in ("", "kept") else mark
        cells = [key, amount_text(key, old), amount_text(key, new), allowed, mark]
        lines.append(f"| {' | '.join(cells)} |")
    copies = [*(("+", one) for one in compared.change.more),
              *(("-", one) for one in compared.change.fewer)]  # fmt: skip
    if copies:
        lines += ["", "| | copy | bytes | time | link | why |", "|---|---|---:|---:|---|---|"]
    for sign, one in copies:
        cells = [sign, _code(f"{one.kind} x{one.times}"), f"{one.nbytes} B",
                 f"{one.seconds * 1e6:.1f} us",
                 _code(one.link_text()), _code(one.reason)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(words: str) -> str:
    """Return a text as code in a cell of a table, whatever characters it has.

    >>> _code("a|b`c")
    "`a\\\\|b'c`"
    """
    flat = " ".join(words.replace("`", "'").split()).replace("|", "\\|")
    return f"`{flat}`" if flat else ""


def junit(compared: Comparison) -> str:
    """Return a test suite with a case for each budget, or one without budgets."""
    found = compared.verdicts
    suite = ElementTree.Element(
        "testsuite", name="stitch diff", tests=str(len(compared.results) or 1),
        failures=str(found["broken"]), errors=str(found["unknown"]), skipped="0", time="0",
    )  # fmt: skip
    where = _source_of(compared.change.more)
    for result in compared.results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="stitch.diff", name=result.budget.text(), time="0"
        )
        verdict = compared.verdict(result)
        if verdict == "broken":
            if where is not None:
                case.set("file", _xml(where[0]))
                case.set("line", str(where[1]))
            failure = ElementTree.SubElement(case, "failure", message=_xml(result.text()),
                                             type="budget")  # fmt: skip
            failure.text = _xml("\n".join(copies_text(compared.change)))
        elif verdict == "unknown":
            ElementTree.SubElement(
                case, "error", message=_xml(compared.obstacle()), type="comparison"
            )
    if not compared.results:
        ElementTree.SubElement(
            suite, "testcase", classname="stitch.diff", name="comparison", time="0"
        )
    ElementTree.SubElement(suite, "system-out").text = _xml(text(compared))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _xml(words: str) -> str:
    """Escape the characters that XML does not allow.

    >>> _xml("a\\x00\\uffff")
    'a\\\\x00\\\\uffff'
    """
    return printable(words).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def github(compared: Comparison) -> str:
    """Return the workflow commands that annotate the source lines of additional copies.

    They are errors if a budget is broken, else notices; each broken budget is an error as well.
    """
    level = "error" if compared.verdicts["broken"] else "notice"
    lines = [
        _annotation("error", None, "stitch: budget broken", result.text())
        for result in compared.results if compared.verdict(result) == "broken"
    ]  # fmt: skip
    if compared.verdicts["unknown"]:
        title = "stitch: a budget cannot be checked"
        lines.append(_annotation("error", None, title, compared.obstacle()))
    costly = sorted(compared.change.more, key=lambda line: -line.nbytes * line.times)
    sources = source_paths(line.location for line in costly)
    for line in costly[: MAX_ANNOTATIONS - len(lines)]:
        title = f"stitch: +{line.times} {line.kind} of {line.nbytes} B"
        what = "\n".join(_one_line(text) for text in _why(line))
        lines.append(_annotation(level, sources.get(line.location), title, what))
    change = f"this change: {difference_text(compared.change.added)}"
    return "\n".join([*lines, _annotation("notice", None, "stitch diff", change)])


def _annotation(level: str, source: tuple[str, int] | None, title: str, message: str) -> str:
    r"""Return one workflow command.

    >>> _annotation("error", ("b.yaml", 5), "1:2", "50%\nmore")
    '::error file=b.yaml,line=5,title=1%3A2::50%25%0Amore'
    """
    words = {"title": title}
    if source is not None:
        words = {"file": source[0], "line": str(source[1])} | words
    values = ",".join(
        f"{key}={_escaped(word).replace(':', '%3A').replace(',', '%2C')}"
        for key, word in words.items()
    )
    return f"::{level} {values}::{_escaped(message)}"


def _escaped(words: str) -> str:
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _source_of(copies: Iterable[CopyLine]) -> tuple[str, int] | None:
    """Return file and line of the first copy whose source is known."""
    return next(iter(source_paths(line.location for line in copies).values()), None)


def source_paths(locations: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return path and line for each location of the form `file:line`.

    Locations have no folder. The path is that of the only file of this name below the current
    folder, else the name itself.
    """
    found: dict[str, tuple[str, int]] = {}
    for location in locations:
        name, _, line = location.rpartition(":")
        if name and re.fullmatch(r"[0-9]{1,9}", line):
            found[location] = name, int(line)
    names = {name for name, _ in found.values()}
    paths: dict[str, list[str]] = {}
    for folder, folders, files in os.walk(".") if names else ():
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _SKIPPED]
        for name in names.intersection(files):
            paths.setdefault(name, []).append((PurePath(folder) / name).as_posix())
    only = {name: listed[0] for name, listed in paths.items() if len(listed) == 1}
    return {place: (only.get(name, name), line) for place, (name, line) in found.items()}


#: By the name of the form: a function that prints a comparison.
_FORMATS: dict[str, Callable[[Comparison], str]] = {
    "text": text, "markdown": markdown, "json": as_json, "junit": junit, "github": github,
}  # fmt: skip


def compare_files(paths: Sequence[str], budgets: Sequence[Budget], form: str) -> int:
    """Print how a run differs from an earlier one, and each broken budget on standard error.

    Returns exit code 7 if a budget is broken, 6 if one cannot be checked: it compares runs of
    different lengths, or one of the runs failed.
    """
    old, new = (read_document(path, read_copies) for path in paths)
    change = difference(old, new)
    compared = Comparison(old, new, change, check_budgets(budgets, old, new))
    say(_FORMATS[form](compared))
    named: dict[str, list[BudgetResult]] = {"kept": [], "broken": [], "unknown": []}
    for result in compared.results:
        named[compared.verdict(result)].append(result)
    failures = [result.text() for result in named["broken"]]
    if named["unknown"]:
        keys = ", ".join(result.budget.key for result in named["unknown"])
        failures.append(f"{compared.obstacle()}: their {keys} cannot be compared")
    elif compared.obstacle():
        say_aside(f"{prog()}: note: {compared.obstacle()}")
    if old.runs and new.runs and old.runs.keys().isdisjoint(new.runs):
        say_aside(f"{prog()}: note: these runs have no program in common: "
                  f"{min(old.runs)!r} is in one, {min(new.runs)!r} in the other")  # fmt: skip
    for failure in failures:
        say_aside(f"{prog()}: error: {failure}")
    if named["broken"]:
        return EXIT_OVER_LIMIT
    return EXIT_FAILURE if named["unknown"] else EXIT_OK


def _lengths(unequal: Sequence[tuple[str, int, int]]) -> str:
    """Describe programs that ran a different number of times in two runs.

    >>> _lengths([("a", 1, 3), ("b", 2, 6)])
    "'a' ran 1 time, then 3; 'b' ran 2 times, then 6"
    """
    listed = [f"{name!r} ran {counted(old, 'time')}, then {new}" for name, old, new in unequal]
    return "; ".join(listed[:3]) + (f"; {len(listed) - 3} more" if len(listed) > 3 else "")

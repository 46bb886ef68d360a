"""Verdicts of `stitch diff` that would be wrong in silence, and reports that no name breaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError, IncompatibleError, UsageError
from stitch.machine import load_machine
from stitch.planner import Cost
from stitch.program import Space
from stitch.report import (
    Recorder,
    RunCopies,
    check_budgets,
    difference,
    parse_budgets,
    read_copies,
)
from stitch.report.explanation import plan_peaks

Cli = Callable[..., Any]
FORMATS = ("text", "markdown", "json", "junit", "github")


def run_of(
    copies: int = 0, nbytes: int = 0, seconds: float = 0.0, program_seconds: float = 0.0,
    **other: Any,
) -> RunCopies:  # fmt: skip
    cost = Cost(copies, nbytes, seconds, program_seconds)
    return replace(RunCopies("m", None, "", cost, (), Counter(), {}), **other)


@pytest.mark.parametrize(
    ("budget", "old", "new", "kept"),
    [
        ("copies", {"copies": 3}, {"copies": 2}, True),  # Fewer is kept, more is broken.
        ("copies", {"copies": 2}, {"copies": 3}, False),
        ("copies:0", {"copies": 9}, {"copies": 0}, True),
        ("copies:0", {"copies": 9}, {"copies": 1}, False),
        # Counts are exact, whatever their size.
        ("copies", {"copies": 10**10}, {"copies": 10**10 + 1}, False),
        ("bytes", {"nbytes": 10**12}, {"nbytes": 10**12 + 1}, False),
        ("bytes:+4", {"nbytes": 10**12}, {"nbytes": 10**12 + 4}, True),
        ("bytes:1e12", {}, {"nbytes": 10**12 + 1}, False),
        ("peak.l1", {"peaks": {"l1": 2 * 10**9}}, {"peaks": {"l1": 2 * 10**9 + 1}}, False),
        # As percentages of counts are: no digit is lost, and nothing of one is allowed.
        ("copies:+10%", {"copies": 100}, {"copies": 110}, True),
        ("copies:+10%", {"copies": 109}, {"copies": 120}, False),
        ("copies:+0.3%", {"copies": 1000}, {"copies": 1003}, True),
        ("copies:+0.1%", {"copies": 1000}, {"copies": 1001}, True),
        ("bytes:+5%", {"nbytes": 0}, {"nbytes": 1}, False),
        # Percent of nothing is nothing.
        ("seconds:+5%", {"seconds": 0.0}, {"seconds": 1e-12}, False),
        ("seconds:+1000%", {"seconds": 0.0}, {"seconds": 0.0}, True),
        ("seconds:+5%", {"seconds": 1e-6}, {"seconds": 1.0500001e-6}, False),
        ("program_seconds", {"program_seconds": 1e-6}, {"program_seconds": 1.00001e-6}, False),
        # The last digits of a sum depend on its order.
        ("seconds", {"seconds": 0.1 + 0.2 + 0.3}, {"seconds": 0.3 + 0.2 + 0.1}, True),
        # A space that only one of the runs uses.
        ("peak.l1", {"peaks": {"dram": 4}}, {"peaks": {"l1": 1}}, False),
        ("peak.l1", {"peaks": {"l1": 1}}, {"peaks": {"dram": 4}}, True),
        ("peak.l1:+5%", {"peaks": {}}, {"peaks": {"l1": 1}}, False),
    ],
)  # fmt: skip
def test_budgets_beside_edges(
    budget: str, old: dict[str, Any], new: dict[str, Any], kept: bool
) -> None:
    (result,) = check_budgets(parse_budgets(budget), run_of(**old), run_of(**new))
    assert result.is_kept is kept, result.text()
    assert parse_budgets(result.budget.text()) == (result.budget,)


def test_a_budget_is_printed_with_all_digits() -> None:
    words = ["bytes:+1234567", "seconds:+0.125%", "copies:12345678", "program_seconds:1.5e-07"]
    assert [budget.text() for budget in parse_budgets(*words)] == words


def test_a_budget_of_a_space_that_the_machine_lacks_is_named() -> None:
    host = run_of(machine="host", description=load_machine("host"))
    with pytest.raises(UsageError, match=r"'host' has no l1 for the budget 'peak\.l1:2'"):
        check_budgets(parse_budgets("peak.l1:2"), host, host)


def test_renamed_programs_do_not_hide_that_a_run_is_shorter() -> None:
    old, one_pass = run_of(6, runs=Counter(a=3, b=3)), Counter(a2=1, b2=1)
    assert difference(old, run_of(4, runs=one_pass)).unequal == (
        ("a", 3, 0), ("b", 3, 0), ("a2", 0, 1), ("b2", 0, 1),
    )  # fmt: skip
    # Two modules linked to one, in as many passes; and another order.
    assert not difference(old, run_of(6, runs=Counter(both=3))).unequal
    assert not difference(old, run_of(6, runs=Counter(b=3, a=3))).unequal


def device_record(body: Callable[[Any], object]) -> str:
    """The record of what a function does with a device of machine `tiny`."""
    with stitch.open_device("tiny") as device:
        recorder = Recorder(device)
        kept = body(device)
        text = recorder.text()
        del kept
    return text


X = np.ones((4, 8), np.float32)
L1 = ["input.x.space=l1", "output.0.space=l1"]


def test_the_peak_of_a_plan_that_runs_again_counts_what_is_kept_then() -> None:
    twice = stitch.compile(lambda x: (x + x) * (x * x), (X,), target="tiny", placement=L1)
    copy = stitch.compile(lambda x: x + x, (X,), target="tiny", placement=L1)

    def body(device: Any, *, keeps: bool) -> list[Any]:
        first, second = device.load(twice), device.load(copy)
        first(X).numpy()
        kept = [second(X) for _ in range(4)] if keeps else []
        device.flush()
        before = device.memory_use()[Space.L1].used_nbytes
        first(X).numpy()
        assert max(times for _, times in device.account().plans) == 2
        alone = plan_peaks([plan for plan, times in device.account().plans if times == 2])
        used.append((before, alone[Space.L1]))
        return kept

    used: list[tuple[int, int]] = []
    old = read_copies(device_record(lambda device: body(device, keeps=False)))
    new = read_copies(device_record(lambda device: body(device, keeps=True)))
    assert [old.peaks["l1"], new.peaks["l1"]] == [sum(one) for one in used]
    assert used[1][0] > used[0][0] == 0


@pytest.fixture
def records(cli: Cli) -> Cli:
    """old.json and new.json, and the result files oldr.json and newr.json; `b` differs."""
    for name, second in (("old", "b.ttb"), ("new", "b_dram.ttb")):
        words = ("--init=ones", f"--record={name}.json", f"--result_file={name}r.json")
        assert cli("run", "a.ttb", second, *words).code == 0
    return cli


def changed(path: str, change: Callable[[dict[str, Any]], object]) -> str:
    body = json.loads(Path(path).read_text())
    change(body)
    return json.dumps(body)


#: A file, a change by hand, and what the error names.
CHANGES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("new.json", lambda b: b["totals"].update(seconds=0.0), "totals"),
    ("new.json", lambda b: b["totals"].update(program_seconds=0.0), "totals"),
    ("newr.json", lambda b: b["totals"].update(seconds=0.0), "totals"),
    ("newr.json", lambda b: b["totals"].update(program_seconds=0.0), "totals"),
    ("newr.json", lambda b: b["totals"].update(seconds=float("nan")), "totals.seconds"),
    ("new.json", lambda b: b["events"][2]["used"].update(l1=0), "event 2"),
    ("new.json", lambda b: b["events"][2]["used"].update(l1=float("nan")), "event 2"),
    ("new.json", lambda b: b["events"][2]["used"].update(l1=1e999), "event 2"),
    ("new.json", lambda b: b["events"].pop(0), r"event \d"),
    ("new.json", lambda b: b["events"][0].update(size_per_bank=4096), r"event \d"),
    ("newr.json", lambda b: b["peak_bytes_per_bank"].update(l1=-1), "peak_bytes_per_bank"),
]


def test_figures_that_were_changed_by_hand_are_refused(records: Cli) -> None:
    for path, change, said in CHANGES:
        with pytest.raises(FormatError) as raised:
            read_copies(changed(path, change))
        assert re.search(said, str(raised.value)), raised.value


def test_result_files_of_two_machines_of_one_name_are_not_compared(records: Cli) -> None:
    old = read_copies(Path("oldr.json").read_text())
    assert old.digest == read_copies(Path("old.json").read_text()).digest
    other = changed("newr.json", lambda body: body.update(machine_digest="0" * 16))
    with pytest.raises(IncompatibleError, match="two machines, both named 'wormhole_n150'"):
        difference(old, read_copies(other))
    without = read_copies(changed("newr.json", lambda body: body.pop("machine_digest")))
    assert difference(old, without).added.copies == 1


def test_no_format_calls_a_budget_kept_that_cannot_be_checked(records: Cli) -> None:
    words = ("--init=ones", "--record=long.json", "--num_runs=3")
    assert records("run", "a.ttb", "b.ttb", *words).code == 0
    budgets = "--fail_on=copies:+9,bytes:1MiB"
    for form in FORMATS:
        done = records("diff", "old.json", "long.json", budgets, f"--format={form}")
        assert done.code == 6 and "their copies cannot be compared" in done.err
        if form == "text":
            assert "budget UNKNOWN: copies" in done.out and "budget kept: bytes" in done.out
        elif form == "markdown":
            assert "a budget cannot be checked" in done.out and "different lengths" in done.out
            assert "**unknown**" in done.out and "all budgets kept" not in done.out
        elif form == "json":
            found = json.loads(done.out)
            verdicts = [(one["kept"], one["verdict"]) for one in found["budgets"]]
            assert verdicts == [(False, "unknown"), (True, "kept")] and found["obstacle"]
        elif form == "junit":
            suite = ElementTree.fromstring(done.out)
            assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
            (error,) = suite.findall("testcase/error")
            assert "different lengths" in error.get("message", "")
        else:
            assert re.search("^::error title=stitch%3A a budget cannot be checked::", done.out)
    # What is broken for certain is exit code 7.
    assert records("diff", "old.json", "long.json", "--fail_on=copies,bytes:1").code == 7


def test_a_run_that_failed_in_the_middle_keeps_no_budget(records: Cli) -> None:
    def fail(context: Any) -> None:
        raise ValueError("told to")

    def body(device: Any) -> None:
        program = device.load(stitch.compile(lambda x: x + x, (X,), target="tiny"))
        device.hooks.register(before_program=fail)
        with pytest.raises(ValueError, match="told to"):
            program(X).numpy()

    text = device_record(body)
    Path("f.json").write_text(text)
    assert '"stopped"' in text
    done = records("diff", "f.json", "f.json", "--fail_on=copies:9,peak.l1")
    assert done.code == 6 and "the new run failed in the middle of 1 plan" in done.err
    assert records("diff", "f.json", "f.json").code == 0


HOSTILE = (
    "b\n::error file=/etc/passwd,line=1::pwned,a:b%0A|`<b>]]>&\x00\x1b[31m\u202e\uffff"
    " ##[error]z\r\n  ::notice::n"
)


def hostile(path: str, name: str) -> None:
    """Rename module `b` and its file in a record."""
    text = Path(path).read_text()
    for word in ('"name": "b"', '"b.yaml'):
        assert word in text
    text = text.replace('"name": "b"', f'"name": {json.dumps(name)}')
    Path(path).write_text(text.replace('"b.yaml', json.dumps(name)[:-1] + ".yaml"))


def check_junit(text: str) -> None:
    """Check a report by the rules of the usual schemas (Jenkins, xunit)."""
    suite = ElementTree.fromstring(text)
    assert suite.tag == "testsuite"
    assert set(suite.attrib) == {"name", "tests", "failures", "errors", "skipped", "time"}
    cases = suite.findall("testcase")
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counted = {name: len(suite.findall(f"testcase/{tag}")) for name, tag in kinds.items()}
    assert {name: int(suite.get(name, "")) for name in kinds} == counted
    assert int(suite.get("tests", "")) == len(cases) >= 1
    assert [one.tag for one in suite] == ["testcase"] * len(cases) + ["system-out"]
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    for case in cases:
        assert {"name", "classname", "time"} <= set(case.attrib) <= {
            "name", "classname", "time", "file", "line",
        }  # fmt: skip
        assert len(case) <= 1 and all(set(one.attrib) == {"message", "type"} for one in case)


def test_hostile_names_break_no_format(records: Cli) -> None:
    hostile("new.json", HOSTILE)
    shown: dict[str, str] = {}
    for form in FORMATS:
        done = records("diff", "old.json", "new.json", "--fail_on=copies,peak.l1",
                       f"--format={form}")  # fmt: skip
        assert done.code == 7, done.err
        shown[form] = done.out
        # Only the annotations are commands of a workflow, in each stream.
        commands = [line for line in (done.out + done.err).splitlines()
                    if line.lstrip().startswith("::")]  # fmt: skip
        assert len(commands) == (3 if form == "github" else 0), commands
        assert not re.search(r"[\x00\x1b\r]", done.out + done.err)
    check_junit(shown["junit"])
    assert json.loads(shown["json"])["more"][0]["nbytes"] == 128
    for line in shown["github"].splitlines():
        assert re.fullmatch(r"::(error|notice) (\w+=[^:,]*)(,\w+=[^:,]*)*::.*", line), line
    rows = [line for line in shown["markdown"].splitlines() if line]
    assert len(rows) == 12 and all(row[0] in "#|" for row in rows)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {0, 6, 7}


def test_reports_without_a_broken_budget_are_sound(records: Cli) -> None:
    for words in ((), ("--fail_on=copies:9",)):
        check_junit(records("diff", "old.json", "new.json", "--format=junit", *words).out)

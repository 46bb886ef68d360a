"""`stitch diff`: a changed layout breaks budgets, in every format with the line of the source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Cli = Callable[..., Any]
BUDGETS = "--fail_on=copies,bytes:+0,seconds:+1%,peak.l1"
#: Where the changed module reads its input.
SOURCE = "b.yaml:5"


@pytest.fixture
def runs(cli: Cli) -> Cli:
    """old.json and new.json: in the new run, `b` wants its input in DRAM instead of L1."""
    for name, second in (("old", "b.ttb"), ("new", "b_dram.ttb")):
        words = ("--init=ones", f"--record={name}.json", f"--result_file={name}_result.json")
        assert cli("run", "a.ttb", second, *words).code == 0
    return cli


def test_a_changed_layout_breaks_budgets_and_names_its_source_line(runs: Cli) -> None:
    done = runs("diff", "old.json", "new.json", BUDGETS)
    assert done.code == 7
    assert "budget BROKEN: copies: 2, at most 1 allowed (copies:+0; 1 before)" in done.out
    assert "budget kept: peak.l1: " in done.out
    assert f"output 'y' of 'a' (a.yaml:8) -> input 'x' of 'b' ({SOURCE})" in done.out
    assert re.findall(r"^stitch diff: error: (\w+): ", done.err, re.M) == [
        "copies", "bytes", "seconds",
    ]  # fmt: skip
    assert runs("diff", "new.json", "old.json", BUDGETS).code == 0
    assert runs("diff", "old.json", "new.json", "--fail_on=bytes:+128,copies:2").code == 0
    assert runs("diff", "old.json", "new.json", "--fail_on=bytes:+127").code == 7
    assert runs("diff", "old.json", "new.json", "--fail_on=bytes:+100%").code == 0
    assert runs("diff", "old.json", "new.json", "--fail_on=copies:1").code == 7
    assert runs("diff", "old.json", "new.json").code == 0


def test_json_has_the_difference_and_the_budgets(runs: Cli) -> None:
    done = runs("diff", "old.json", "new.json", BUDGETS, "--json")
    found = json.loads(done.out)
    assert done.code == 7
    (copy,) = found["more"]
    assert (copy["nbytes"], copy["consumer_location"]) == (128, SOURCE)
    assert [one["kept"] for one in found["budgets"]] == [False, False, False, True]
    assert (found["old"]["bytes"], found["new"]["bytes"], found["added"]["nbytes"]) == (
        128, 256, 128,
    )  # fmt: skip


def test_junit_has_a_case_for_each_budget(runs: Cli) -> None:
    done = runs("diff", "old.json", "new.json", BUDGETS, "--format=junit")
    suite = ElementTree.fromstring(done.out)
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [
        "copies:+0", "bytes:+0", "seconds:+1%", "peak.l1:+0",
    ]  # fmt: skip
    failures = [case for case in cases if case.find("failure") is not None]
    assert (suite.get("tests"), suite.get("failures"), len(failures)) == ("4", "3", 3)
    assert {(case.get("file"), case.get("line")) for case in failures} == {("b.yaml", "5")}


def test_annotations_name_the_only_file_of_that_name_below_the_folder(runs: Cli) -> None:
    annotation = "::error file={},line=5,title=stitch%3A +1 copy of 128 B::input 'x' of 'b' wants"
    words = ("diff", "old.json", "new.json", BUDGETS, "--format=github")
    Path("models/deep").mkdir(parents=True)
    Path("b.yaml").rename("models/deep/b.yaml")
    assert annotation.format("models/deep/b.yaml") in runs(*words).out
    Path("models/b.yaml").write_text("another")
    done = runs(*words)
    assert annotation.format("b.yaml") in done.out and done.code == 7
    # Without a broken budget nothing is an error.
    assert "::error" not in runs("diff", "old.json", "new.json", "--format=github").out


def test_markdown_is_a_table_that_no_name_breaks(runs: Cli) -> None:
    name = "x|y`z\n<b>"
    body = Path("new.json").read_text().replace('"name": "b"', f'"name": {json.dumps(name)}')
    Path("new.json").write_text(body)
    for form in ("markdown", "github", "junit", "text"):
        done = runs("diff", "old.json", "new.json", BUDGETS, f"--format={form}")
        assert done.code == 7, done.err
        if form == "markdown":
            rows = [line for line in done.out.splitlines() if line.startswith("|")]
            assert len(rows) == 11 and {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {
                6, 7,
            }  # fmt: skip
        if form == "github":
            assert all(line.startswith("::") for line in done.out.splitlines())
        if form == "junit":
            ElementTree.fromstring(done.out)


def test_records_and_result_files_of_a_run_compare_equal(runs: Cli) -> None:
    for name in ("old", "new"):
        done = runs("diff", f"{name}.json", f"{name}_result.json", BUDGETS, "--json")
        found = json.loads(done.out)
        assert (done.code, found["more"], found["fewer"]) == (0, [], []) and not done.err
        assert found["old"] == found["new"]
    assert runs("diff", "old_result.json", "new.json", BUDGETS).code == 7


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ("", "a budget has no key"), ("copies,", "a budget has no key"),
        ("copy", "did you mean 'copies'?"), ("peak.l3", "there is no budget 'peak.l3'"),
        ("bytes:+5%%", "a percentage is a number"), ("bytes:+many%", "a percentage is a number"),
        ("bytes:+nan%", "a percentage is a number"), ("bytes:+inf", "an amount of bytes"),
        ("bytes:5%", "a percentage is the growth"), ("bytes:-1", "an amount of bytes"),
        ("copies:1.5", "an amount of copies"), ("copies:1KiB", "an amount of copies"),
        ("bytes:1e999", "an amount of bytes"), ("bytes:", "an amount of bytes"),
        ("copies,copies:3", "two budgets for 'copies'"),
    ],
)  # fmt: skip
def test_malformed_budgets_are_usage_errors(cli: Cli, budgets: str, said: str) -> None:
    done = cli("diff", "old.json", "new.json", f"--fail_on={budgets}")
    assert done.code == 2 and said in done.err and not done.out, done.err
    assert done.err.count("error:") == 1


def test_other_wrong_words_are_usage_errors(runs: Cli) -> None:
    assert runs("diff", "old.json").code == 2
    assert runs("diff", "old.json", "new.json", "old.json").code == 2
    assert runs("diff", "old.json", "new.json", "--format=html").code == 2
    done = runs("diff", "old.json", "none.json")
    assert done.code == 3 and "none.json" in done.err


def step(body: dict[str, Any], kind: str) -> dict[str, Any]:
    """The last step of a kind, in the plan of a record."""
    steps: list[dict[str, Any]] = body["plans"]["1"]["steps"]
    return [one for one in steps if one["is"] == kind][-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: step(body, "Copy").update(nbytes=64), r"claims 64 B.*plan 1, step 7"),
        (lambda body: step(body, "Copy").update(seconds=0.0), r"claims 0.0 s.*plan 1, step 7"),
        (lambda body: body["plans"]["1"]["steps"].remove(step(body, "Copy")), r"plan 1, step 7"),
        (lambda body: step(body, "Copy").update(step="x"), r"plans.1.steps\[7\]"),
        (lambda body: body["totals"].update(nbytes=0), r"totals.*256 B.* 0 B"),
        (lambda body: body["totals"].update(copies=1), r"totals.*2 copies.*1 copies"),
        (lambda body: body["events"].append({"event": "run", "plan": 9}), r"event \d+"),
        (lambda body: body["events"].append({"event": "stopped", "plan": 1}), r"event \d+"),
        (lambda body: body.update(version=1), r"another version.*2.*1"),
        (lambda body: body.update(stitch="walk"), "no record"),
    ],
)
def test_a_changed_record_is_refused_and_the_step_is_named(
    runs: Cli, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    body = json.loads(Path("new.json").read_text())
    change(body)
    Path("new.json").write_text(json.dumps(body))
    done = runs("diff", "old.json", "new.json", "--fail_on=copies")
    assert done.code == 3 and re.search(said, done.err, re.S), done.err
    assert "new.json" in done.err and done.err.count("error:") == 1


def test_a_record_that_is_cut_off_is_refused(runs: Cli) -> None:
    text = Path("new.json").read_text()
    for end in (1, len(text) // 3, len(text) // 2, len(text) - 2):
        Path("new.json").write_text(text[:end])
        done = runs("diff", "old.json", "new.json")
        assert done.code == 3 and "new.json" in done.err and "Traceback" not in done.err
        assert "cut off" in done.err, done.err


def test_changed_result_files_are_refused(runs: Cli) -> None:
    text = Path("new_result.json").read_text()
    for old, new, said in (
        ('"nbytes": 128', '"nbytes": 64', "sum of the copies"),
        ('"copies": [', '"copys": [', "copies"),
        ('"machine": "wormhole_n150",', "", "no copies to compare"),
        ('"plans": [', '"plans": [3,', "plans[0]"),
    ):
        assert old in text
        Path("bad.json").write_text(text.replace(old, new, 1))
        done = runs("diff", "old.json", "bad.json")
        assert done.code == 3 and said in done.err, done.err
    Path("bad.json").write_text('{"result": "error", "exit_code": 5, "error": "out of memory"}')
    done = runs("diff", "old.json", "bad.json")
    assert done.code == 3 and "out of memory" in done.err


def test_runs_on_two_machines_are_not_compared(runs: Cli) -> None:
    assert runs("compile", "a.yaml", "-o", "a_tiny.ttb", "--target=tiny").code == 0
    words = ("a_tiny.ttb", "--init=ones", "--record=tiny.json", "--result_file=t.json")
    assert runs("run", *words).code == 0
    for name in ("tiny.json", "t.json"):
        done = runs("diff", "old.json", name)
        assert done.code == 4 and re.search(r"two machines.*wormhole_n150.*tiny", done.err, re.S)
    # One name, two descriptions.
    body = json.loads(Path("tiny.json").read_text())
    body["machine"]["shape"]["l1"]["limit"] += 1024
    body["plans"]["1"]["request"]["machine"]["shape"]["l1"]["limit"] += 1024
    Path("larger.json").write_text(json.dumps(body))
    done = runs("diff", "tiny.json", "larger.json")
    assert done.code == 4 and "machine.shape.l1.limit" in done.err, done.err


def test_runs_of_two_lengths_keep_no_budget_but_of_peaks_and_amounts(runs: Cli) -> None:
    words = ("--init=ones", "--record=long.json", "--num_runs=3")
    assert runs("run", "a.ttb", "b.ttb", *words).code == 0
    done = runs("diff", "old.json", "long.json", "--fail_on=copies,peak.l1")
    assert done.code == 6 and "'a' ran 1 time, then 3" in done.err
    done = runs("diff", "old.json", "long.json", "--fail_on=copies:3,peak.dram")
    assert done.code == 0 and "note: these runs are of different lengths" in done.err

"""`stitch-run --report=FILE.html`: one page of the run, also of one that fails."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.cli import stitch_command
from tests.support.report_pages import counts_of, data_of

Cli = Callable[..., Any]
RUN = ("run", "--module=a.ttb", "--module=b_dram.ttb", "--init=ones")


def test_the_page_has_what_explain_and_the_record_say(cli: Cli) -> None:
    done = cli(*RUN, "--loops=3", "--explain", "--record=run.json", "--report=run.html",
               "--result_file=run_results.json", "--max_copies=9")  # fmt: skip
    assert done.code == 0 and "wrote run.html" in done.err
    body = data_of(Path("run.html").read_text())
    totals = json.loads(Path("run.json").read_text())["totals"]
    counts = counts_of(body["runs"][0])
    assert (counts.copies, counts.nbytes) == (totals["copies"], totals["nbytes"])
    assert f"{counts.copies} copies, {counts.nbytes} B" in done.out
    result = json.loads(Path("run_results.json").read_text())["totals"]
    assert (counts.copies, counts.nbytes) == (result["copies"], result["nbytes"])
    (noscript,) = re.findall(r"(?s)<noscript><pre>(.*?)</pre>", Path("run.html").read_text())
    assert f"{counts.copies} copies, {counts.nbytes} B" in noscript
    assert body["budgets"] == [["copies in one pass: 1, at most 9", True]]
    run = body["runs"][0]
    assert any("a.yaml" in run["texts"][where] for _, where in run["locations"])


def test_a_broken_budget_is_on_the_page(cli: Cli) -> None:
    done = cli(*RUN, "--report=run.html", "--max_copies=0")
    assert done.code == 7
    body = data_of(Path("run.html").read_text())
    assert body["budgets"][0][1] is False and "at most 0 allowed" in body["notes"][0]


def test_a_run_that_fails_in_the_middle_has_a_page_up_to_there(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stitch.cli import run_session

    def fail(*_: Any) -> None:
        raise ValueError("told to fail")

    monkeypatch.setattr(run_session, "_outcome", fail)
    done = cli(*RUN, "--report=run.html")
    assert done.code == 6
    text = Path("run.html").read_text()
    body = data_of(text)
    assert "told to fail" in body["error"] and "told to fail" in text
    assert counts_of(body["runs"][0]).copies > 0


def test_a_mesh_that_fails_in_the_middle_has_a_page_up_to_there(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stitch.cli import run_session

    def fail(*_: Any) -> None:
        raise ValueError("told to\nfail")

    monkeypatch.setattr(run_session, "_outcome", fail)
    done = cli("run", "a.ttb", "b.ttb", "--init=ones", "--devices=2", "--report=run.html")
    assert done.code == 6
    body = data_of(Path("run.html").read_text())
    assert "told to\nfail" in body["error"]
    assert sum(counts_of(run).copies for run in body["runs"]) > 0


def test_a_command_that_is_refused_writes_no_report(cli: Cli) -> None:
    outputs = ("--report=run.html", "--record=run.json", "--trace=trace.json")
    for words in (("run", "a.ttb"), (*RUN, "--input=x=missing.npy"), (*RUN, "--module=gone.ttb")):
        done = cli(*words, *outputs)
        assert done.code in (2, 3), done.err
        assert not any(Path(word.partition("=")[2]).exists() for word in outputs)


def test_a_report_replaces_an_earlier_one_and_nothing_else(cli: Cli) -> None:
    assert cli(*RUN, "--report=run.html").code == 0
    assert cli(*RUN, "--report=run.html").code == 0
    before = Path("a.ttb").read_bytes()
    Path("folder.html").mkdir()
    Path("notes.html").write_text("<!doctype html><p>mine")
    for name in ("a.ttb", "folder.html", "notes.html", "missing/run.html", ""):
        done = cli(*RUN, f"--report={name}")
        assert done.code in (2, 6), (name, done.err)
        assert done.err.count("stitch-run: ") == 1, done.err
    assert Path("a.ttb").read_bytes() == before
    assert Path("notes.html").read_text() == "<!doctype html><p>mine"


def test_a_full_disk_is_one_error(cli: Cli) -> None:
    done = cli(*RUN, "--report=/dev/full")
    assert done.code == 6 and "No space left" in done.err and "/dev/full" in done.err
    assert "Traceback" not in done.err


def test_a_folder_without_leave_to_write_is_one_error(cli: Cli) -> None:
    Path("shut").mkdir(mode=0o500)
    done = cli(*RUN, "--report=shut/run.html")
    # The superuser may write everywhere.
    assert done.code == (0 if os.geteuid() == 0 else 6)


# Of several devices, and of records.


def test_a_run_on_several_devices_has_a_page_of_each_and_their_wall_clock(cli: Cli) -> None:
    done = cli("run", "a.ttb", "b.ttb", "--init=ones", "--devices=2", "--report=run.html")
    assert done.code == 0, done.err
    text = Path("run.html").read_text()
    body = data_of(text)
    assert len(body["runs"]) == 2 and len(body["tracks"]) >= 1
    for slices in body["tracks"].values():
        assert all(begin < end for _, begin, end in slices)
    told = [tuple(map(int, found)) for found in re.findall(r"(\d+) cop(?:y|ies), (\d+) B,", text)]
    counts = [counts_of(run) for run in body["runs"]]
    assert [(each.copies, each.nbytes) for each in counts] == told


@pytest.fixture
def records(cli: Cli) -> dict[str, Any]:
    """Records of two runs in the folder, and the second parsed."""
    assert cli(*RUN, "--record=new.json", "--loops=2").code == 0
    other = ("run", "--module=a.ttb", "--module=b.ttb", "--init=ones", "--loops=2")
    assert cli(*other, "--record=old.json").code == 0
    body: dict[str, Any] = json.loads(Path("new.json").read_text())
    return body


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = stitch_command.main(["report", *words])
    return code, capsys.readouterr().err


def test_a_record_has_the_page_of_its_run(
    records: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, "new.json", "-o", "run.html") == (0, "stitch report: wrote run.html\n")
    counts = counts_of(data_of(Path("run.html").read_text())["runs"][0])
    totals = records["totals"]
    assert (counts.copies, counts.nbytes) == (totals["copies"], totals["nbytes"])


def test_two_records_have_a_page_with_their_difference(
    records: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, "new.json", "old.json", "-o", "run.html")[0] == 0
    body = data_of(Path("run.html").read_text())
    assert [run["name"] for run in body["runs"]] == ["new.json (new)", "old.json (older)"]
    assert body["difference"]["added"][0] == 2
    assert any(more and times == 2 and "b" in why for more, times, *_, why in
               body["difference"]["lines"])  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(version=1), "another version"),
        (lambda body: body["plans"]["1"]["steps"].pop(), "plan 1"),
        (lambda body: body["plans"]["1"]["steps"][0]["block"].update(address=7), "plan 1, step"),
        (lambda body: body["events"].insert(0, {"event": "sing"}), "event 0"),
        (lambda body: body["events"].append({"event": "run", "plan": 99}), "lacks"),
        (lambda body: body["totals"].update(nbytes=1), "totals"),
    ],
)
def test_a_record_changed_by_hand_is_refused_and_the_step_named(
    records: dict[str, Any], capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], object], said: str,
) -> None:  # fmt: skip
    change(records)
    Path("new.json").write_text(json.dumps(records))
    code, error = report(capsys, "new.json", "-o", "run.html")
    assert code in (3, 6) and said in error and "internal" not in error, error
    assert not Path("run.html").exists()


def test_a_record_cut_off_anywhere_is_refused(
    records: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(records)
    for length in (0, 1, 40, len(text) // 2, len(text) - 1):
        Path("new.json").write_text(text[:length])
        code, error = report(capsys, "new.json", "-o", "run.html")
        assert code == 3 and "this is no record" in error


def test_wrong_words_of_stitch_report_are_one_error(
    records: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ((), "no file"), (("new.json",), "-o FILE.html"), (("new.json", "-o", "new.json"), "reads"),
        (("new.json", "old.json", "x", "-o", "y"), "or of two"),
        (("a.ttb", "-o", "x"), "no record"),
        (("new.json", "-o", "a.ttb"), "of another kind"), (("no.json", "-o", "x"), "No such file"),
    ):  # fmt: skip
        code, error = report(capsys, *words)
        assert code in (2, 3) and said in error, (words, error)
    body = records | {"machine": json.loads(json.dumps(records["machine"]))}
    body["machine"]["shape"]["name"] = "another"
    for plan in body["plans"].values():
        plan["request"]["machine"] = body["machine"]
    Path("old.json").write_text(json.dumps(body))
    code, error = report(capsys, "new.json", "old.json", "-o", "x.html")
    assert code == 4 and "two machines" in error

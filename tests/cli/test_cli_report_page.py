"""`stitch-run --report=FILE.html`: one page of the run, also of one that fails."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    from stitch.cli.run import run_session

    def fail(*_: Any) -> None:
        raise ValueError("told to fail")

    monkeypatch.setattr(run_session, "_outcome", fail)
    done = cli(*RUN, "--report=run.html")
    assert done.code == 6
    text = Path("run.html").read_text()
    body = data_of(text)
    assert "told to fail" in body["error"] and "told to fail" in text
    assert counts_of(body["runs"][0]).copies > 0


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

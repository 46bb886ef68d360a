"""`stitch simulate`: rows equal runs, sweeps vary figures, and machines that cannot run say why."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from stitch.cli.stitch_command import main
from tests.support.report_pages import data_of

Captured = pytest.CaptureFixture[str]
PIPELINE = """\
device: wormhole_n150
inputs: {x: {shape: [4, 8], type: float32}}
modules: {a: a.ttb, b: b.ttb}
steps: [{run: a, inputs: {x: x}, outputs: {y: h}}, {run: b, inputs: {x: h}, outputs: {y: y}}]
outputs: [y]
"""


def rows(capsys: Captured, *words: str) -> list[dict[str, Any]]:
    """The rows of `stitch simulate --json`, which ends with exit code 0."""
    capsys.readouterr()
    assert main(["simulate", "--json", *words]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_row_is_the_cost_of_the_same_dry_run(here: Path, capsys: Captured) -> None:
    (row,) = rows(capsys, "a.ttb", "b_dram.ttb")
    assert main(["run", "a.ttb", "b_dram.ttb", "--dry_run", "--result_file=r.json"]) == 0
    totals = json.loads(Path("r.json").read_text())["totals"]
    assert (row["copies"], row["bytes"]) == (totals["copies"], totals["nbytes"])
    assert row["copies_us"] == pytest.approx(totals["seconds"] * 1e6)
    assert row["programs_us"] == pytest.approx(totals["program_seconds"] * 1e6)
    assert row["us"] == pytest.approx(row["copies_us"] + row["programs_us"])


def test_a_sweep_has_a_row_for_each_value_as_machines_with_these_figures_have(
    here: Path, capsys: Captured
) -> None:
    Path("chain.yaml").write_text(PIPELINE)
    figure = "paths.host.l1.bytes_per_second"
    swept = rows(capsys, "chain.yaml", f"--sweep={figure}=1e9:3e9:1e9", "-o", "sweep.csv")
    assert [row[figure] for row in swept] == [1e9, 2e9, 3e9]
    assert swept[0]["us"] > swept[1]["us"] > swept[2]["us"]
    text = f"base: wormhole_n150\nname: own\noverrides: {{{figure}: 2.0e+9}}\n"
    Path("own.yaml").write_text(text)
    (own,) = rows(capsys, "chain.yaml", "--device=own.yaml")
    assert own["us"] == swept[1]["us"]
    table = list(csv.DictReader(Path("sweep.csv").read_text().splitlines()))
    assert [float(line["us"]) for line in table] == [row["us"] for row in swept]


def test_a_smaller_l1_ends_where_the_program_does_not_fit(here: Path, capsys: Captured) -> None:
    text = "base: tiny\nname: own\noverrides: {l1.base: 0}\n"
    Path("own.yaml").write_text(text)
    assert main(["compile", "b.yaml", "-o", "c.ttb", "--target=own.yaml",
                 "--set=input.x.space=l1", "--set=output.y.space=l1"]) == 0  # fmt: skip
    swept = rows(
        capsys, "c.ttb", "--device=own.yaml", "--sweep=l1.bank_nbytes=32,64,128,4096",
    )  # fmt: skip
    fits = [row["error"] is None for row in swept]
    assert fits == sorted(fits) and fits[-1] and not fits[0]
    assert "l1" in swept[0]["error"]


def test_several_sweeps_are_every_combination_and_the_text_names_the_least(
    here: Path, capsys: Captured
) -> None:
    words = ["simulate", "a.ttb", "b.ttb", "--sweep=noc.clock_hz=1e9,2e9"]
    assert main([*words, "--sweep=compute.launch_seconds=0,1e-6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].split()[:2] == ["noc.clock_hz", "compute.launch_seconds"]
    assert lines[-1].startswith("least time: ") and "launch_seconds=0" in lines[-1]


def test_a_page_has_the_curve_of_each_cost_over_one_figure(here: Path, capsys: Captured) -> None:
    words = ("a.ttb", "b.ttb", "--sweep=paths.host.l1.bytes_per_second=1e9:3e9:1e9")
    swept = rows(capsys, *words, "--report=sweep.html", "--device=wormhole_n150")
    body = data_of(Path("sweep.html").read_text())
    assert body["runs"] == [] and body["sweep"]["us"] == [row["us"] for row in swept]
    assert list(body["sweep"]) == ["paths.host.l1.bytes_per_second", "us", "copies_us"]
    assert main(["simulate", "a.ttb", "--report=other.html"]) == 2
    assert "curves over one figure" in capsys.readouterr().err
    assert not Path("other.html").exists()


def test_machines_on_which_the_modules_do_not_run_are_rows_with_the_reason(
    here: Path, capsys: Captured
) -> None:
    first, other = rows(capsys, "a.ttb", "--device=wormhole_n150", "--device=tiny")
    assert first["error"] is None and "does not run on 'tiny'" in other["error"]
    capsys.readouterr()
    assert main(["simulate", "a.ttb", "--device=tiny"]) == 4
    assert "does not run on 'tiny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "there is nothing to simulate"),
        (["a.ttb", "--sweep=l1.bank_nbytes"], "names no values"),
        (["a.ttb", "--sweep=l1.bank_nbytes=1:2"], "is no range"),
        (["a.ttb", "--sweep=l1.bank_nbytes=many"], "'many' is no number"),
        (["a.ttb", "--sweep=l1.bank_nbytes=2:1:1"], "has no values"),
        (["a.ttb", "--sweep=l1.bank_nbytes=1:2:0"], "has no values"),
        (["a.ttb", "--sweep=l1.bank_nbytes=nan"], "is no number"),
        (["a.ttb", "--sweep=l1.bank_nbytes=1:1000000:1"], "1,000,000 machines"),
        (["a.ttb", "--sweep=l1.bank_nbyte=1"], "did you mean 'bank_nbytes'?"),
        (["a.ttb", "--sweep=l1.policy=1"], "must be one of best_fit"),
        (["a.ttb", "--sweep=name=1"], "name"),
        (["a.ttb", "--sweep=noc.turns=0", "--sweep=noc.turns=1"], "a figure twice"),
        (["a.ttb", "--device=tinny"], "did you mean 'tiny'?"),
        (["chain.yaml", "a.ttb"], "a pipeline is simulated alone"),
    ],
)
def test_wrong_words_are_one_error(
    here: Path, capsys: Captured, words: list[str], part: str
) -> None:
    assert main(["simulate", *words, "-o", "out.csv"]) == 2
    assert part in capsys.readouterr().err and not Path("out.csv").exists()

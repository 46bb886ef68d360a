"""The command `stitch`: which subcommand runs, and under which name it reports errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stitch
from stitch import option_values
from stitch.cli.stitch_command import NAMES, main
from stitch.runtime import EXECUTORS

Captured = pytest.CaptureFixture[str]


def test_a_subcommand_runs_as_its_own_command_does(here: Path, capsys: Captured) -> None:
    assert main(["run", "a.ttb", "b.ttb", "--input=x=@x.npy", "--output=y=@y.npy"]) == 0
    assert Path("y.npy").exists()
    assert "stitch run: wrote y.npy" in capsys.readouterr().err


def test_a_subcommand_reports_errors_under_the_name_it_was_called_by(capsys: Captured) -> None:
    assert main(["run", "--exeutor=numpy"]) == 2
    assert capsys.readouterr().err.startswith("stitch run: error: there is no option --exeutor")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_subcommand(words: list[str], capsys: Captured) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_subcommand_has_help(name: str, capsys: Captured) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: stitch {name} ")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["rnu", "a.ttb"], "stitch run a.ttb"),
        (["a.ttb", "--init=ones"], "stitch run a.ttb --init=ones"),
        (["--explain", "run", "a b.ttb"], "stitch run --explain 'a b.ttb'"),
        (["--explain"], "stitch --help"),
        (["xyzzy"], "stitch --help"),
    ],
)
def test_an_unknown_first_word_is_answered_with_the_command_to_type(
    words: list[str], remedy: str, capsys: Captured
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {remedy}"


@pytest.mark.parametrize(
    "words",
    [
        ["compile", "b.yaml", "-o", "c.ttb"], ["link", "a.ttb", "b.ttb", "-o", "c.ttb"],
        ["inspect", "a.ttb"], ["inspect", "a.ttb", "b.ttb"], ["schema", "ttb"],
        ["schema", "mesh", "-o", "mesh.json"], ["export", "a.ttb", "--format=dot"],
        ["export", "a.ttb", "--format=onnx", "-o", "a.onnx"], ["run", "a.ttb", "--init=ones"],
        ["report", "run.json", "-o", "run.html"], ["diff", "run.json", "run.json"],
        ["simulate", "a.ttb"], ["pack", "buffers.csv"], ["machine"], ["machine", "tiny"],
        ["examples"], ["examples", "full_l1"], ["doctor", "--quick"], ["completion", "bash"],
    ],
)  # fmt: skip
def test_with_json_every_subcommand_prints_one_document(
    here: Path, capsys: Captured, words: list[str]
) -> None:
    Path("buffers.csv").write_text("id,lower,upper,size\n0,0,2,8\n")
    if "run.json" in words:
        assert main(["run", "a.ttb", "--init=ones", "--record=run.json"]) == 0
        capsys.readouterr()
    assert main([*words, "--json", "--quiet"]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out) and seen.err == ""


@pytest.mark.parametrize("name", NAMES)
def test_with_json_every_subcommand_prints_an_error_as_one_document(
    capsys: Captured, name: str
) -> None:
    assert main([name, "--jsno", "--json"]) == 2
    seen = capsys.readouterr()
    error = json.loads(seen.out)["error"]
    assert seen.err == ""
    assert error["exit_code"] == 2 and "there is no option --jsno" in error["message"]
    assert error["command"] == f"stitch {name} --json --json"


def test_export_and_schema_overwrite_no_file_of_another_kind(here: Path, capsys: Captured) -> None:
    before = Path("a.ttb").read_bytes()
    assert main(["export", "a.ttb", "--format=dot", "-o", "a.ttb"]) == 2
    assert main(["schema", "module", "-o", "a.ttb"]) == 2
    assert Path("a.ttb").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["--version"], "argparse contextlib dataclasses pathlib re typing"),
        (["--help"], "importlib.metadata stitch.runtime"),
        (["run", "--help"], "importlib.metadata stitch.runtime"),
    ],
)
def test_the_version_and_help_import_no_other_package_and_little_else(
    words: list[str], modules: str
) -> None:
    root = Path(stitch.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r});"
        f"from stitch.cli import main; main({words});"
        f"print([name for name in {modules.split()} if name in sys.modules])"
    )
    # Without `site` there are no installed packages.
    asked = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.stdout.startswith(("stitch ", "usage: stitch "))


def test_the_names_of_executors_that_help_lists_are_those_of_the_runtime() -> None:
    assert tuple(EXECUTORS) == option_values.EXECUTOR_NAMES


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "stitch", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("stitch ")

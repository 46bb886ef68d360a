"""No command writes over what it reads, nor over a file of another kind; `-` is standard output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stitch.api import load

Cli = Callable[..., Any]
RUN = ("run", "--module=a.ttb", "--input=x=@x.npy")
PIPELINE = """\
modules: {a: {file: a.ttb}}
inputs: {x: {file: x.npy}}
steps:
  - {run: a, inputs: {x: x}, outputs: {y: h}}
outputs: {y: h}
"""


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _refused(cli: Cli, here: Path, words: Sequence[str], said: str) -> None:
    """Exit code 2, one message, and every file as it was."""
    before = _bytes(here)
    done = cli(*words)
    assert done.code == 2 and said in done.err, (words, done)
    assert done.err.count("error:") == 1 and "Traceback" not in done.err and not done.out
    assert _bytes(here) == before


READ = "the command reads this file"
OTHER = "the file is of another kind"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compile", "a.yaml", "-o", "a.yaml"), READ),
        (("compile", "a.yaml", "-o", "x.npy"), OTHER),
        (("compile", "a.yaml", "-o", "notes.txt"), OTHER),
        (("compile", "a.yaml", "-o", "."), "is not a file"),
        (("link", "a.ttb", "b.ttb", "-o", "a.ttb"), READ),
        (("link", "a.ttb", "b.ttb", "-o", "soft"), READ),
        (("link", "a.ttb", "b.ttb", "-o", "hard"), READ),
        ((*RUN, "--trace=a.ttb"), READ),
        ((*RUN, "--record=b.ttb"), OTHER),
        ((*RUN, "--result_file=a.yaml"), OTHER),
        ((*RUN, "--result_file=x.npy"), OTHER),
        ((*RUN, "--output=@x.npy"), READ),
        ((*RUN, "--output=@./x.npy"), READ),
        ((*RUN, "--output=@link.npy"), READ),
        ((*RUN, "--output=@twin.npy"), READ),
        (("run", "--module=a.ttb", "--init=ones", "--expected_output=@x.npy", "--output=@x.npy"),
         READ),
        ((*RUN, "--output=@many.npz", "--trace=many.npz"), "two outputs have the same file"),
        ((*RUN, "--trace=t.json", "--record=./t.json"), "two outputs have the same file"),
        ((*RUN, "--result_file=t.json", "--record=t.json"), "two outputs have the same file"),
        ((*RUN, "--trace=-", "--record=-"), "two outputs use standard output"),
        ((*RUN, "--trace=-", "--output=-"), "two outputs use standard output"),
        ((*RUN, "--save_artifacts", "--artifact_dir=-"), "takes a folder"),
        (("run", "p.yaml", "--output=@x.npy"), READ),
        (("run", "p.yaml", "--trace=p.yaml"), READ),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_before_anything_is_computed(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    (here / "notes.txt").write_text("mine\n")
    (here / "soft").symlink_to("a.ttb")
    (here / "link.npy").symlink_to("x.npy")
    os.link("b.ttb", "hard")
    os.link("x.npy", "twin.npy")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr("stitch.cli.run_target.OneDevice.run_passes", never)
    monkeypatch.setattr("stitch.cli.link_command.link_parts", never)
    _refused(cli, here, words, said)


def test_artifacts_do_not_write_over_what_the_run_reads(cli: Cli, here: Path) -> None:
    assert cli(*RUN, "--save_artifacts").code == 0
    assert cli(*RUN, "--save_artifacts").code == 0
    again = ("run", "--module=a.ttb", "--input=x=@stitch-artifacts/outputs/0-y.npy")
    _refused(cli, here, (*again, "--save_artifacts"), READ)


def test_what_a_command_wrote_it_writes_over(cli: Cli, here: Path) -> None:
    words = (*RUN, "--output=@y.npy", "--trace=t.json", "--record=r.json", "--result_file=s.json",
             "--save_artifacts")  # fmt: skip
    for _ in range(2):
        assert cli(*words).code == 0
        assert cli(*RUN, "--output=@y.npz").code == 0
        assert cli("compile", "a.yaml", "-o", "o.ttb").code == 0
        assert cli("link", "a.ttb", "b.ttb", "-o", "ab.ttb").code == 0
    assert cli("run", "--module=a.ttb", "--result_file=s.json").code == 2  # Inputs are missing.
    assert json.loads(Path("s.json").read_text())["exit_code"] == 2
    assert cli(*words).code == 0


def test_empty_files_and_devices_are_written_to(cli: Cli, here: Path) -> None:
    for name in ("t.json", "o.ttb"):
        (here / name).touch()
    assert cli("compile", "a.yaml", "-o", "o.ttb").code == 0
    devices = ("--trace=/dev/null", "--record=/dev/null", "--result_file=/dev/null")
    assert cli(*RUN, *devices).code == 0
    assert cli(*RUN, "--trace=t.json").code == 0
    assert load("o.ttb").programs and json.loads(Path("t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("option", "key"),
    [("--trace", "traceEvents"), ("--record", "events"), ("--result_file", "comparisons")],
)
def test_one_output_goes_to_standard_output_and_reports_to_standard_error(
    cli: Cli, option: str, key: str
) -> None:
    done = cli(*RUN, f"{option}=-", "--explain", "--expected_output=(ignored)")
    assert done.code == 0 and key in json.loads(done.out)
    assert "1 program run, " in done.err
    after = cli(*RUN, "--explain")
    assert "1 program run, " in after.out and "1 program run, " not in after.err


STITCH_RUN = "import sys; from stitch.cli import run_main as main; sys.exit(main())"


def in_shell(handles: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`stitch-run` in a process of its own, with these redirections."""
    line = shlex.join([sys.executable, "-c", STITCH_RUN, "--module=a.ttb", "--init=ones", *words])
    return subprocess.run(
        ["/bin/sh", "-c", f"{line} {handles}"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [("--explain",), ("--output=-",), ("--trace=-",)])
def test_a_closed_standard_output_is_an_error_of_the_system(
    here: Path, words: tuple[str, ...]
) -> None:
    done = in_shell(">&-", *words)
    assert (done.returncode, done.stdout) == (6, "")
    assert "Bad file descriptor" in done.stderr and "internal" not in done.stderr


def test_what_goes_to_a_closed_standard_error_goes_nowhere_else(here: Path) -> None:
    done = in_shell("2>&-", "--trace=missing/t.json")
    assert (done.returncode, done.stdout, done.stderr) == (6, "", "")


def test_standard_output_that_leads_into_a_source_is_not_written_to(here: Path) -> None:
    before = Path("a.ttb").read_bytes()
    done = in_shell(">> a.ttb", "--trace=-")
    assert done.returncode == 2 and "does not overwrite it" in done.stderr
    assert Path("a.ttb").read_bytes() == before


def test_each_written_file_is_named_on_standard_error_unless_quiet(cli: Cli) -> None:
    words = ("--module=a.ttb", "--input=@x.npy", "--output=@y.npy", "--result_file=r.json")
    done = cli("run", *words)
    assert done.code == 0, done.err
    assert done.err == "stitch-run: wrote y.npy\nstitch-run: wrote r.json\n"
    assert "wrote" not in done.out
    assert cli("link", "a.ttb", "b.ttb", "-o", "ab.ttb").err == "stitch-link: wrote ab.ttb\n"
    for command in (("run", *words, "-q"), ("link", "a.ttb", "b.ttb", "-o", "ab.ttb", "--quiet")):
        quiet = cli(*command)
        assert (quiet.code, quiet.err) == (0, "")

"""`[tool.stitch]` of pyproject.toml: defaults of options, and one error for all of its defects."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stitch.cli.settings import project_settings
from stitch.cli.stitch_command import main

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def settings(text: str) -> None:
    """Write the settings into the current folder."""
    Path("pyproject.toml").write_text(f"[tool.stitch]\n{text}")


def test_settings_are_defaults_that_options_replace(here: Path, capsys: Captured) -> None:
    settings('target = "tiny"\ncache = "kept"\nexecutor = "null"\n')
    compiling = ["compile", "b.yaml", "-o", "c.ttb", "--json"]
    for more, machine in ([], "tiny"), (["--target=wormhole_n150"], "wormhole_n150"):
        capsys.readouterr()
        assert main(compiling + more) == 0
        body = json.loads(capsys.readouterr().out)
        assert body["files"][0]["machine"] == machine
        assert body["cache"]["folder"] == str(here / "kept")
    assert main(["run", "b.ttb", "--init=ones"]) == 0
    assert "planned only" in capsys.readouterr().out


def test_the_settings_that_the_page_of_commands_shows_are_sound(here: Path) -> None:
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    Path("pyproject.toml").write_text(shown)
    found = project_settings(here)
    assert (found.target, found.executor) == ("wormhole_n150", "torch")
    assert found.budgets == ("copies", "bytes:+0", "seconds:+5%") and found.cache


def test_budgets_of_the_command_replace_those_of_the_project(here: Path, capsys: Captured) -> None:
    settings('budgets = ["copies:0", "bytes"]\n')
    assert main(["run", "a.ttb", "b.ttb", "--init=ones", "--record=r.json"]) == 0
    assert main(["diff", "r.json", "r.json"]) == 7
    assert main(["diff", "r.json", "r.json", "--fail_on=copies"]) == 0
    assert main(["run", "b_dram.ttb", "--init=ones", "--record=other.json"]) == 0
    capsys.readouterr()
    assert main(["diff", "r.json", "other.json", "--fail_on=bytes:1MiB"]) == 0
    assert "no program in common" not in capsys.readouterr().err
    assert main(["run", "types.ttb", "--init=ones", "--record=other.json"]) == 0
    assert main(["diff", "r.json", "other.json", "--fail_on=bytes:1MiB"]) == 0
    assert "note: these runs have no program in common" in capsys.readouterr().err


def test_settings_of_a_folder_above_apply_and_their_paths_are_relative_to_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    settings('target = "machines/own.yaml"\n')
    (here / "machines").mkdir()
    text = "name: own\ncore_grid: [1, 1]\nhost: {banks: 1, bank_nbytes: 65536, alignment: 64}\n"
    path = "{from: host, to: host, bytes_per_second: 1.0e+9, latency_seconds: 0}"
    (here / "machines/own.yaml").write_text(f"{text}paths: [{path}]\n")
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    assert main(["compile", "../b.yaml", "-o", "c.ttb", "--set=input.x.space=host"]) == 0
    assert "program for own" in capsys.readouterr().out


def test_the_default_cache_folder_is_the_one_of_this_user(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "caches"))
    settings("cache = true\n")
    assert main(["compile", "b.yaml", "-o", "c.ttb"]) == 0
    assert len([*(here / "caches/stitch/compiled").glob("*.ttb")]) == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('tarrget = "tiny"\n', ["tool.stitch.tarrget", "did you mean 'target'?"]),
        ("target = 3\ncache = 4\nbudgets = 5\n",
         ["3 defects", "tool.stitch.target", "tool.stitch.cache", "tool.stitch.budgets"]),
        ('budgets = ["copies", 1]\n', ["must be a list of texts"]),
        ("target = \n", ["this is no TOML", "line 2"]),
        ('executor = "nump"\n', ["tool.stitch.executor", "did you mean 'numpy'?"]),
    ],
)  # fmt: skip
def test_every_defect_is_in_one_error(
    here: Path, capsys: Captured, text: str, parts: list[str]
) -> None:
    settings(text)
    assert main(["compile", "b.yaml", "-o", "c.ttb"]) == 3
    said = capsys.readouterr().err
    assert all(part in said for part in parts) and str(here / "pyproject.toml") in said
    assert not Path("c.ttb").exists()
    assert main(["compile", "--help"]) == 0, "help needs no settings"


@pytest.mark.parametrize(
    ("text", "words", "parts"),
    [
        ('target = "tinny"\n', ["compile", "b.yaml", "-o", "c.ttb"], ["did you mean 'tiny'?"]),
        ('target = "gone.yaml"\n', ["compile", "b.yaml", "-o", "c.ttb"], ["gone.yaml'"]),
        ('budgets = ["copis"]\n', ["diff", "a.json", "b.json"], ["no budget 'copis'"]),
        ('budgets = ["copies:+x"]\n', ["diff", "a.json", "b.json"], ["got: x"]),
    ],
)
def test_an_error_about_a_value_names_the_file_that_sets_it(
    here: Path, capsys: Captured, text: str, words: list[str], parts: list[str]
) -> None:
    settings(text)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts) and "command:" not in said
    assert said.splitlines()[-1] == f"  set by: [tool.stitch] of {here / 'pyproject.toml'}"


def test_commands_without_these_options_read_no_settings_and_doctor_says_what_is_wrong(
    here: Path, capsys: Captured
) -> None:
    settings("wrong = 1\n")
    assert main(["machine", "tiny"]) == main(["inspect", "a.ttb"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--quick"]) == 6
    assert "BAD [tool.stitch]: " in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_one_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    settings("")
    monkeypatch.setattr("stitch.cli.settings.read_text", fail)
    assert main(["compile", "b.yaml", "-o", "c.ttb"]) == 3
    said = capsys.readouterr().err
    assert "Permission denied" in said and str(here / "pyproject.toml") in said


def test_a_cache_folder_that_cannot_be_made_is_one_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "a.yaml"))
    assert main(["compile", "b.yaml", "-o", "c.ttb", "--cache=default", "-q"]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not cached: cannot make the folder" in said and str(here / "a.yaml") in said


def test_a_file_without_settings_is_not_judged(here: Path) -> None:
    Path("pyproject.toml").write_text("[project\n")
    assert main(["compile", "b.yaml", "-o", "c.ttb"]) == 0

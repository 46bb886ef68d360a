"""`[tool.stitch]` of pyproject.toml: defaults of options, and one error for all of its defects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.cli.stitch_command import main

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


def test_a_file_without_settings_is_not_judged(here: Path) -> None:
    Path("pyproject.toml").write_text("[project\n")
    assert main(["compile", "b.yaml", "-o", "c.ttb"]) == 0

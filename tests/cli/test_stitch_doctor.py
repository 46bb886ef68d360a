"""`stitch doctor`: what it finds in a sound installation, and in one with each kind of problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stitch.cli.doctor_command import _FRONT_ENDS
from stitch.cli.stitch_command import main
from stitch.errors import UsageError
from stitch.option_values import EXECUTOR_NAMES

Captured = pytest.CaptureFixture[str]


def doctor(capsys: Captured, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `stitch doctor --json`; return its exit code, and each finding by its topic."""
    capsys.readouterr()
    code = main(["doctor", "--json", *words])
    body = json.loads(capsys.readouterr().out)
    return code, {finding["topic"]: finding for finding in body["findings"]}


def distribution(folder: Path, name: str, entry_points: str = "") -> None:
    """Write the metadata of an installed distribution into a folder of `sys.path`."""
    info = folder / f"{name}-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def test_a_sound_installation_has_no_problem(capsys: Captured) -> None:
    code, found = doctor(capsys)
    assert code == 0 and not [f for f in found.values() if f["status"] == "problem"]
    for name in EXECUTOR_NAMES[:-1]:
        assert "its result is right" in found[f"executor {name}"]["text"]
    assert found["extra torch"]["text"].startswith("torch ")


def test_another_package_named_stitch_is_a_problem_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    distribution(tmp_path, "stitch")
    monkeypatch.syspath_prepend(tmp_path)
    code, found = doctor(capsys, "--quick")
    assert code == 6
    assert found["packages named stitch"]["status"] == "problem"
    assert found["packages named stitch"]["remedy"].startswith("pip uninstall -y stitch && ")


def test_a_plugin_that_cannot_be_imported_is_a_problem_that_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "sound_plugin.py").write_text("value = 1\n")
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no device')\n")
    points = "[stitch.machines]\ngood = sound_plugin:value\nbad = broken_plugin:value\n"
    distribution(tmp_path, "mine", points)
    monkeypatch.syspath_prepend(tmp_path)
    code, found = doctor(capsys, "--quick")
    bad = found["plugin bad of stitch.machines"]
    assert code == 6 and bad["status"] == "problem"
    assert "no device" in bad["text"] and bad["remedy"].endswith("pip uninstall mine")
    assert found["plugin good of stitch.machines"]["status"] == "ok"


def test_an_executor_that_fails_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UsageError("no device opens")

    monkeypatch.setattr("stitch.api.open_device", fail)
    code, found = doctor(capsys)
    assert code == 6 and "no device opens" in found["executor numpy"]["text"]


def test_a_front_end_that_cannot_be_loaded_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(_FRONT_ENDS, "torch", "removed")
    code, found = doctor(capsys)
    assert code == 6 and "'removed'" in found["front end torch"]["text"]
    assert found["front end torch"]["remedy"] == "pip install 'stitch-runtime[torch]'"
    assert found["front end onnx"]["status"] == "ok"


def test_settings_and_the_cache_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "pyproject.toml").write_text('[tool.stitch]\ntarget = "tiny"\n')
    monkeypatch.chdir(tmp_path)
    code, found = doctor(capsys, "--quick")
    assert code == 0
    assert str(tmp_path / "caches") in found["cache folder"]["text"]
    assert found["[tool.stitch]"]["text"].endswith("target=tiny")

"""One command prints the goals of planner, mover and layouts, and says which are missed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.benches import load_bench


@pytest.fixture
def bench() -> ModuleType:
    return load_bench("memory_goals")


def test_all_six_benchmarks_are_there_and_a_miss_is_named(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str]) -> SimpleNamespace:
        assert Path(command[1]).is_file() and command[-1] == "--check"
        ran.append(Path(command[1]).stem)
        return SimpleNamespace(returncode=int(ran[-1] == "moves"))

    monkeypatch.setattr(subprocess, "run", run)
    assert bench.main([]) == 1
    assert set(ran) == {"packing", "fragmentation", "residency", "moves", "planning", "layout"}
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("missed")] == [
        f"{'moves':<32} a goal is missed"
    ]
    assert bench.main(["--only", "packing"]) == 0


def test_a_benchmark_that_misses_no_goal_ends_with_0(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = bench.FILES[:1]
    monkeypatch.setattr(bench, "COMMANDS", (("packing", *small, "--placements", "100000"),))
    assert bench.main([]) == 0
    assert "goals met" in capfd.readouterr().out

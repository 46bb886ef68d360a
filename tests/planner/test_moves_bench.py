"""The moves benchmark: a row per case, each near the best of ways that the mover has no part in."""

from __future__ import annotations

import ast
import json

import pytest

from tests.support.benches import BENCHES, load_bench, run_bench


@pytest.mark.campaign("benchmarks")
def test_no_move_on_tiny_takes_more_than_1_1_of_the_best_of_the_fixed_ways() -> None:
    done = run_bench("moves", "--machines", "tiny", "--cases", "4", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 60 and not any(row["problems"] for row in rows)
    assert all(0.5 < row["time_over_best"] <= 1.1 for row in rows)
    assert all(row["operations_per_tensor_and_piece"] <= 4 for row in rows)


def test_what_judges_the_mover_has_nothing_of_it() -> None:
    for file in (BENCHES / "moves.py", *(BENCHES / "moves_ways").glob("*.py")):
        imported = {
            node.module or ""
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
        }
        made_by = {name for name in imported if name.startswith("stitch.planner.")}
        assert made_by <= {"stitch.planner.checker.relocations"}


def test_a_missed_goal_is_said_beside_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_bench("moves")
    monkeypatch.setattr(bench, "KINDS", ("swap",))
    monkeypatch.setattr(bench, "UTILISATIONS", (0.5,))
    monkeypatch.setattr(bench, "TIME_GOAL", 0.1)
    words = ["--machines", "tiny", "--cases", "1", "--json"]
    assert bench.main([*words, "--check"]) == 1
    assert "goal missed: tiny, swap at 0.50: " in capsys.readouterr().err
    assert bench.main(words) == 0

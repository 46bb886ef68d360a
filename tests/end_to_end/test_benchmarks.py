"""The benchmarks run, compare results before they time anything, and report as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_overhead", BENCH / "overhead.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


def test_the_overhead_of_each_chain_is_reported(
    overhead: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--chains", "1,3", "--width", "8", "--batch", "2", "--machine", "tiny"]
    assert overhead.main([*words, "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["programs"] for row in rows] == [1, 3]
    for row in rows:
        assert row["pipeline_us"] > 0 and row["calls_us"] > 0 and row["hand_us"] > 0
        assert row["pipeline_us_per_program"] == pytest.approx(row["pipeline_us"] / row["programs"])


def test_every_missed_goal_is_named(overhead: ModuleType) -> None:
    def row(programs: int, ratio: float, calls: float) -> object:
        return overhead.Row("tiny", programs, 8, 1, *[1.0] * 3, ratio, *[1.0] * 4, calls)

    assert overhead.missed_goals([row(2, 1.3, 10.0), row(64, 1.3, 9.0)]) == []
    assert len(overhead.missed_goals([row(2, 1.31, 10.1), row(64, 1.0, 9.0)])) == 2
    (grows,) = overhead.missed_goals([row(2, 1.0, 1.0), row(64, 1.2, 1.0)])
    assert "its cost grows" in grows


def test_by_hand_is_the_network_that_the_programs_are(overhead: ModuleType) -> None:
    layers = overhead.make_layers(2, 8)
    x = overhead.np.ones((3, 8), overhead.np.float32)
    expected = x
    for w, b in layers:
        expected = overhead.np.maximum(expected @ w + b, 0)
    overhead.np.testing.assert_allclose(overhead.by_hand(layers, 3)(x), expected, rtol=1e-6)

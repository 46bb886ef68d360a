"""The benchmark of layouts: a row for each shape and types, goals that are met or named."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from tests.support.benches import load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("layout")


def test_numpy_and_torch_stand_beside_us_where_no_type_changes(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["64x40", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    has_torch = importlib.util.find_spec("torch") is not None
    assert len(rows) == len(bench.PAIRS)
    for row in rows:
        assert row["tilize"] > 0 and row["untilize"] > 0
        is_plain = row["host"] == row["device"]
        for way in ("tilize", "untilize"):
            assert (row[f"numpy_{way}"] is not None) == is_plain
            assert (row[f"torch_{way}"] is not None) == (is_plain and has_torch)


def test_every_missed_goal_is_named(bench: ModuleType) -> None:
    def misses(shape: str, ours: float, *others: float | None, device: str = "f32") -> list[str]:
        numpy, torch = others
        ratios = (ours, 0.8, numpy, 0.1, torch, 0.1)
        found: list[str] = bench.misses(bench.Row(shape, "f32", device, *ratios, 1.0, 1.0, 1.0, 0))
        return found

    assert misses("2048x2048", 0.75, 0.75, 0.75) == misses("9x9", 0.1, 0.1, None) == []
    assert misses("9x9", 0.1, None, None, device="bf16") == []
    assert misses("2048x2048", 0.74, 0.1, None) == [
        "2048x2048, f32 to f32: tilize 0.74, the goal 0.75"
    ]
    assert [text[-10:] for text in misses("9x9", 0.1, 0.2, 0.3)] == ["NumPy 0.20", "torch 0.30"]


def test_a_missed_goal_is_said_beside_json(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "misses", lambda row: ["a goal"] * (row.device == "f32"))
    assert bench.main(["32x32", "--rounds", "1", "--json", "--check"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) and printed.err == "goal missed: a goal\n"

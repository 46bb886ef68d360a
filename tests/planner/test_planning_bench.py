"""The planning benchmark: a row for each point, goals that are met or named."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.benches import load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("planning")


def test_a_row_for_each_point(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All that this process has ever imported stays out of collections, of which each point has one
    # (tests/conftest.py).
    monkeypatch.setattr(bench.gc, "unfreeze", lambda: None)
    words = ["--tasks", "3", "12", "--live", "10", "--doubled", "5", "10"]
    words += ["--rounds", "1", "--json"]
    assert bench.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["tasks"], row["live"]) for row in rows] == [
        ("dropped", 3, 0), ("dropped", 12, 0), ("kept", 3, 0), ("kept", 12, 0),
        ("pressed", 3, 0), ("pressed", 12, 0), ("beside", 100, 10), ("fragmented", 10, 10),
        *((kind, n, 0) for kind in ("chain", "tree", "independent") for n in (5, 10)),
    ]  # fmt: skip
    for row in rows:
        assert row["planning_us"] > 0 and row["binding_us"] > 0
        assert row["kind"] == "pressed" or row["replayed_us"] > 0
        assert (row["elsewhere_us"] is None) == (row["kind"] in ("pressed", "fragmented"))


def test_every_missed_goal_is_named(bench: ModuleType) -> None:
    row = bench.Row
    fine = [row("kept", 100, 0, 900.0, 9.0, 20.0, 1.0)]
    fine += [row("kept", 10_000, 0, 1000.0, 9.0, 9.0, 0.9)]
    fine += [row("beside", 100, 200, 5000.0, 9.0, 9.0, 1.0)]
    fine += [row("beside", 10, 64, 999.0, 9.0, 90.0, 7.0), row("a.json", 10, 64, 1000.0)]
    fine += [row("fragmented", 10, 10, 4999.0, 9.0, None, 9.0)]
    assert bench.misses(fine) == []
    for bad, said in (
        (row("beside", 100, 64, 1001.0, 9.0, 9.0, 1.0), "1001 us of planning"),
        (row("fragmented", 10, 10, 5001.0, 9.0, None, 1.0), "5001 us of planning"),
        (row("kept", 100, 0, 100.0, 9.0, 9.0, 1.1), "1.10 us a task replayed"),
        (row("pressed", 100, 0, 100.0, 9.0), "planned or bound anew each time"),
        (row("kept", 100, 0, 100.0, 9.0, 20.1, 1.0), "20.1 us a task bound at other addresses"),
        (row("tree", 64, 0, 100.0, 9.0, None, 1.0), "never bound at other addresses"),
        (row("independent", 64, 0, 501.0, 9.0, 9.0, 1.0), "501 us of planning"),
    ):
        (missed,) = bench.misses([bad])
        assert said in missed
    short = row("kept", 100, 0, 100.0, 1.0, 1.0, 1.0)
    (grown,) = bench.misses([short, row("kept", 200, 0, 131.0)])
    assert "1.31 of what 100 tasks take" in grown
    tree = [
        row("tree", n, 0, us, 9.0, 9.0, 1.0) for n, us in ((64, 100.0), (128, 120.0), (256, 145.0))
    ]
    assert bench.misses(tree[:2]) == []
    (doubled,) = bench.misses(tree)
    assert "256 tasks" in doubled and "1.21 of what half as many take" in doubled


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe\0"])
def test_a_file_that_is_no_record_is_one_clear_error(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert bench.main(["--traces", str(file)]) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("planning.py: ") and str(file) in printed

"""The benchmark of lanes: a row for each work and executor, goals that are met or named."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from tests.support.benches import load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("lanes")


def test_a_row_for_each_work_and_executor(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--sizes",
        "32",
        "64",
        "--tasks",
        "5",
        "--inter_op_threads",
        "3",
        "--rounds",
        "1",
        "--json",
    ]
    assert bench.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["work"] for row in rows] == [
        "3 products of 32x32", "3 products of 64x64", "5 tiny programs"
    ]  # fmt: skip
    assert [row["goal"] for row in rows] == [1.6, 1.6, 0.98]
    for row in rows:
        assert row["ratio"] == row["one"] / row["several"] > 0
        assert (row["by_hand"] is None) == row["work"].startswith("5")


@pytest.mark.parametrize(("several", "code"), [(1.0, 0), (1.1, 1)])
def test_check_says_whether_goals_were_reached(
    several: float, code: int, bench: ModuleType, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        bench, "best_of", lambda ways, rounds: [1.0, several, 1.0, 1.0][: len(ways)]
    )
    words = ["--sizes", "--tasks", "3", "--rounds", "1"]
    assert bench.main([*words, "--check"]) == code
    assert bench.main(words) == 0
    assert ("goal missed: 3 tiny programs" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("words", [["--inter_op_threads", "1"], ["--tasks", "0"], ["--sizes", "0"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str], bench: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(words)
    assert caught.value.code == 2

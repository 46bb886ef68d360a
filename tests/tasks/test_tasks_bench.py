"""The benchmark of host tasks: a row for each graph and way, goals that are met or named."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.benches import load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("tasks")


def test_a_row_for_each_graph_and_way(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ["stitch", "ThreadPoolExecutor", "dask"]
    monkeypatch.setitem(sys.modules, "dask.local", None)
    words = ["--counts", "200", "500", "--ways", *ways, "--rounds", "1", "--json"]
    assert bench.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["graph"], row["tasks"], row["way"]) for row in rows] == [
        (graph, count, way) for count in (200, 500) for graph in ("chain", "dag") for way in ways
    ]
    for row in rows:
        is_there = row["way"] != "dask"
        assert (row["per_second"] is not None) == is_there
        assert bool(row["missing"]) != is_there
        assert (row["kept"] is not None) == (row["way"] == "stitch")


@pytest.mark.parametrize("way", ["stitch", "ThreadPoolExecutor"])
@pytest.mark.parametrize("graph", ["chain", "dag"])
def test_each_way_runs_every_task_after_what_it_reads(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, graph: str, way: str
) -> None:
    made: list[int] = []

    def counted(*arguments: int | None) -> int:
        made.append(len(made))
        # Futures of the pool give nothing on.
        assert all(argument is None or argument < made[-1] for argument in arguments)
        return made[-1]

    monkeypatch.setattr(bench, "nothing", counted)
    reads = bench.reads_of(graph, 300, 7)
    bench.WAYS[way](reads)
    assert len(made) == 300
    assert all(1 <= at <= min(i, bench.REACH) for i, before in enumerate(reads) for at in before)


def test_ray_is_started_before_it_is_timed_and_stopped(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a stand-in: where Ray itself is installed, the benchmark runs it."""
    happened: list[Any] = []

    class Remote:
        def __init__(self, function: Any) -> None:
            self.function = function

        def remote(self, *arguments: Any) -> Any:
            happened.append("call")
            return self.function(*arguments)

    cluster = SimpleNamespace(
        init=lambda **words: happened.append(words), shutdown=lambda: happened.append("stop"),
        remote=Remote, get=lambda value: value,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", cluster)
    words = ["--counts", "40", "--graphs", "chain", "--ways", "ray", "--rounds", "1", "--json"]
    assert bench.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tasks"], row["missing"]) == (40, "") and row["per_second"] > 0
    started, *calls, stopped = happened
    assert started["num_cpus"] == 2 and started["include_dashboard"] is False
    assert calls == ["call"] * 80 and stopped == "stop"


def test_every_missed_goal_is_named(bench: ModuleType) -> None:
    row = bench.Row
    assert bench.missed([row("chain", "stitch", 10, 2e5, 8.0), row("dag", "dask", 10, 1.0)]) == []
    assert len(bench.missed([row("chain", "stitch", 10, 1e5, 1.0)])) == 1
    assert len(bench.missed([row("chain", "stitch", 10, 3e5, 9.0)])) == 1
    with pytest.raises(SystemExit):
        bench.main(["--counts", "0"])

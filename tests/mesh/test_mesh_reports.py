"""Statistics and the trace of a mesh: one for all devices, on one clock."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.errors import UsageError
from stitch.mesh import open_mesh
from tests.mesh.test_mesh import batches, chain, mesh_with
from tests.support.trace_format import checked

BATCHES = 3


def trace_of_a_run(path: Path) -> tuple[dict[str, Any], tuple[float, float]]:
    """Return the trace of three calls of a graph, and the client's time before and after."""
    graph, _ = chain()
    with open_mesh(2, machine="tiny", trace=True) as mesh:
        run = mesh.prepare(graph)
        before = time.time()
        for x in batches(BATCHES):
            run(x)
        run.wait()
        after = time.time()
        mesh.write_trace(path)
    return json.loads(gzip.decompress(path.read_bytes())), (before, after)


def test_every_device_has_tracks_of_its_own(tmp_path: Path) -> None:
    trace, _ = trace_of_a_run(tmp_path / "trace.json.gz")
    lines = trace["traceEvents"]
    names = {line["pid"]: line["args"]["name"] for line in lines if line["name"] == "process_name"}
    assert names == {
        1: "device0: tiny (simulated time)", 2: "device0: host (wall time)",
        3: "device1: tiny (simulated time)", 4: "device1: host (wall time)",
    }  # fmt: skip
    for first in (1, 3):
        own = [line for line in lines if line["pid"] in (first, first + 1)]
        own = [line for line in own if line.get("cat") != "crossing"]
        checked({"traceEvents": own, "displayTimeUnit": "ns"})
    # Viewers identify tracks by their number, and buffers by theirs, among all processes.
    for key, phase in (("tid", "X"), ("id", "b")):
        found = {(line[key], line["pid"]) for line in lines if line["ph"] == phase}
        assert len({number for number, _ in found}) == len(found) > 1
    programs = [line["pid"] for line in lines if line.get("cat") == "program"]
    assert [programs.count(pid) for pid in (1, 2, 3, 4)] == [3 * BATCHES, 0, BATCHES, 0]


def test_an_arrow_leads_from_the_piece_that_makes_a_value_to_the_piece_that_reads_it(
    tmp_path: Path,
) -> None:
    trace, _ = trace_of_a_run(tmp_path / "trace.json.gz")
    lines = trace["traceEvents"]
    pieces = [line for line in lines if line.get("cat") == "piece"]
    assert len(pieces) == 3 * BATCHES

    def piece_at(end: dict[str, Any]) -> tuple[str, int]:
        (found,) = [
            line for line in pieces if (line["pid"], line["tid"]) == (end["pid"], end["tid"])
            and line["ts"] <= end["ts"] < line["ts"] + line["dur"]
        ]  # fmt: skip
        return found["name"], found["args"]["run"]

    arrows: dict[int, list[Any]] = {}
    for line in lines:
        if line.get("cat") == "crossing":
            arrows.setdefault(line["id"], []).append(piece_at(line))
    assert sorted(arrows.values()) == sorted(
        [(f"piece {at}", run), (f"piece {at + 1}", run)]
        for at in (0, 1) for run in range(1, BATCHES + 1)
    )  # fmt: skip


def test_the_clocks_of_servers_are_moved_to_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 1000.0
    clock = SimpleNamespace(time=lambda: time.time() + ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr("stitch.mesh.server.time", clock)
    trace, (before, after) = trace_of_a_run(tmp_path / "trace.json.gz")
    told = trace["otherData"]
    for found in told["clocks"].values():
        assert abs(found["ahead_seconds"] - ahead) <= found["error_seconds"] < 0.5
    error = max(found["error_seconds"] for found in told["clocks"].values()) + 1e-6
    for line in trace["traceEvents"]:
        if line["pid"] in (2, 4) and line.get("cat") in ("piece", "run", "task"):
            begin = told["began"] + line["ts"] / 1e6
            assert before - error <= begin <= begin + line["dur"] / 1e6 <= after + error, line


def test_statistics_count_messages_values_and_restarts() -> None:
    graph, _ = chain()
    (x,) = batches(1)
    with mesh_with({7: "kill during"}) as mesh:
        run = mesh.prepare(graph)
        for _ in range(BATCHES):
            run(x)[2].numpy()
        told = mesh.statistics()
        assert told["crossings"] == 2 * BATCHES
        # One run was lost and sent again, with what its server needs for it.
        assert told["messages"]["Run"] > 3 * BATCHES
        devices = told["devices"]
        assert sorted(each["restarts"] for each in devices.values()) == [0, 1]
        assert {each["machine"] for each in devices.values()} == {"host"}
        assert devices["device1"]["pid"] == mesh.devices["device1"].pid
        with pytest.raises(UsageError, match="no trace is kept"):
            mesh.trace()
    # The figures can be written as JSON, as the result file does.
    assert json.loads(json.dumps(told)) == told

"""The Chrome trace of a mesh: the tracks of every device, and arrows for values that travel.

Each device has two processes of the trace, its simulated clock and its wall clock. Simulated clocks
begin at 0 on every device and are not compared. Wall times of servers are moved to the clock of the
client, by the answer of five that took least: it is wrong by half of the time that this one took at
most, as long as neither clock was set meanwhile.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stitch.mesh.client import MeshClient
from stitch.mesh.messages import Report
from stitch.report import SIMULATED, TICK, WALL, is_compressed, slice_line, track_names

Line: TypeAlias = dict[str, Any]

_ANSWERS = 5
_PROCESSES = max(SIMULATED, WALL)
#: Tracks of each device: viewers identify a track by its number alone.
_TRACKS = 1 << 25
#: The track of a device's pieces, and ids of buffers of each device.
_PIECES, _BUFFERS = 1 << 15, 1 << 40


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a server: how far it is ahead of the client's, and the error of that."""

    ahead_seconds: float
    error_seconds: float


def trace_of(client: MeshClient, devices: Sequence[str]) -> dict[str, Any]:
    """Return the trace of devices as a JSON object; `otherData` has their clocks,
    and the client's time where the wall clocks begin.

    Raises `UsageError` if their servers keep no traces.
    """
    clocks = {name: clock_of(client, name) for name in devices}
    answers = {name: json.loads(client.ask(name, Report("trace"))) for name in devices}
    began = {name: answers[name]["began"] - clocks[name].ahead_seconds for name in devices}
    origin = min(
        [*began.values(), *[each.begin - clocks[each.device].ahead_seconds
                            for each in client.records]]
    )  # fmt: skip
    lines: list[Line] = []
    for number, name in enumerate(devices):
        shift = (began[name] - origin) * 1e6
        lines += [_renumbered(line, name, number, shift) for line in answers[name]["lines"]]
        lines += track_names(_process(WALL, number), _PIECES + number * _TRACKS, "pieces")
    lines += _pieces(client, {name: at for at, name in enumerate(devices)}, clocks, origin)
    return {
        "traceEvents": lines, "displayTimeUnit": "ns",
        "otherData": {
            "began": origin, "clocks": {name: asdict(clock) for name, clock in clocks.items()},
        },
    }  # fmt: skip


def wall_tracks(trace: Mapping[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Return the runs of pieces on the wall clock, in microseconds, by device."""
    tracks: dict[str, list[tuple[str, float, float]]] = {}
    names = {
        line["pid"]: line["args"]["name"].rpartition(":")[0]
        for line in trace["traceEvents"] if line["name"] == "process_name"
    }  # fmt: skip
    for line in trace["traceEvents"]:
        if line.get("cat") == "piece":
            span = (line["name"], line["ts"], line["ts"] + line["dur"])
            tracks.setdefault(names[line["pid"]], []).append(span)
    return tracks


def trace_bytes(trace: Mapping[str, Any], path: str | Path) -> bytes:
    """Return the contents of the file of a trace, compressed if its name ends with `.gz`."""
    text = json.dumps(trace).encode()
    return gzip.compress(text, mtime=0) if is_compressed(path) else text


def clock_of(client: MeshClient, device: str) -> Clock:
    """Compare the clock of a server with the client's."""
    clocks = []
    for _ in range(_ANSWERS):
        before = time.time()
        there = float(client.ask(device, Report("clock")))
        after = time.time()
        clocks.append(Clock(there - (before + after) / 2, (after - before) / 2))
    return min(clocks, key=lambda clock: clock.error_seconds)


def _process(process: int, number: int) -> int:
    return process + number * _PROCESSES


def _renumbered(line: Line, name: str, number: int, shift: float) -> Line:
    """Return a line of a device among those of others; `shift`: of its wall clock, in us."""
    new = line | {"pid": _process(line["pid"], number)}
    if line["tid"]:  # 0: of lines about a process.
        new["tid"] += number * _TRACKS
    if "id" in line:
        new["id"] = hex(int(line["id"], 16) + number * _BUFFERS)
    if line["ph"] != "M":
        new["ts"] += shift if line["pid"] == WALL else 0
    elif line["name"] == "process_name":
        new["args"] = {"name": f"{name}: {line['args']['name']}"}
    elif line["name"] == "process_sort_index":
        new["args"] = {"sort_index": new["pid"]}
    return new


def _pieces(
    client: MeshClient, numbers: Mapping[str, int], clocks: Mapping[str, Clock], origin: float
) -> Iterator[Line]:
    """Yield a slice for each run of a piece, and an arrow for each value that travelled."""
    spans: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for record in sorted(client.records, key=lambda record: record.begin):
        number = numbers[record.device]
        process, track = _process(WALL, number), _PIECES + number * _TRACKS
        start, end = (
            round((moment - clocks[record.device].ahead_seconds - origin) * 1e9)
            for moment in (record.begin, record.end)
        )
        end = max(end, start + TICK)
        spans[record.piece, record.run] = process, track, start, end
        arguments = {"run": record.run, "simulated_us": record.simulated_seconds * 1e6,
                     "copies": record.copies, "nbytes": record.nbytes}  # fmt: skip
        yield slice_line(f"piece {record.piece}", "piece", process, track, start, end, arguments)
    for number, (source, target) in enumerate(client.crossings):
        if source in spans and target in spans:
            process, track, _, end = spans[source]
            common = {"name": "value", "cat": "crossing", "id": number + 1}
            yield common | {"ph": "s", "pid": process, "tid": track, "ts": (end - TICK) / 1e3}
            process, track, start, _ = spans[target]
            yield common | {"ph": "f", "bp": "e", "pid": process, "tid": track, "ts": start / 1e3}

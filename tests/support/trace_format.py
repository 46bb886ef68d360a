"""Checks a Chrome trace against the Trace Event Format and what Perfetto's importer makes of it.

What is required of every phase, of tracks (slices nest), async pairs (an end has a beginning) and
counters, and, beyond the format, of the memory that our traces tell of: buffers of a space never
overlap, and counters say what the pairs add up to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Track = tuple[int, int]


@dataclass(frozen=True)
class Slice:
    """A slice, in nanoseconds; `inside`: the names of those around it."""

    name: str
    kind: str
    track: Track
    start: int
    end: int
    inside: tuple[str, ...]
    args: dict[str, Any]


@dataclass
class Checked:
    """What a trace that is as it should be has."""

    slices: list[Slice] = field(default_factory=list)
    #: Processes and tracks by name.
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[Track, str] = field(default_factory=dict)
    begun: int = 0
    ended: int = 0
    moved: int = 0
    #: What each counter showed, in order.
    counters: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def of(self, kind: str) -> list[Slice]:
        """The slices of a category."""
        return [each for each in self.slices if each.kind == kind]


def checked(trace: dict[str, Any]) -> Checked:
    """Raises `AssertionError` for what is not as it should be."""
    assert next(iter(trace)) == "traceEvents", "what files are recognised by"
    assert trace["displayTimeUnit"] in ("ms", "ns")
    check = _Check()
    for number, event in enumerate(trace["traceEvents"]):
        try:
            check.event(event)
        except (AssertionError, KeyError, TypeError) as error:
            error.add_note(f"event {number}: {event}")
            raise
    check.names()
    return check.found


class _Check:
    def __init__(self) -> None:
        self.found = Checked()
        self._used: set[Track] = set()
        self._last: dict[tuple[Any, ...], int] = {}
        self._around: dict[Track, list[Slice]] = defaultdict(list)
        self._open: dict[tuple[str, Any, int], dict[str, Any]] = {}
        self._over: set[tuple[str, Any, int]] = set()
        #: Of each space: the ids of what lies there, with address and size per bank, and all bytes.
        self._lying: dict[str, dict[Any, tuple[int, int, int]]] = defaultdict(dict)

    def event(self, event: dict[str, Any]) -> None:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["ph"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert 0 <= event["tid"] < 2**32
        assert isinstance(event.get("args", {}), dict)
        phase = event["ph"]
        if phase == "M":
            self._metadata(event)
            return
        at, track = _ns(event["ts"]), (event["pid"], event["tid"])
        self._used.add(track)
        handle = {"X": self._slice, "i": self._instant, "C": self._counter, "b": self._begin,
                  "n": self._step, "e": self._end}[phase]  # fmt: skip
        handle(event, at, track)

    def _sorted(self, key: tuple[Any, ...], at: int) -> None:
        assert at >= self._last.get(key, 0), "times of one track follow each other"
        self._last[key] = at

    def _metadata(self, event: dict[str, Any]) -> None:
        name, args, found = event["name"], event["args"], self.found
        if name.endswith("_sort_index"):
            assert type(args["sort_index"]) is int
        elif name == "process_name":
            assert event["pid"] not in found.processes
            found.processes[event["pid"]] = args["name"]
        else:
            assert name == "thread_name"
            track = (event["pid"], event["tid"])
            assert track not in found.tracks
            assert track[1] not in {tid for _, tid in found.tracks}, (
                "Perfetto takes it for the same"
            )
            found.tracks[track] = args["name"]

    def _slice(self, event: dict[str, Any], at: int, track: Track) -> None:
        assert event["dur"] >= 0
        self._sorted(("X", track), at)
        end = at + _ns(event["dur"])
        around = self._around[track]
        while around and around[-1].end <= at:
            around.pop()
        assert not around or end <= around[-1].end, "slices of one track nest"
        made = Slice(event["name"], event["cat"], track, at, end,
                     tuple(each.name for each in around), event["args"])  # fmt: skip
        around.append(made)
        self.found.slices.append(made)

    def _instant(self, event: dict[str, Any], at: int, track: Track) -> None:
        assert event["s"] in ("g", "p", "t")
        self._sorted(("X", track), at)

    def _counter(self, event: dict[str, Any], at: int, track: Track) -> None:
        assert event["args"]
        self._sorted(("C", track[0], event["name"]), at)
        for value in event["args"].values():
            assert type(value) in (int, float)
            assert math.isfinite(value)
            assert value >= 0
        self.found.counters[event["name"]].append(event["args"]["bytes"])
        space, _, what = event["name"].partition(": ")
        if what == "in use":
            there = sum(nbytes for _, _, nbytes in self._lying[space].values())
            assert event["args"]["bytes"] == there, "what lies there"

    # -- buffers -----------------------------------------------------------------------------------

    def _of_buffer(self, event: dict[str, Any], at: int) -> tuple[str, Any, int]:
        assert isinstance(event["id"], str)
        int(event["id"], 16)
        key = (event["cat"], event["id"], event["pid"])
        self._sorted(key, at)
        return key

    def _begin(self, event: dict[str, Any], at: int, track: Track) -> None:
        key, args = self._of_buffer(event, at), event["args"]
        assert key not in self._open
        assert key not in self._over, "each pair has a number of its own"
        self._open[key] = event
        self.found.begun += 1
        self._lie(args["space"], key, args["address"], args["size_per_bank"], args["nbytes"])

    def _step(self, event: dict[str, Any], at: int, track: Track) -> None:
        key = self._of_buffer(event, at)
        space = self._opened(key, event)["args"]["space"]
        address, size, nbytes = self._lying[space][key]
        assert address == event["args"]["from"]
        # Buffers that move at one moment may take each other's places.
        self._lying[space][key] = (event["args"]["to"], size, nbytes)
        self.found.moved += 1

    def _end(self, event: dict[str, Any], at: int, track: Track) -> None:
        key = self._of_buffer(event, at)
        begun = self._opened(key, event)
        del self._open[key], self._lying[begun["args"]["space"]][key]
        self._over.add(key)
        self.found.ended += 1

    def _opened(self, key: tuple[str, Any, int], event: dict[str, Any]) -> dict[str, Any]:
        assert key in self._open, "nothing ends that has not begun"
        assert self._open[key]["name"] == event["name"], "Perfetto tells pairs apart by names too"
        return self._open[key]

    def _lie(self, space: str, key: Any, address: int, size: int, nbytes: int) -> None:
        assert size > 0
        for start, there, _ in self._lying[space].values():
            assert address + size <= start or start + there <= address, "buffers overlap"
        self._lying[space][key] = (address, size, nbytes)

    def names(self) -> None:
        found = self.found
        assert {pid for pid, _ in self._used} <= found.processes.keys()
        assert self._used <= found.tracks.keys(), self._used - found.tracks.keys()
        assert len(set(found.tracks.values())) == len(found.tracks)


def _ns(microseconds: float) -> int:
    """As Perfetto counts."""
    assert type(microseconds) in (int, float)
    assert math.isfinite(microseconds)
    assert microseconds >= 0
    return round(microseconds * 1000)

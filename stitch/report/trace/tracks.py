"""Lines of a Chrome trace: which track they are on, and the form that each kind of them has.

Two processes: the device on its simulated clock, with tracks for each lane (its programs, and its
copies into each space), and the host on the wall clock, with tracks for each thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from stitch.program import Space

Line: TypeAlias = dict[str, Any]
SIMULATED, WALL = 1, 2
_SPACES = tuple(Space)
#: Tracks of one lane: of its programs, of its copies into each space.
_OF_LANE = 1 + len(_SPACES)
#: Tracks of the host's threads begin here: Perfetto knows a thread by its number alone.
_THREADS = 1 << 16
#: Those of their lanes begin here, and so many belong to one thread.
_LANES, _OF_THREAD = 1 << 20, 1 << 10
#: The shortest slice that is drawn: Perfetto counts in nanoseconds.
TICK = 1


def lane_track(lane: int, space: Space | None = None) -> int:
    """The track of a lane's programs, or of its copies into a space."""
    return 1 + lane * _OF_LANE + (0 if space is None else 1 + _SPACES.index(space))


def thread_track(thread: int, *, reads: bool = False, lane: int = 0) -> int:
    """The track of the runs of one of the host's threads, of what it reads, or of another lane of
    its runs."""
    return _LANES + _OF_THREAD * thread + lane if lane else _THREADS + 2 * thread + reads


def device_names(device: str, lanes: Iterable[int], spaces: Iterable[Space]) -> Iterator[Line]:
    """The names of the processes, and of the tracks of a device."""
    yield from _process(SIMULATED, f"{device} (simulated time)")
    yield from _process(WALL, "host (wall time)")
    spaces = tuple(spaces)
    for lane in lanes:
        yield from _track(SIMULATED, lane_track(lane), f"lane {lane}")
        for space in spaces:
            name = f"lane {lane}: copies to {space.value}"
            yield from _track(SIMULATED, lane_track(lane, space), name)


def thread_names(thread: int) -> Iterator[Line]:
    """The names of the tracks of one of the host's threads."""
    yield from _track(WALL, thread_track(thread), f"thread {thread}: runs")
    yield from _track(WALL, thread_track(thread, reads=True), f"thread {thread}: reads")


def thread_lane_names(thread: int, lane: int) -> Iterator[Line]:
    """The name of the track of another lane of a thread's runs."""
    yield from _track(WALL, thread_track(thread, lane=lane), f"thread {thread}, lane {lane}: runs")


def _process(process: int, name: str) -> Iterator[Line]:
    for kind, argument in (("name", name), ("sort_index", process)):
        yield {"name": f"process_{kind}", "ph": "M", "pid": process, "tid": 0,
               "args": {kind: argument}}  # fmt: skip


def _track(process: int, track: int, name: str) -> Iterator[Line]:
    for kind, argument in (("name", name), ("sort_index", track)):
        yield {"name": f"thread_{kind}", "ph": "M", "pid": process, "tid": track,
               "args": {kind: argument}}  # fmt: skip


def slice_line(
    name: str, kind: str, process: int, track: int, start: int, end: int, arguments: dict[str, Any]
) -> Line:
    """Something that lasted."""
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": track, "ts": start / 1e3,
            "dur": (end - start) / 1e3, "args": arguments}  # fmt: skip


def instant_line(name: str, kind: str, process: int, track: int, at: int) -> Line:
    """Something that happened."""
    return {"name": name, "cat": kind, "ph": "i", "pid": process, "tid": track, "ts": at / 1e3,
            "s": "t", "args": {}}  # fmt: skip


def flow_line(phase: str, number: int, track: int, at: int) -> Line:
    """One end of an arrow, or a stop on its way; it belongs to the slice that is there then."""
    line = {"name": "value", "cat": "flow", "ph": phase, "id": number, "pid": SIMULATED,
            "tid": track, "ts": at / 1e3}  # fmt: skip
    return line | {"bp": "e"} if phase == "f" else line


def buffer_line(
    phase: str, number: int, name: str, at: int, arguments: dict[str, Any] | None = None
) -> Line:
    """The beginning or end of a buffer, or something that befell it on the way."""
    return {"name": name, "cat": "memory", "ph": phase, "id": hex(number), "pid": SIMULATED,
            "tid": lane_track(0), "ts": at / 1e3, "args": arguments or {}}  # fmt: skip


def counter_line(name: str, at: int, value: int) -> Line:
    """What a counter shows from now on."""
    return {"name": name, "ph": "C", "pid": SIMULATED, "tid": lane_track(0), "ts": at / 1e3,
            "args": {"bytes": value}}  # fmt: skip

"""The ways of values in a trace: from the slice that made one over its copies to those who read it.

Comes in: slices that make, copy and read what lies in buffers, plan by plan. Goes out: flow lines,
one flow for each reader, bound to slices that were told. Between plans a value is known by its
place. Must not know: how a buffer's life is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stitch.planner import Instance
from stitch.report.allocations import Place
from stitch.report.trace.tracks import TICK, Line, flow_line

#: Slices of a way that are told: the first, and the last ones.
MAX_STOPS = 8


class Slice(NamedTuple):
    """A slice of the simulated clock: its track and its times; whether it computed."""

    track: int
    start: int
    end: int
    computes: bool


Way = tuple[Slice, ...]


class FlowLines:
    """Which slices made and copied what lies where."""

    def __init__(self) -> None:
        #: By place, then by offset in bytes.
        self._known: dict[Place, dict[int, Way]] = {}
        #: The same for the buffers of the plan that is told, by number, then by offset.
        self._ways: dict[int, dict[int, Way]] = {}
        self._places: dict[int, Place] = {}
        self._found: tuple[Place, ...] = ()
        self._told = 0

    def begin(self, places: Mapping[int, Place]) -> None:
        """A plan begins that finds its buffers there."""
        self._ways, self._places = {}, dict(places)
        self._found = tuple(places.values())

    def allocate(self, buffer: int, place: Place) -> None:
        """A new buffer, in which nothing lies yet."""
        self._ways[buffer] = {}
        self._places[buffer] = place

    def forget(self, place: Place) -> None:
        """Nothing lies there any more."""
        self._known.pop(place, None)

    def _of(self, buffer: int) -> dict[int, Way]:
        """The ways of what lies in a buffer."""
        ways = self._ways.get(buffer)
        if ways is None:
            ways = self._ways[buffer] = dict(self._known.get(self._places[buffer], {})
                                             if buffer in self._places else {})  # fmt: skip
        return ways

    def make(self, outputs: Iterable[Instance], by: Slice) -> None:
        """A task has written its outputs."""
        for instance in outputs:
            self._of(instance.buffer)[instance.offset_nbytes] = (by,)

    def copy(self, source: Instance, target: Instance, by: Slice, *, whole: bool) -> None:
        """A value was copied, or all that lies in its buffer."""
        ways = self._of(source.buffer)
        into = self._of(target.buffer)
        if whole:
            into.update({offset: _longer(way, by) for offset, way in ways.items()})
        way = ways.get(source.offset_nbytes, ())
        into[target.offset_nbytes] = _longer(way, by)

    def move(self, buffers: Iterable[tuple[int, Place]], by: Slice) -> None:
        """Buffers were brought elsewhere, with all that lies in them."""
        for buffer, place in buffers:
            ways = self._of(buffer)
            self._ways[buffer] = {offset: _longer(way, by) for offset, way in ways.items()}
            self._places[buffer] = place

    def read(self, inputs: Sequence[Instance], by: Slice,
             tell: Callable[[Line], object]) -> int | None:  # fmt: skip
        """A task reads its inputs: tells where they come from; gives when the last of them was
        computed, None where none was."""
        ready: int | None = None
        for way in dict.fromkeys(self._of(i.buffer).get(i.offset_nbytes, ()) for i in inputs):
            if not way:
                continue
            self._told += 1
            first, *stops = way
            tell(flow_line("s", self._told, first.track, first.end - TICK))
            for stop in stops:
                tell(flow_line("t", self._told, stop.track, stop.start))
            tell(flow_line("f", self._told, by.track, by.start))
            if first.computes:
                ready = max(first.end, ready or 0)
        return ready

    def end(self, final: Iterable[int]) -> None:
        """The plan has ended; these buffers are left where they lie."""
        places = self._places
        left = {places[buffer]: self._of(buffer) for buffer in final if buffer in places}
        for place in (*self._found, *places.values()):
            self._known.pop(place, None)
        self._known |= left
        self._ways, self._places, self._found = {}, {}, ()


def _longer(way: Way, by: Slice) -> Way:
    """A way with one more slice; of long ones the first slice and the last ones stay."""
    if len(way) < MAX_STOPS:
        return (*way, by)
    return (way[0], *way[2:], by)

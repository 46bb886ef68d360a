"""The memory of a device in its trace: buffers from allocation to release, counters of each space.

Comes in: what lies in the spaces at moments of the simulated clock. Goes out: lines: pairs that
begin and end a buffer, and counters of bytes in use and of the largest hole. A buffer that is freed
has always begun, whatever comes in. Must not know: plans, events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping

from stitch.machine import MachineShape
from stitch.program import Space
from stitch.report.allocations import Place
from stitch.report.trace.tracks import Line, buffer_line, counter_line
from stitch.runtime import Lying


class MemoryLines:
    """What lies where now, and the numbers of the buffers."""

    def __init__(self, shape: MachineShape) -> None:
        self._limits = {s: (shape.space(s).base, shape.space(s).limit) for s in shape.spaces}
        self._banks = {s: shape.space(s).banks for s in shape.spaces}
        self._open: dict[Place, tuple[int, Lying]] = {}
        #: Of each space: addresses and sizes in order, and bytes in use.
        self._ranges: dict[Space, list[tuple[int, int]]] = {s: [] for s in shape.spaces}
        self._used = dict.fromkeys(shape.spaces, 0)
        #: The spaces whose counters are out of date, and what they showed last.
        self._changed = set(shape.spaces)
        self._shown: dict[str, int] = {}
        self._begun = 0

    def become(
        self, now: Mapping[Place, Lying], at: int, tell: Callable[[Line], object],
        gone: Callable[[Place], object],
    ) -> None:  # fmt: skip
        """This is what lies in the spaces now; `gone` hears of places that were left."""
        for place, (_, lying) in list(self._open.items()):
            new = now.get(place)
            if new is None or new.size != lying.size:
                self.end(place, at, tell)
                gone(place)
        for place, lying in now.items():
            if place not in self._open:
                self.begin(lying, at, tell)

    def begin(self, lying: Lying, at: int, tell: Callable[[Line], object]) -> None:
        """A buffer was allocated."""
        if lying.space not in self._used:
            return
        self.end(lying.place, at, tell)
        self._begun += 1
        self._take(self._begun, lying)
        arguments = {"space": lying.space.value, "address": lying.address,
                     "size_per_bank": lying.size,
                     "nbytes": lying.size * self._banks[lying.space]}  # fmt: skip
        tell(buffer_line("b", self._begun, lying.origin, at, arguments))

    def end(self, place: Place, at: int, tell: Callable[[Line], object]) -> None:
        """A buffer was freed; where none is known to lie nothing happens."""
        known = self._leave(place)
        if known is not None:
            number, lying = known
            tell(buffer_line("e", number, lying.origin, at))

    def move(
        self, ways: Iterable[tuple[Place, Place]], at: int, tell: Callable[[Line], object]
    ) -> None:
        """Buffers lie elsewhere in their spaces; all at once, as they may take turns."""
        moved = [(self._leave(place), target) for place, target in ways]
        for known, (space, address) in moved:
            if known is not None:
                number, lying = known
                self.end((space, address), at, tell)
                self._take(number, lying._replace(space=space, address=address))
                arguments = {"from": lying.address, "to": address}
                tell(buffer_line("n", number, lying.origin, at, arguments))

    def _take(self, number: int, lying: Lying) -> None:
        self._open[lying.place] = (number, lying)
        insort(self._ranges[lying.space], (lying.address, lying.size))
        self._used[lying.space] += lying.size
        self._changed.add(lying.space)

    def _leave(self, place: Place) -> tuple[int, Lying] | None:
        known = self._open.pop(place, None)
        if known is not None:
            lying = known[1]
            ranges = self._ranges[lying.space]
            del ranges[bisect_left(ranges, (lying.address, lying.size))]
            self._used[lying.space] -= lying.size
            self._changed.add(lying.space)
        return known

    def counters(self, at: int, tell: Callable[[Line], object]) -> None:
        """What the counters show from now on, where that is new."""
        for space in self._limits:
            if space in self._changed:
                shows = {"in use": self._used[space], "largest hole": self._hole(space)}
                for what, value in shows.items():
                    name = f"{space.value}: {what}"
                    if self._shown.get(name) != value:
                        self._shown[name] = value
                        tell(counter_line(name, at, value * self._banks[space]))
        self._changed.clear()

    def _hole(self, space: Space) -> int:
        """The largest range of a space where nothing lies, in bytes per bank."""
        end, limit = self._limits[space]
        hole = 0
        for address, size in self._ranges[space]:
            hole = max(hole, address - end)
            end = max(end, address + size)
        return max(hole, limit - end)

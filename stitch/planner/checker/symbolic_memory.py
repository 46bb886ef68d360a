"""The checker's state: buffers, the symbolic bytes of every space, and the defects found.

It is built from a request and updated by the steps of a plan, to answer one question: is this value
stored here, completely, in this layout?
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from stitch.errors import Problem
from stitch.machine import footprint
from stitch.planner.plan import Buffer, Instance, Plan, PlanRequest, evicted_desc
from stitch.program import DataType, Space, TensorDesc


class ContentPiece(NamedTuple):
    """Bytes `[start, end)` of content `content`, starting at its byte `offset`."""

    start: int
    end: int
    content: int
    offset: int

    def cut(self, start: int, end: int) -> ContentPiece:
        """Return the part inside `[start, end)`."""
        first = max(start, self.start)
        return ContentPiece(
            first, min(end, self.end), self.content, self.offset + first - self.start
        )


class ByteMap:
    """Disjoint pieces by address.

    >>> space = ByteMap()
    >>> space.write(0, 8, content=1)
    >>> space.move(0, 4, 8)
    >>> [tuple(piece) for piece in space.read(0, 12)]
    [(0, 4, 1, 0), (4, 12, 1, 0)]
    """

    __slots__ = ("_pieces", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[ContentPiece] = []

    def read(self, start: int, end: int) -> tuple[ContentPiece, ...]:
        """Return the pieces inside `[start, end)`, cut to it; contiguous ones are merged."""
        first, last = self._touched(start, end)
        pieces: list[ContentPiece] = []
        for piece in self._pieces[first:last]:
            part = piece.cut(start, end)
            before = pieces[-1] if pieces else None
            if (
                before is not None
                and before.end == part.start
                and before.content == part.content
                and before.offset + before.end - before.start == part.offset
            ):
                pieces[-1] = before._replace(end=part.end)
            else:
                pieces.append(part)
        return tuple(pieces)

    def erase(self, start: int, end: int) -> None:
        """Mark `[start, end)` as undefined."""
        self._replace(start, end, [])

    def write(self, start: int, end: int, content: int) -> None:
        """Store a content in `[start, end)` from its first byte."""
        self._replace(start, end, [ContentPiece(start, end, content, 0)])

    def put(self, pieces: tuple[ContentPiece, ...], start: int, end: int, shift: int) -> None:
        """Store pieces read elsewhere in `[start, end)`, shifted by `shift` bytes."""
        moved = [p._replace(start=p.start + shift, end=p.end + shift) for p in pieces]
        self._replace(start, end, moved)

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Copy a range as memmove does."""
        pieces = self.read(source, source + nbytes)
        self.put(pieces, target, target + nbytes, target - source)

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_right(self._starts, start)
        if first and self._pieces[first - 1].end > start:
            first -= 1
        return first, bisect_left(self._starts, end, lo=first)

    def _replace(self, start: int, end: int, pieces: list[ContentPiece]) -> None:
        first, last = self._touched(start, end)
        if first < last:
            before, after = self._pieces[first], self._pieces[last - 1]
            if before.start < start:
                pieces = [before.cut(before.start, start), *pieces]
            if after.end > end:
                pieces = [*pieces, after.cut(end, after.end)]
        self._pieces[first:last] = pieces
        self._starts[first:last] = [p.start for p in pieces]


def gaps(taken: Iterable[tuple[int, int]], base: int, limit: int) -> list[tuple[int, int]]:
    """Return the ranges (start, end) of `[base, limit)` outside those taken."""
    free, at = [], base
    for start, end in sorted(taken):
        if at < min(start, limit):
            free.append((at, min(start, limit)))
        at = max(at, end)
    return [*free, (at, limit)] if at < limit else free


#: At this byte of a content starts this value in this layout.
Fact = tuple[int, int, TensorDesc]
#: A space, or the number of a buffer that is a host array outside the spaces.
Place = Space | int
#: Size of a host array.
OUTSIDE_NBYTES = 1 << 60


class SymbolicMemory:
    """Live buffers, bytes, and facts about contents; addresses count bytes over all banks."""

    def __init__(self, request: PlanRequest) -> None:
        self.shape = request.machine.shape
        self.buffers: dict[int, Buffer] = {}
        self._memory: dict[Place, ByteMap] = {space: ByteMap() for space in self.shape.spaces}
        self._facts: dict[int, set[Fact]] = {}
        self._extents: dict[TensorDesc, int] = {}
        #: The data type in which each value was made: others are lossy.
        self.dtypes: dict[int, DataType] = {}
        for buffer in request.buffers:
            self.buffers[buffer.number] = buffer
            if buffer.address is None:
                self._memory[buffer.number] = ByteMap()
            self._fill(*self.span(buffer))
        for resident in request.residents:
            for instance in resident.instances:
                self._know(instance, resident.value)
            if resident.instances:
                self.dtypes[resident.value] = resident.instances[0].desc.layout.data_type
        for task in request.tasks:
            for value, desc in zip(task.outputs, task.transformation.outputs, strict=True):
                self.dtypes[value] = desc.layout.data_type

    def span(self, buffer: Buffer) -> tuple[Place, int, int]:
        """Return the bytes of a buffer."""
        if buffer.address is None:
            return buffer.number, 0, OUTSIDE_NBYTES
        banks = self.shape.space(buffer.space).banks
        start = buffer.address * banks
        return buffer.space, start, start + buffer.size_per_bank * banks

    def memory(self, place: Place) -> ByteMap:
        return self._memory[place]

    def live_in(self, space: Space, start: int, end: int) -> list[Buffer]:
        """Return the buffers of a space that overlap `[start, end)`, in bytes per bank."""
        return [
            b
            for b in self.buffers.values()
            if b.space is space
            and b.address is not None
            and b.address < end
            and start < b.address + b.size_per_bank
        ]

    def extent(self, desc: TensorDesc) -> int:
        """Return the bytes of its footprint that a tensor needs, at least one."""
        known = self._extents.get(desc)
        if known is None:
            taken = footprint(desc, self.shape)
            page = taken.page_nbytes if desc.layout.is_dense else taken.aligned_page_nbytes
            known = taken.nbytes if desc.layout.is_sharded else max(1, taken.pages * page)
            self._extents[desc] = known
        return known

    def fits(self, instance: Instance) -> bool:
        """Whether an instance fits into its buffer, in the same space."""
        buffer = self.buffers[instance.buffer]
        _, start, end = self.span(buffer)
        needed = instance.offset_nbytes + self.extent(instance.desc)
        return buffer.space is instance.desc.layout.space and needed <= end - start

    def _fill(self, place: Place, start: int, end: int) -> int:
        content = len(self._facts)
        self._facts[content] = set()
        self.memory(place).write(start, end, content)
        return content

    def _at(self, instance: Instance) -> tuple[int, int] | None:
        """Return the content stored at an instance, and its first byte; None if there are more."""
        if instance.buffer not in self.buffers or not self.fits(instance):
            return None
        place, start, _ = self.span(self.buffers[instance.buffer])
        start += instance.offset_nbytes
        extent = self.extent(instance.desc)
        pieces = self.memory(place).read(start, start + extent)
        if len(pieces) != 1 or pieces[0].end - pieces[0].start != extent:
            return None
        return pieces[0].content, pieces[0].offset

    def _know(self, instance: Instance, value: int) -> None:
        place = self._at(instance)
        if place is not None:
            self._facts[place[0]].add((place[1], value, instance.desc))

    def holds(self, instance: Instance, value: int) -> bool:
        """Whether the value is stored there completely, in exactly this layout."""
        place = self._at(instance)
        return place is not None and (place[1], value, instance.desc) in self._facts[place[0]]

    def write(self, instance: Instance, value: int) -> None:
        """Store the value there, over the whole footprint of its descriptor."""
        place, start, end = self.span(self.buffers[instance.buffer])
        start += instance.offset_nbytes
        self._fill(place, start, min(end, start + footprint(instance.desc, self.shape).nbytes))
        self._know(instance, value)

    def instances_in(self, buffer: Buffer) -> Iterator[tuple[Instance, int]]:
        """Yield every complete (instance, value) of a buffer."""
        place, start, end = self.span(buffer)
        for piece in self.memory(place).read(start, end):
            for offset, value, desc in self._facts[piece.content]:
                at = piece.start - start + offset - piece.offset
                instance = Instance(buffer.number, at, desc)
                if at >= 0 and self.holds(instance, value):
                    yield instance, value

    def carry(self, source: Buffer, target: Buffer) -> None:
        """Copy a whole buffer to another space with all its values."""
        followers = list(self.instances_in(source))
        self._fill(*self.span(target))
        for instance, value in followers:
            if self._follows(instance, source.desc, target.space):
                desc = evicted_desc(instance.desc, target.space)
                self._know(Instance(target.number, instance.offset_nbytes, desc), value)

    def _follows(self, instance: Instance, whole: TensorDesc, space: Space) -> bool:
        """Whether a copy of the whole buffer by its descriptor keeps this value at its offset."""
        if instance.desc == whole:
            return instance.offset_nbytes == 0
        ours, theirs = instance.desc.layout, whole.layout
        if ours != theirs or ours.is_sharded:
            return False
        before, after = (footprint(d, self.shape) for d in (whole, evicted_desc(whole, space)))
        even = ours.is_dense or before.aligned_page_nbytes == after.aligned_page_nbytes
        # Interleaved pages keep their order if their padding is equal.
        inside = instance.offset_nbytes + self.extent(instance.desc) <= self.extent(whole)
        return inside and (even or instance.offset_nbytes == 0)

    def set_address(self, number: int, address: int) -> None:
        """Set the new address of a buffer whose bytes were moved before."""
        self.buffers[number] = replace(self.buffers[number], address=address)


class Inspection:
    """Progress and defects of one check."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.machine = plan.request.machine
        self.state = SymbolicMemory(plan.request)
        self.residents = frozenset(b.number for b in plan.request.buffers)
        self.problems: list[Problem] = []
        self.next_task = 0
        #: Resident buffers that were read, moved or freed; regions used (bytes per bank).
        self.read: set[int] = set()
        self.used: list[tuple[Space, int, int]] = []
        self.index = 0

    def report(self, kind: str, detail: str) -> None:
        """Add a problem at the current step."""
        self.problems.append(Problem(kind, f"step {self.index}", detail))

    def reads(self, buffer: int) -> None:
        """Note that the plan depends on this buffer, if it is resident."""
        if buffer in self.residents:
            self.read.add(buffer)

    def check_seconds(self, claimed: float, taken: float) -> None:
        """Compare the seconds that a step claims with those of its transfers."""
        if not math.isclose(claimed, taken, rel_tol=1e-9):
            self.report("seconds", f"it claims {claimed} s, its copies take {taken} s")

    def region(self, what: str, space: Space, address: int, size: int) -> bool:
        """Whether a region (bytes per bank) is in range and aligned; adds a problem if not."""
        if space not in self.machine.shape.spaces:
            self.report("address", f"{what}: the machine has no {space.value}")
            return False
        shape = self.machine.shape.space(space)
        if address < shape.base or address + size > shape.limit or address % shape.granule:
            where = f"[{address:#x}, {address + size:#x}) of {space.value}"
            self.report("address", f"{what} at {where} is out of range or misaligned")
            return False
        return True

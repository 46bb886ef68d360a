"""One memory space: its allocator, its bytes, moves and counters.

A buffer at bank address `a` owns host bytes `[a * banks, (a + size_per_bank) * banks)`, so
footprints overlap exactly if the device's ranges do.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stitch.errors import LayoutError, TaskError
from stitch.machine import MachineShape, SpaceShape, footprint
from stitch.memory.allocator import Allocator
from stitch.memory.cells import Bytes, used_bytes
from stitch.memory.space_bytes import RELEASE_NBYTES, Call, MappedBytes, SpaceBytes
from stitch.program import Space, TensorDesc


class ByteRanges:
    """A set of bytes in whole system pages, as sorted ranges that neither overlap nor touch.

    >>> ranges = ByteRanges([(0, 4096), (8192, 8193)])
    >>> ranges.added([(4096, 8192), (8192, 12288)]), ranges.nbytes
    (4096, 8192)
    """

    __slots__ = ("_starts", "_stops", "nbytes")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.nbytes = 0
        self.update(ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def covers(self, start: int, stop: int) -> bool:
        """Whether the set contains all bytes of a range."""
        start, stop = _pages(start, stop)
        where = bisect_left(self._stops, stop)
        return start >= stop or (where < len(self._starts) and self._starts[where] <= start)

    def added(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return the bytes that these ranges would add."""
        new = [_pages(*r) for r in ranges if not self.covers(*r)]
        if len(new) == 1:
            return self._missing(*new[0])
        return sum(self._missing(*r) for r in ByteRanges(new)) if new else 0

    def _missing(self, start: int, stop: int) -> int:
        starts, stops = self._starts, self._stops
        missing, at = stop - start, bisect_right(stops, start)
        while at < len(starts) and starts[at] < stop:
            missing -= min(stop, stops[at]) - max(start, starts[at])
            at += 1
        return missing

    def update(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add all bytes of these ranges."""
        starts, stops = self._starts, self._stops
        for given in ranges:
            start, stop = _pages(*given)
            if start >= stop:
                continue
            # Merge it with the ranges that it overlaps or touches.
            first, last = bisect_left(stops, start), bisect_right(starts, stop)
            if first < last:
                start, stop = min(start, starts[first]), max(stop, stops[last - 1])
            self.nbytes += stop - start - (sum(stops[first:last]) - sum(starts[first:last]))
            starts[first:last], stops[first:last] = [start], [stop]


def _pages(start: int, stop: int) -> tuple[int, int]:
    if start >= stop:
        return start, start
    page = mmap.PAGESIZE
    return start // page * page, -(-stop // page) * page


#: The first address of lent bytes; their addresses are never reused.
LENT_ADDRESSES = 1 << 56
#: DLPack's number of the kind of device whose memory is the host's.
HOST_DLPACK = 1
#: Written by debug mode to unused and to freed bytes.
PADDING_BYTE = 0xA5
POISON_BYTE = 0xDB


class WriteCounter:
    """Counts the writes to a space by copies bound with it, and their `Footprint.own_nbytes`.

    The backend counts the footprints that it moves.
    """

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        self._arrivals: dict[tuple[int, int], Arrivals] = {}

    def arrivals(self, writes: int, nbytes: int) -> Arrivals:
        """Return a callable that counts `writes` tensors with `nbytes` bytes at each call."""
        return self._arrivals.setdefault((writes, nbytes), Arrivals())

    @property
    def writes(self) -> int:
        return sum(writes * a.times for (writes, _), a in self._arrivals.copy().items())

    @property
    def nbytes(self) -> int:
        return sum(nbytes * a.times for (_, nbytes), a in self._arrivals.copy().items())


class Arrivals:
    """The number of times that writes of one kind have run."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


class SpaceMemory:
    """One space: its allocator, its counters, and its bytes, committed as they are written.

    Args:
        space, shape: The space and its description.
        debug: Poison freed bytes and check the unused part of footprints.
        data: The bytes, if they are not a mapping of this process.
    """

    def __init__(
        self, space: Space, shape: SpaceShape, *, debug: bool = False,
        data: SpaceBytes | None = None,
    ) -> None:  # fmt: skip
        self.space = space
        self.shape = shape
        self.debug = debug
        self.allocator = Allocator.of(shape)
        self.counter = WriteCounter()
        self.data = data or MappedBytes(space, max(1, shape.banks * shape.limit))
        #: By address the bytes, and what keeps them alive.
        self._lent: dict[int, tuple[Bytes, object]] = {}
        self._next_lent = LENT_ADDRESSES

    @property
    def is_host(self) -> bool:
        """Whether the processor can read the bytes; else they are tensors of a library."""
        return self.data.is_host

    @property
    def is_in_host_memory(self) -> bool:
        """Whether the bytes take memory of this computer, whoever allocates them."""
        return self.data.dlpack_device[0] == HOST_DLPACK

    def lend(self, lent: Bytes, owner: object = None) -> int:
        """Return an address beyond the end of the space at which plans can read a caller's bytes.

        `owner`: kept until they are taken back; without one, the caller keeps the bytes alive while
        plans run on them.
        """
        assert self.shape.banks == 1, "only a space of one bank has contiguous bytes"
        address = self._next_lent
        step = self.shape.alignment
        self._next_lent += max(1, -(-lent.nbytes // step)) * step
        self._lent[address] = lent, owner
        return address

    def take_back(self, address: int) -> None:
        """Invalidate the address of lent bytes."""
        self._lent.pop(address, None)

    def region(self, address: int, size_per_bank: int) -> Any:
        """Return a writable view of the footprint at a bank address: of uint8, a NumPy array if the
        space `is_host`.

        Raises `LayoutError` if it is outside the space.
        """
        banks = self.shape.banks
        if address >= LENT_ADDRESSES and address in self._lent:
            return self._lent[address][0][:size_per_bank]
        if address < 0 or size_per_bank < 0 or address + size_per_bank > self.shape.limit:
            raise LayoutError(
                f"{size_per_bank} bytes per bank at {address:#x} are outside {self.space.value}",
                expected=f"a range of [0, {self.shape.limit:#x})",
            )
        return self.data.region(address * banks, (address + size_per_bank) * banks)

    def moves(
        self, address: int, target: SpaceMemory, target_address: int, nbytes: int
    ) -> list[Call]:
        """Return calls that copy raw bytes to an address of this or another space.

        Source and target may overlap. The calls allocate nothing and run no Python code. Raises
        `LayoutError` for a range outside its space.
        """
        starts = []
        for memory, at in ((self, address), (target, target_address)):
            start = at * memory.shape.banks
            if min(at, nbytes) < 0 or start + nbytes > memory.shape.limit * memory.shape.banks:
                raise LayoutError(
                    f"a move of {nbytes} bytes from {self.space.value} {address:#x} to "
                    f"{target.space.value} {target_address:#x} is outside {memory.space.value}"
                )
            starts.append(start)
        return self.data.moves(starts[0], target.data, starts[1], nbytes)

    def release(self, address: int, size_per_bank: int) -> None:
        """Release the bytes of a freed footprint: poison them in debug mode, else return large
        ranges to the system. Their content is undefined afterwards."""
        banks = self.shape.banks
        start, stop = address * banks, (address + size_per_bank) * banks
        if self.debug:
            self.data.region(start, stop)[:] = POISON_BYTE
        elif stop - start >= RELEASE_NBYTES:
            self.data.discard(start, stop)

    def release_all_but(self, live: ByteRanges, written: ByteRanges) -> None:
        """Return the written bytes outside the live ranges to the system.

        Their content is undefined afterwards.
        """
        for start, stop in written:
            at = start
            for first, last in live:
                if last <= at or first >= stop:
                    continue
                if first > at:
                    self.data.discard(at, first)
                at = max(at, last)
            if at < stop:
                self.data.discard(at, stop)

    def fill_padding(self, desc: TensorDesc, address: int, machine: MachineShape) -> None:
        """In debug mode, fill the unused bytes of a footprint (see `cells.used_bytes`)."""
        if self.debug:
            region = self.region(address, footprint(desc, machine).size_per_bank)
            bytes_, fill, write_back = self.data.staged(region)
            for call in fill:
                call()
            bytes_[_unused(desc, machine)] = PADDING_BYTE
            for call in write_back:
                call()

    def check_padding(
        self, desc: TensorDesc, address: int, machine: MachineShape, *, name: str
    ) -> None:
        """Raise `TaskError` if the bytes that `fill_padding` filled for `name` were written."""
        size_per_bank = footprint(desc, machine).size_per_bank
        region, fill, _ = self.data.staged(self.region(address, size_per_bank))
        for call in fill:
            call()
        wrong = np.flatnonzero(_unused(desc, machine) & (region != PADDING_BYTE))
        if wrong.size:
            first = int(wrong[0])
            raise TaskError(
                f"{wrong.size} bytes of padding of {name!r} were overwritten",
                where=f"{self.space.value} address {address:#x}, footprint byte {first} of "
                f"{region.size} ({desc.text()})",
                expected=f"{PADDING_BYTE:#04x}",
                got=f"{int(region[first]):#04x}",
                remedy="a copy, a kernel or a view wrote outside its tensor: look at the task "
                "that ran last",
            )


def _unused(desc: TensorDesc, machine: MachineShape) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    unused = np.ones(footprint(desc, machine).nbytes, np.bool_)
    for offset, count, stride, length in used_bytes(desc, machine):
        np.ndarray((count, length), np.bool_, unused, offset, (stride, 1))[...] = False
    return unused

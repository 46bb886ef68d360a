"""Addresses of one space: which buffer takes which bytes of every bank.

Best fit, or first fit as devices do, over integer granules. A hole is one number, `size << 40 |
address`, in a sorted list; two dictionaries and a list of starts name the same holes by their ends.
All three are plain Python containers: below ten thousand buffers nothing is faster in CPython.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import Protocol

from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.machine import MOST_GRANULES, Policy, SpaceShape

# Free gaps ----------------------------------------------------------------------------------------


class FreeGaps:
    """Gaps as (granules, first granule), the smallest first; what is taken is no longer there."""

    __slots__ = ("_alignment", "_gaps", "_policy")

    def __init__(
        self,
        gaps: Iterable[tuple[int, int]],
        alignment: int,
        policy: Policy = Policy.BEST_FIT,
    ) -> None:
        self._gaps, self._alignment, self._policy = sorted(gaps), alignment, policy

    def take(self, size: int, count: int = 1) -> list[int]:
        """Places for `size` bytes, at most so many: from the top of the smallest gap that fits, the
        lowest of equal ones. By first fit from the top of the highest that fits, upwards from the
        bottom of the lowest.

        >>> FreeGaps([(4, 0), (8, 10)], 16).take(60, 2)
        [0, 224]
        """
        alignment, gaps = self._alignment, self._gaps
        need = -(-size // alignment) or 1
        places: list[int] = []
        at = bisect_left(gaps, (need, 0))
        while at < len(gaps) and len(places) < count:
            granules, start = gaps.pop(self._chosen(at))
            # What is left of it comes first again.
            if self._policy is Policy.FIRST_FIT_UPWARDS:
                taken = range(start, start + granules - need + 1, need)[: count - len(places)]
                start += len(taken) * need
            else:
                taken = range(start + granules - need, start - 1, -need)[: count - len(places)]
            places += [place * alignment for place in taken]
            left = granules - len(taken) * need
            if left:
                insort(gaps, (left, start))
                at += left < need
        return places

    def _chosen(self, at: int) -> int:
        """Which of the gaps that have room, those from `at` on, is taken from first."""
        if self._policy is Policy.BEST_FIT:
            return at
        upwards = self._policy is Policy.FIRST_FIT_UPWARDS
        room = range(at, len(self._gaps))
        return (min if upwards else max)(room, key=lambda i: self._gaps[i][1])


# Out-of-memory errors -----------------------------------------------------------------------------

#: How many live buffers an error names.
_NAMED = 5


class Occupied(Protocol):
    """A space and what lies in it, in bytes per bank."""

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The live buffers, (address, size), by address."""

    @property
    def capacity(self) -> int:
        """Bytes, live and free."""

    @property
    def free_nbytes(self) -> int:
        """Bytes that are free."""

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""


def pressure_text(space: Occupied) -> str:
    """How much is free, in one piece and in all, and the biggest live buffers."""
    live = space.buffers()
    biggest = nlargest(_NAMED, live, key=lambda buffer: buffer[1])
    named = ", ".join(f"{size} B at {address:#x}" for address, size in biggest)
    return (
        f"{space.free_nbytes} B free of {space.capacity}, largest hole {space.largest_hole} B, "
        f"{len(live)} live blocks, the biggest: {named or 'none'}"
    )


def takers_text(space: Occupied, address: int, size: int) -> str:
    """Which live buffers lie in `[address, address + size)`."""
    end = address + size
    taken = [f"[{a:#x}, {a + s:#x})" for a, s in space.buffers() if a < end and address < a + s]
    more = f" and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
    return "taken by " + ", ".join(taken[:_NAMED]) + more


_ADDRESS = MOST_GRANULES
_SHIFT = _ADDRESS.bit_length()
_BEST = Policy.BEST_FIT


class Allocator:
    """Allocation of `[base, limit)` in granules; addresses and sizes in bytes per bank.

    Sizes are rounded up to granules of `alignment` bytes, and an empty buffer takes one. By best
    fit a buffer lies at the top of the smallest hole that has room, the lowest of equal ones, or at
    its bottom with `low=True`; by first fit at the top of the highest, or at the bottom of the
    lowest with `low=True` (and always so by first fit upwards).

    >>> allocator = Allocator(0, 1024, 16)
    >>> allocator.alloc(100), allocator.alloc(100, low=True), allocator.free_nbytes
    (912, 0, 800)
    """

    __slots__ = (
        "_ends", "_free", "_holes", "_live", "_sizes", "_starts", "_token",
        "alignment", "base", "limit", "policy",
    )  # fmt: skip

    def __init__(
        self, base: int, limit: int, alignment: int, policy: Policy = Policy.BEST_FIT
    ) -> None:
        if alignment < 1 or not 0 <= base <= limit or limit // alignment > _ADDRESS:
            raise LayoutError(
                "an allocator needs 0 <= base <= limit and a positive alignment",
                got=f"base {base}, limit {limit}, alignment {alignment}",
            )
        self.alignment = alignment
        self.policy = policy
        self.base = -(-base // alignment) * alignment
        self.limit = max(self.base, limit // alignment * alignment)
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # start of a hole -> its granules
        self._ends: dict[int, int] = {}  # end of a hole -> its start
        self._holes: list[int] = []
        self._starts: list[int] | None = None
        self._token = 0
        self._free = (self.limit - self.base) // alignment
        if self._free:
            self._add_hole(self.base // alignment, self._free)

    @classmethod
    def of(cls, shape: SpaceShape) -> Allocator:
        """An empty allocator of a machine's space."""
        return cls(shape.base, shape.limit, shape.granule, shape.policy)

    def emptied(self) -> Allocator:
        """An allocator of the same range in which nothing lies."""
        return Allocator(self.base, self.limit, self.alignment, self.policy)

    def try_alloc(self, size: int, *, low: bool = False) -> int | None:
        """The address of a new buffer of `size` bytes per bank, or None where no hole fits."""
        alignment = self.alignment
        need = -(-size // alignment) or 1
        holes = self._holes
        i = bisect_left(holes, need << _SHIFT)
        if i == len(holes):
            return None
        if self.policy is not _BEST:
            low |= self.policy is Policy.FIRST_FIT_UPWARDS
            i = self._first(need, low)
        packed = holes[i]
        start, left = packed & _ADDRESS, (packed >> _SHIFT) - need
        del holes[i]
        if low:
            self._cut_low(start, left, need)
        else:
            end = start + left
            del self._ends[end + need]
            if left:
                self._sizes[start] = left
                self._ends[end] = start
                insort(holes, left << _SHIFT | start)
            else:
                del self._sizes[start]
                self._move_start(start, None)
            start = end
        self._free -= need
        self._live[start] = need
        self._token ^= hash((start, need))
        return start * alignment

    def alloc(self, size: int, *, low: bool = False) -> int:
        """As `try_alloc`; raises `OutOfMemoryError` naming needed, free, holes and big buffers."""
        address = self.try_alloc(size, low=low)
        if address is None:
            raise OutOfMemoryError(
                f"no room for {self._rounded(size)} bytes per bank",
                where=f"addresses [{self.base:#x}, {self.limit:#x}) of every bank",
                expected=f"a hole of {self._rounded(size)} B",
                got=pressure_text(self),
                remedy="free or move a live tensor, or store it in another space",
            )
        return address

    def fit(self, size: int, outside: Sequence[tuple[int, int]] = (), count: int = 1) -> list[int]:
        """Where `alloc_at` would succeed one after the other, at most so many times, outside of
        ranges (address, end) that are sorted and lie apart: from the top of the smallest gap
        between them that fits, the lowest of equal ones (of the highest, where the policy is first
        fit; so upwards too, from the bottom of the lowest). Nothing is taken.

        >>> Allocator(0, 1024, 16).fit(60, [(0, 40), (100, 200), (330, 500)], 3)
        [256, 960, 896]
        """
        return self.gaps(outside, size).take(size, count)

    def gaps(self, outside: Sequence[tuple[int, int]] = (), least: int = 1) -> FreeGaps:
        """What is free now outside of ranges (address, end) that are sorted and lie apart, where it
        has room for `least` bytes per bank."""
        alignment = self.alignment
        need = -(-least // alignment) or 1
        gaps: list[tuple[int, int]] = []
        at = 0
        for start in self._sorted_starts():
            end = start + self._sizes[start]
            while end - start >= need:
                while at < len(outside) and outside[at][1] <= start * alignment:
                    at += 1
                stop = end if at == len(outside) else min(end, outside[at][0] // alignment)
                if stop - start >= need:
                    gaps.append((stop - start, start))
                start = end if stop == end else -(-outside[at][1] // alignment)
        return FreeGaps(gaps, alignment, self.policy)

    def alloc_at(self, address: int, size: int) -> None:
        """Takes `[address, address + size)`.

        Raises `LayoutError` where the range is misaligned or outside the space, and
        `OutOfMemoryError` where a live buffer is in the way, naming it.
        """
        alignment = self.alignment
        start, need = address // alignment, -(-size // alignment) or 1
        hole = self._ends.get(start + need)
        if hole is None or hole > start or start * alignment != address:
            hole = self._hole_for(address, size)
        # A plan that runs again takes the upper end of a hole: only that hole shrinks.
        sizes, ends, holes = self._sizes, self._ends, self._holes
        granules = sizes[hole]
        del holes[bisect_left(holes, granules << _SHIFT | hole)]
        above = hole + granules - start - need
        if above:
            sizes[start + need] = above
            ends[hole + granules] = start + need
            insort(holes, above << _SHIFT | (start + need))
        else:
            del ends[start + need]
        if hole < start:
            sizes[hole] = start - hole
            ends[start] = hole
            insort(holes, (start - hole) << _SHIFT | hole)
        else:
            del sizes[hole]
        if above or hole == start:
            self._move_start(hole if hole == start else None, start + need if above else None)
        self._free -= need
        self._live[start] = need
        self._token ^= hash((start, need))

    def _hole_for(self, address: int, size: int) -> int:
        """The start of the hole that holds a range; raises as `alloc_at` says."""
        problem = self._range_problem(address, size)
        if problem:
            raise LayoutError(
                f"no block can lie at {address:#x} with {size} bytes per bank: {problem}",
                expected=f"a multiple of {self.alignment} in [{self.base:#x}, {self.limit:#x})",
                got=f"{address:#x}",
            )
        start, need = address // self.alignment, self._rounded(size) // self.alignment
        hole = self._hole_around(start, need)
        if hole is None:
            raise OutOfMemoryError(
                f"address {address:#x} with {need * self.alignment} bytes per bank is taken",
                where=takers_text(self, address, need * self.alignment),
                got=pressure_text(self),
                remedy="move or free the block that is in the way first",
            )
        return hole

    def free(self, address: int) -> int:
        """Gives a buffer back and returns its bytes per bank.

        Raises `TaskError` where no live buffer starts at the address.
        """
        alignment = self.alignment
        start = address // alignment
        need = self._live.pop(start, None) if start * alignment == address else None
        if need is None:
            raise TaskError(
                f"no live block starts at {address:#x}: freed twice, or never allocated",
                got=pressure_text(self),
                remedy="free each address once, with the value that alloc gave",
            )
        self._token ^= hash((start, need))
        self._free += need
        end, granules = start + need, need
        sizes, ends, holes = self._sizes, self._ends, self._holes
        after = sizes.pop(end, None)
        before = ends.pop(start, None)
        if after is not None:
            del holes[bisect_left(holes, after << _SHIFT | end)]
            granules += after
        if before is None or after is not None:
            self._move_start(None if after is None else end, start if before is None else None)
        if before is not None:
            size = sizes[before]
            del holes[bisect_left(holes, size << _SHIFT | before)]
            granules += size
            start = before
        sizes[start] = granules
        ends[start + granules] = start
        insort(holes, granules << _SHIFT | start)
        return need * alignment

    def is_free(self, address: int, size: int) -> bool:
        """Whether `alloc_at` would succeed."""
        if self._range_problem(address, size):
            return False
        granules = self._rounded(size) // self.alignment
        return self._hole_around(address // self.alignment, granules) is not None

    def size_of(self, address: int) -> int | None:
        """Bytes per bank of the live buffer that starts at the address, None if there is none."""
        start = address // self.alignment
        granules = self._live.get(start) if start * self.alignment == address else None
        return None if granules is None else granules * self.alignment

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The live buffers, (address, size), by address."""
        return tuple(
            (a * self.alignment, s * self.alignment) for a, s in sorted(self._live.items())
        )

    def holes(self) -> tuple[tuple[int, int], ...]:
        """The holes, (address, size), by address."""
        alignment = self.alignment
        return tuple((a * alignment, self._sizes[a] * alignment) for a in self._sorted_starts())

    @property
    def capacity(self) -> int:
        """Bytes per bank, live and free."""
        return self.limit - self.base

    @property
    def used_nbytes(self) -> int:
        return self.limit - self.base - self._free * self.alignment

    @property
    def free_nbytes(self) -> int:
        return self._free * self.alignment

    @property
    def largest_hole(self) -> int:
        """Bytes per bank of the largest hole, 0 where the space is full."""
        return (self._holes[-1] >> _SHIFT) * self.alignment if self._holes else 0

    @property
    def token(self) -> int:
        """Equal wherever the sets of live buffers are equal (a 64-bit hash, kept in O(1))."""
        return self._token

    def clone(self) -> Allocator:
        """An independent copy, for planners to try things on."""
        twin = Allocator.__new__(Allocator)
        twin.base, twin.limit, twin.alignment = self.base, self.limit, self.alignment
        twin.policy = self.policy
        twin._live, twin._sizes, twin._ends = dict(self._live), dict(self._sizes), dict(self._ends)
        twin._holes, twin._starts = list(self._holes), None
        twin._token, twin._free = self._token, self._free
        return twin

    def become(self, buffers: Iterable[tuple[int, int]]) -> None:
        """These buffers, (address, size), are live and no others, whatever was before.

        All or nothing; it works on what an interrupt has left in the middle of a change too.
        """
        fresh = self.emptied()
        for address, size in buffers:
            fresh.alloc_at(address, size)
        # Nothing can come in between these: not one of them is a call.
        self._live, self._sizes, self._ends = fresh._live, fresh._sizes, fresh._ends
        self._holes, self._starts = fresh._holes, None
        self._token, self._free = fresh._token, fresh._free

    def check(self) -> None:
        """Asserts our own invariants: disjoint buffers, no adjacent holes, three equal indices."""
        spans = sorted(
            [(a, s, True) for a, s in self._live.items()]
            + [(a, s, False) for a, s in self._sizes.items()]
        )
        at, was_hole = self.base // self.alignment, False
        for start, granules, live in spans:
            assert start == at and granules > 0, f"gap or overlap at granule {start}"
            assert live or not was_hole, f"adjacent holes at granule {start}"
            at, was_hole = start + granules, not live
        assert at == self.limit // self.alignment, "live and free bytes are not the capacity"
        assert self._free == sum(self._sizes.values()), "the free count is wrong"
        assert self._starts in (None, sorted(self._sizes)), "the start list is wrong"
        assert self._holes == sorted(s << _SHIFT | a for a, s in self._sizes.items())
        assert self._ends == {a + s: a for a, s in self._sizes.items()}
        token = 0
        for item in self._live.items():
            token ^= hash(item)
        assert token == self._token, "the token is wrong"

    def _rounded(self, size: int) -> int:
        return (-(-size // self.alignment) or 1) * self.alignment

    def _first(self, need: int, low: bool) -> int:
        """Where among the holes the first one that fits stands: there is one."""
        starts, sizes = self._sorted_starts(), self._sizes
        start = next(s for s in (starts if low else reversed(starts)) if sizes[s] >= need)
        return bisect_left(self._holes, sizes[start] << _SHIFT | start)

    def _cut_low(self, start: int, left: int, need: int) -> None:
        self._move_start(start, start + need if left else None)
        del self._sizes[start]
        end = start + need + left
        if left:
            self._sizes[start + need] = left
            self._ends[end] = start + need
            insort(self._holes, left << _SHIFT | (start + need))
        else:
            del self._ends[end]

    def _add_hole(self, start: int, granules: int) -> None:
        self._sizes[start] = granules
        self._ends[start + granules] = start
        insort(self._holes, granules << _SHIFT | start)

    def _move_start(self, gone: int | None, come: int | None) -> None:
        """A hole starts elsewhere, no longer, or anew: kept up once someone needed the list."""
        starts = self._starts
        if starts is None:
            return
        if gone is None:
            assert come is not None, "nothing changes"
            insort(starts, come)
            return
        i = bisect_left(starts, gone)
        if come is None:
            del starts[i]
        else:  # No other hole starts between the two.
            starts[i] = come

    def _sorted_starts(self) -> list[int]:
        if self._starts is None:
            self._starts = sorted(self._sizes)
        return self._starts

    def _hole_around(self, start: int, need: int) -> int | None:
        # What a plan repeats fits the end or the start of a hole: no search then.
        hole = self._ends.get(start + need)
        if hole is not None and hole <= start:
            return hole
        if self._sizes.get(start, 0) >= need:
            return start
        starts = self._sorted_starts()
        i = bisect_right(starts, start) - 1
        if i < 0:
            return None
        hole = starts[i]
        return hole if start + need <= hole + self._sizes[hole] else None

    def _range_problem(self, address: int, size: int) -> str:
        if address % self.alignment:
            return f"it is not a multiple of {self.alignment}"
        if address < self.base or address + self._rounded(size) > self.limit:
            return "it leaves the space"
        return ""

"""Allocate addresses of one space, the same in every bank: best fit, or first fit as on devices.

A hole is one number, `size << 40 | address` in granules, in a sorted list; two dictionaries and a
list of starts index the same holes. Below ten thousand buffers nothing is faster in CPython.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from stitch import plugins
from stitch.errors import LayoutError, OutOfMemoryError, TaskError, UsageError
from stitch.machine import MOST_GRANULES, Policy, SpaceShape

_ADDRESS = MOST_GRANULES
_SHIFT = _ADDRESS.bit_length()
_BEST = Policy.BEST_FIT
#: A policy of a plugin: from the holes (address, size), by address, and the bytes of a new buffer,
#: all per bank, the address at which to allocate it; None: nowhere.
Placement: TypeAlias = Callable[[Sequence[tuple[int, int]], int], int | None]
#: How many live buffers an error lists.
_LISTED = 5


class FreeGaps:
    """Gaps (granules, first granule), the smallest first, to take addresses from."""

    __slots__ = ("_alignment", "_gaps", "_name", "_policy")

    def __init__(
        self,
        gaps: Iterable[tuple[int, int]],
        alignment: int,
        policy: Policy = Policy.BEST_FIT,
        plugin: str = "",
    ) -> None:
        self._gaps, self._alignment, self._policy = sorted(gaps), alignment, policy
        self._name = plugin

    def take(self, size: int, count: int = 1) -> list[int]:
        """Take up to `count` addresses for `size` bytes per bank, as `Allocator.alloc` would.

        >>> FreeGaps([(4, 0), (8, 10)], 16).take(60, 2)
        [0, 224]
        """
        alignment, gaps = self._alignment, self._gaps
        need = -(-size // alignment) or 1
        if self._name:
            return self._take_by_plugin(need, count)
        addresses: list[int] = []
        at = bisect_left(gaps, (need, 0))
        while at < len(gaps) and len(addresses) < count:
            granules, start = gaps.pop(self._chosen(at))
            # The rest of a gap comes first again.
            if self._policy is Policy.FIRST_FIT_UPWARDS:
                taken = range(start, start + granules - need + 1, need)[: count - len(addresses)]
                start += len(taken) * need
            else:
                taken = range(start + granules - need, start - 1, -need)[: count - len(addresses)]
            addresses += [granule * alignment for granule in taken]
            rest = granules - len(taken) * need
            if rest:
                insort(gaps, (rest, start))
                at += rest < need
        return addresses

    def _take_by_plugin(self, need: int, count: int) -> list[int]:
        addresses: list[int] = []
        while len(addresses) < count:
            gaps = sorted((start, granules) for granules, start in self._gaps)
            start = placed_by_plugin(self._name, gaps, need, self._alignment)
            if start is None:
                break
            hole, granules = next((s, g) for s, g in gaps if s <= start < s + g)
            self._gaps.remove((granules, hole))
            rests = (start - hole, hole), (hole + granules - start - need, start + need)
            self._gaps = sorted([*self._gaps, *(rest for rest in rests if rest[0])])
            addresses.append(start * self._alignment)
        return addresses

    def _chosen(self, at: int) -> int:
        """Return the index of the gap to take from first; those from `at` on are large enough."""
        if self._policy is _BEST:
            return at
        upwards = self._policy is Policy.FIRST_FIT_UPWARDS
        fitting = range(at, len(self._gaps))
        return (min if upwards else max)(fitting, key=lambda i: self._gaps[i][1])


def placed_by_plugin(
    name: str, holes: Sequence[tuple[int, int]], need: int, granule: int
) -> int | None:
    """Ask a plugin where a new buffer starts; holes, need and result are in granules.

    Raises:
        UsageError: There is no such plugin, it fails, or its address is in no hole.
    """
    policy: Placement | None = plugins.find("allocators", name)
    if policy is None:
        raise plugins.no_plugin("allocators", name)
    in_bytes = tuple((start * granule, count * granule) for start, count in holes)
    address = plugins.called("allocators", name, policy, in_bytes, need * granule)
    if address is None:
        return None
    if isinstance(address, int) and address % granule == 0:
        for start, size in in_bytes:
            if start <= address and address + need * granule <= start + size:
                return address // granule
    raise UsageError(
        f"the allocator plugin {name!r} returned an address that is not free",
        expected=f"a multiple of {granule} in a hole of at least {need * granule} B, or None",
        got=repr(address)[:80],
        remedy="return an address inside one of the holes that the policy is given",
    )


class Allocator:
    """Allocates `[base, limit)` in granules of `alignment` bytes; all sizes in bytes per bank.

    Best fit takes the top of the smallest hole that fits, the lowest of equal ones, or its bottom
    with `low=True`. First fit takes the top of the highest hole that fits, or the bottom of the
    lowest with `low=True`; first fit upwards always the latter. An empty buffer takes a granule.
    `plugin` names a policy of a plugin that is asked instead.

    >>> allocator = Allocator(0, 1024, 16)
    >>> allocator.alloc(100), allocator.alloc(100, low=True), allocator.free_nbytes
    (912, 0, 800)
    """

    __slots__ = (
        "_ends", "_free", "_holes", "_live", "_sizes", "_starts",
        "alignment", "base", "limit", "plugin", "policy",
    )  # fmt: skip

    def __init__(
        self, base: int, limit: int, alignment: int, policy: Policy = Policy.BEST_FIT,
        plugin: str = "",
    ) -> None:  # fmt: skip
        if alignment < 1 or not 0 <= base <= limit or limit // alignment > _ADDRESS:
            raise LayoutError(
                "an allocator needs 0 <= base <= limit and a positive alignment",
                got=f"base {base}, limit {limit}, alignment {alignment}",
            )
        self.alignment = alignment
        self.policy, self.plugin = policy, plugin
        self.base = -(-base // alignment) * alignment
        self.limit = max(self.base, limit // alignment * alignment)
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # start of a hole -> its granules
        self._ends: dict[int, int] = {}  # end of a hole -> its start
        self._holes: list[int] = []
        self._starts: list[int] | None = None
        self._free = (self.limit - self.base) // alignment
        if self._free:
            self._add_hole(self.base // alignment, self._free)

    @classmethod
    def of(cls, shape: SpaceShape) -> Allocator:
        """Create an empty allocator of a machine's space."""
        return cls(shape.base, shape.limit, shape.granule, shape.policy, shape.allocator)

    def emptied(self) -> Allocator:
        """Return an empty allocator of the same range."""
        return Allocator(self.base, self.limit, self.alignment, self.policy, self.plugin)

    def try_alloc(self, size: int, *, low: bool = False) -> int | None:
        """Allocate a buffer and return its address, or None if no hole fits."""
        alignment = self.alignment
        need = -(-size // alignment) or 1
        if self.plugin:
            return self._alloc_by_plugin(need)
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
        return start * alignment

    def _alloc_by_plugin(self, need: int) -> int | None:
        holes = [(start, self._sizes[start]) for start in self._sorted_starts()]
        # A policy need not look for a hole that is large enough if there is none.
        if all(granules < need for _, granules in holes):
            return None
        start = placed_by_plugin(self.plugin, holes, need, self.alignment)
        if start is None:
            return None
        self.alloc_at(start * self.alignment, need * self.alignment)
        return start * self.alignment

    def alloc(self, size: int, *, low: bool = False) -> int:
        """Allocate a buffer and return its address; raises `OutOfMemoryError` if no hole fits."""
        address = self.try_alloc(size, low=low)
        if address is None:
            raise OutOfMemoryError(
                f"no hole of {self._rounded(size)} bytes per bank is free",
                where=f"addresses [{self.base:#x}, {self.limit:#x}) of every bank",
                expected=f"a hole of {self._rounded(size)} B",
                got=self._usage_text(),
                remedy="free or move a live tensor, or store it in another space",
            )
        return address

    def gaps(self, outside: Sequence[tuple[int, int]] = (), least: int = 1) -> FreeGaps:
        """Return the free gaps of at least `least` bytes per bank outside sorted, disjoint
        (address, end) ranges.

        >>> outside = [(0, 40), (100, 200), (330, 500)]
        >>> Allocator(0, 1024, 16).gaps(outside, 60).take(60, 3)
        [256, 960, 896]
        """
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
        return FreeGaps(gaps, alignment, self.policy, self.plugin)

    def alloc_at(self, address: int, size: int) -> None:
        """Allocate `[address, address + size)`.

        Raises:
            LayoutError: The range is misaligned or outside the space.
            OutOfMemoryError: A live buffer overlaps it.
        """
        alignment = self.alignment
        start, need = address // alignment, -(-size // alignment) or 1
        hole = self._ends.get(start + need)
        if hole is None or hole > start or start * alignment != address:
            hole = self._hole_for(address, size)
        # A repeated plan allocates the upper end of a hole: only that hole shrinks.
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

    def _hole_for(self, address: int, size: int) -> int:
        """Return the start of the hole that contains a range; raises as `alloc_at`."""
        problem = self._range_problem(address, size)
        if problem:
            raise LayoutError(
                f"no buffer of {size} bytes per bank can be at {address:#x}: {problem}",
                expected=f"a multiple of {self.alignment} in [{self.base:#x}, {self.limit:#x})",
                got=f"{address:#x}",
            )
        nbytes = self._rounded(size)
        hole = self._hole_around(address // self.alignment, nbytes // self.alignment)
        if hole is None:
            end = address + nbytes
            live = [(a, a + s) for a, s in self.buffers() if a < end and address < a + s]
            raise OutOfMemoryError(
                f"address {address:#x} with {nbytes} bytes per bank is taken",
                where="taken by " + ", ".join(f"[{a:#x}, {b:#x})" for a, b in live[:_LISTED]),
                got=self._usage_text(),
                remedy="move or free the overlapping buffer first",
            )
        return hole

    def _usage_text(self) -> str:
        """Describe free memory and the largest hole, for errors."""
        return f"{self.free_nbytes} B free of {self.capacity}, largest hole {self.largest_hole} B"

    def free(self, address: int) -> int:
        """Free a buffer and return its bytes per bank.

        Raises `TaskError` if no live buffer starts at the address.
        """
        alignment = self.alignment
        start = address // alignment
        need = self._live.pop(start, None) if start * alignment == address else None
        if need is None:
            raise TaskError(
                f"no live buffer starts at {address:#x}: freed twice, or never allocated",
                got=self._usage_text(),
                remedy="free each address that alloc returned once",
            )
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
        """Return the bytes per bank of the live buffer at an address; None if there is none."""
        start = address // self.alignment
        granules = self._live.get(start) if start * self.alignment == address else None
        return None if granules is None else granules * self.alignment

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Return the live buffers, (address, size), by address."""
        return tuple(
            (a * self.alignment, s * self.alignment) for a, s in sorted(self._live.items())
        )

    def holes(self) -> tuple[tuple[int, int], ...]:
        """Return the holes, (address, size), by address."""
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

    def clone(self) -> Allocator:
        """Return an independent copy."""
        twin = Allocator.__new__(Allocator)
        twin.base, twin.limit, twin.alignment = self.base, self.limit, self.alignment
        twin.policy, twin.plugin = self.policy, self.plugin
        twin._live, twin._sizes, twin._ends = dict(self._live), dict(self._sizes), dict(self._ends)
        twin._holes, twin._starts = list(self._holes), None
        twin._free = self._free
        return twin

    def become(self, buffers: Iterable[tuple[int, int]]) -> None:
        """Replace the live buffers by these (address, size), atomically.

        Also works if an interrupt has left the indices inconsistent.
        """
        fresh = self.emptied()
        for address, size in buffers:
            fresh.alloc_at(address, size)
        # Atomic under the GIL: no call in between.
        self._live, self._sizes, self._ends = fresh._live, fresh._sizes, fresh._ends
        self._holes, self._starts = fresh._holes, None
        self._free = fresh._free

    def check(self) -> None:
        """Assert the invariants: disjoint buffers, no adjacent holes, equal indices."""
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

    def _rounded(self, size: int) -> int:
        return (-(-size // self.alignment) or 1) * self.alignment

    def _first(self, need: int, low: bool) -> int:
        """Return the index of the hole that first fit takes, which must exist."""
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
        """Update the list of starts, if it is in use: remove `gone`, add `come`."""
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
        else:  # No other start is between the two.
            starts[i] = come

    def _sorted_starts(self) -> list[int]:
        if self._starts is None:
            self._starts = sorted(self._sizes)
        return self._starts

    def _hole_around(self, start: int, need: int) -> int | None:
        # Repeated plans fit the end or the start of a hole: no search then.
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
            return "it is outside the space"
        return ""

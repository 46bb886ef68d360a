"""The index tree: how long every list of a nest is, and which lists a choice of elements keeps.

A nest's depth is the same everywhere, its lengths may differ ("ragged").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stitch.errors import UsageError

Numbers: TypeAlias = NDArray[np.int64]
#: Of all lists at one depth: their one length, or each its own.
Lengths: TypeAlias = "int | Numbers"
#: So many numbers of lists or leaves are written down at most.
MAX_NUMBERS = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class IndexTree:
    """The lengths of a nest by depth, the outermost first: `[[a, b], [c]]` has 2, and (2, 1).

    >>> tree = IndexTree.of([[2], [2, 1]])
    >>> tree.depth, tree.numel, tree.uniform, tree.counts
    (2, 3, None, (1, 2, 3))
    """

    #: By depth. Equal lengths are one number, so equal trees look alike.
    lengths: tuple[Lengths, ...]
    #: Counted once: `counts`, and `offsets` by depth.
    _counted: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    _offsets: dict[int, Numbers] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(lengths: Sequence[Lengths | Sequence[int]]) -> IndexTree:
        """The tree of these lengths by depth; lists of equal length are told by one number."""
        return IndexTree(tuple([_alike(each) for each in lengths]))

    @property
    def depth(self) -> int:
        """How many lists stand around a leaf."""
        return len(self.lengths)

    @property
    def length(self) -> int:
        """The length of the outermost list."""
        (outer,) = np.atleast_1d(self.lengths[0])
        return int(outer)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many lists there are by depth, the one outermost first; at the end: leaves."""
        if self._counted:
            return self._counted[0]
        counts = [1]
        for lengths in self.lengths:
            if isinstance(lengths, int):
                counts.append(counts[-1] * lengths)
            else:
                counts.append(int(np.sum(lengths)))
        self._counted.append(tuple(counts))
        return self._counted[0]

    @property
    def numel(self) -> int:
        """How many leaves there are."""
        return self.counts[-1]

    @property
    def uniform(self) -> tuple[int, ...] | None:
        """The lengths by depth, where all lists of one depth are equally long; else None."""
        lengths = [each for each in self.lengths if isinstance(each, int)]
        return tuple(lengths) if len(lengths) == self.depth else None

    def offsets(self, depth: int) -> Numbers:
        """Where the elements of each list at a depth begin among all of that depth, and their end.

        >>> IndexTree.of([[2], [2, 1]]).offsets(1).tolist()
        [0, 2, 3]
        """
        known = self._offsets.get(depth)
        if known is None:
            lengths, count = self.lengths[depth], check_count(self.counts[depth])
            if isinstance(lengths, int):
                known = np.arange(count + 1, dtype=np.int64) * lengths
            else:
                known = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            self._offsets[depth] = known
        return known

    def widths(self, depth: int) -> list[int]:
        """The length of each list at a depth; negative depths count from the leaves (0 outermost).

        >>> IndexTree.of([[3], [3, 2, 4]]).widths(1)
        [3, 2, 4]
        """
        return [int(n) for n in np.diff(self.offsets(depth % self.depth))]

    def elements(self, chosen: Numbers, depth: int = 0) -> Numbers:
        """The numbers, among all of the next depth, of the elements of these lists of a depth."""
        lengths = self.lengths[depth]
        if isinstance(lengths, int):
            return spread(chosen * lengths, lengths, 1)
        return runs(self.offsets(depth)[chosen], lengths[chosen])

    def inside(self) -> IndexTree:
        """The lists of the outermost one, one after the other, as if they were one.

        >>> IndexTree.of([[2], [2, 1]]).inside().lengths
        (3,)
        """
        return IndexTree.of([self.counts[2], *self.lengths[2:]])

    def taken(self, chosen: Numbers) -> tuple[IndexTree, tuple[Numbers, ...]]:
        """The tree of some elements of the outermost list, in this order, perhaps repeated; and
        which lists of each deeper depth these are, at the end: which leaves."""
        kept, below = [chosen], chosen
        lengths: list[Lengths] = [len(chosen)]
        for depth in range(1, self.depth):
            each = self.lengths[depth]
            lengths.append(each if isinstance(each, int) else each[below])
            below = self.elements(below, depth)
            kept.append(below)
        return IndexTree.of(lengths), tuple(kept)

    def grouped(self, sizes: Lengths | Sequence[int], count: int) -> IndexTree:
        """The outermost list cut into `count` lists of these sizes: a nest deeper by one."""
        return IndexTree.of([count, sizes, *self.lengths[1:]])

    def path(self, number: int, depth: int) -> str:
        """How an element of a depth is reached: the third of `[[a], [b, c]]` by `[1][1]`.

        >>> IndexTree.of([[2], [1, 2]]).path(2, 2)
        '[1][1]'
        """
        steps = []
        for above in range(depth - 1, -1, -1):
            offsets = self.offsets(above)
            parent = int(np.searchsorted(offsets, number, side="right")) - 1
            steps.append(number - int(offsets[parent]))
            number = parent
        return "".join(f"[{step}]" for step in reversed(steps))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexTree):
            return NotImplemented
        return self.depth == other.depth and all(
            np.array_equal(a, b) for a, b in zip(self.lengths, other.lengths, strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.counts)


def runs(starts: Numbers, lengths: Numbers) -> Numbers:
    """From each start so many numbers, one after the other.

    >>> runs(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    total = check_count(int(np.sum(lengths)))
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)


def spread(starts: Numbers, length: int, stride: int) -> Numbers:
    """From each start so many numbers, `stride` apart, one after the other.

    >>> spread(np.array([5, 0]), 2, 3).tolist()
    [5, 8, 0, 3]
    """
    if not len(starts) or not length:
        return np.empty(0, np.int64)
    check_count(len(starts) * length)
    each = np.arange(length, dtype=np.int64) * (stride if length > 1 else 0)
    return (starts[:, None] + each).ravel()


def check_count(count: int) -> int:
    """So many numbers may be written down; raises `UsageError` for more."""
    if count > MAX_NUMBERS:
        raise UsageError(
            "a nest has too many lists or leaves to be numbered one by one",
            expected=f"at most {MAX_NUMBERS}", got=str(count),
        )  # fmt: skip
    return count


def strides_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """By how much the number of a leaf grows with each index, where lists are equally long.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple([prod(lengths[depth + 1 :]) for depth in range(len(lengths))])


def _alike(lengths: Lengths | Sequence[int]) -> Lengths:
    if isinstance(lengths, int):
        return lengths
    each = np.asarray(lengths, dtype=np.int64)
    first = int(each[0]) if len(each) else 0
    return first if np.all(each == first) else each

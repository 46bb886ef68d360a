"""The lengths of a nest's lists, and the data row of each leaf.

`IndexTree` has the lengths by depth; they may differ ("ragged"). An index map is `Affine` (base and
strides: lists of equal length) or `RowList`. Access functions only transform maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stitch.errors import UsageError
from stitch.graph import SymbolicTensor
from stitch.runtime import Tensor

# --------------------------------------------------------------------------------------------------
# The index tree: lengths of the lists of a nest.

Numbers: TypeAlias = NDArray[np.int64]
#: The lengths of all lists at one depth: one number if they are equal.
Lengths: TypeAlias = "int | Numbers"
#: Limit of index entries.
MAX_NUMBERS = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class IndexTree:
    """The lengths of a nest by depth, outermost first: `[[a, b], [c]]` has 2, and (2, 1).

    >>> tree = IndexTree.of([[2], [2, 1]])
    >>> tree.depth, tree.numel, tree.uniform, tree.counts
    (2, 3, None, (1, 2, 3))
    """

    lengths: tuple[Lengths, ...]
    #: Caches of `counts`, and of `offsets` by depth.
    _counted: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    _offsets: dict[int, Numbers] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(lengths: Sequence[Lengths | Sequence[int]]) -> IndexTree:
        """Return the tree of these lengths; equal lengths of one depth become one number."""
        return IndexTree(tuple([_alike(each) for each in lengths]))

    @property
    def depth(self) -> int:
        """The number of lists around a leaf."""
        return len(self.lengths)

    @property
    def length(self) -> int:
        """The length of the outermost list."""
        (outer,) = np.atleast_1d(self.lengths[0])
        return int(outer)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of lists by depth, outermost first, and of leaves at the end."""
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
        """The number of leaves."""
        return self.counts[-1]

    @property
    def uniform(self) -> tuple[int, ...] | None:
        """The lengths by depth if all lists of one depth are equally long, else None."""
        lengths = [each for each in self.lengths if isinstance(each, int)]
        return tuple(lengths) if len(lengths) == self.depth else None

    def offsets(self, depth: int) -> Numbers:
        """Return the position of each list's first element among all of its depth, and the end.

        >>> IndexTree.of([[2], [2, 1]]).offsets(1).tolist()
        [0, 2, 3]
        """
        offsets = self._offsets.get(depth)
        if offsets is None:
            lengths, count = self.lengths[depth], check_count(self.counts[depth])
            if isinstance(lengths, int):
                offsets = np.arange(count + 1, dtype=np.int64) * lengths
            else:
                offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            self._offsets[depth] = offsets
        return offsets

    def widths(self, depth: int) -> list[int]:
        """Return the length of each list at a depth; negative depths count from the leaves.

        >>> IndexTree.of([[3], [3, 2, 4]]).widths(1)
        [3, 2, 4]
        """
        return [int(n) for n in np.diff(self.offsets(depth % self.depth))]

    def elements(self, chosen: Numbers, depth: int = 0) -> Numbers:
        """Return the numbers, at the next depth, of the elements of some lists."""
        lengths = self.lengths[depth]
        if isinstance(lengths, int):
            return spread(chosen * lengths, lengths, 1)
        return runs(self.offsets(depth)[chosen], lengths[chosen])

    def inside(self) -> IndexTree:
        """Return the tree without its outermost list: its lists concatenated.

        >>> IndexTree.of([[2], [2, 1]]).inside().lengths
        (3,)
        """
        return IndexTree.of([self.counts[2], *self.lengths[2:]])

    def taken(self, chosen: Numbers) -> tuple[IndexTree, Numbers]:
        """Return the tree of some elements of the outermost list, and the numbers of its leaves."""
        below = chosen
        lengths: list[Lengths] = [len(chosen)]
        for depth in range(1, self.depth):
            each = self.lengths[depth]
            lengths.append(each if isinstance(each, int) else each[below])
            below = self.elements(below, depth)
        return IndexTree.of(lengths), below

    def grouped(self, sizes: Lengths | Sequence[int], count: int) -> IndexTree:
        """Return the outermost list cut into `count` lists of these sizes: one level deeper."""
        return IndexTree.of([count, sizes, *self.lengths[1:]])

    def path(self, number: int, depth: int) -> str:
        """Return the indices of an element: `[1][1]` for the third of `[[a], [b, c]]`.

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
    """Return, for each start, `length` consecutive numbers.

    >>> runs(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    total = check_count(int(np.sum(lengths)))
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)


def spread(starts: Numbers, length: int, stride: int) -> Numbers:
    """Return, for each start, `length` numbers that are `stride` apart.

    >>> spread(np.array([5, 0]), 2, 3).tolist()
    [5, 8, 0, 3]
    """
    if not len(starts) or not length:
        return np.empty(0, np.int64)
    check_count(len(starts) * length)
    each = np.arange(length, dtype=np.int64) * (stride if length > 1 else 0)
    return (starts[:, None] + each).ravel()


def check_count(count: int) -> int:
    """Return a count of index entries; raise `UsageError` above `MAX_NUMBERS`."""
    if count > MAX_NUMBERS:
        raise UsageError(
            "the nest has too many lists or leaves for an explicit index",
            expected=f"at most {MAX_NUMBERS}", got=str(count),
        )  # fmt: skip
    return count


def strides_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of uniform lists.

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


# --------------------------------------------------------------------------------------------------
# Index maps: the data row of each leaf of a nest.


@dataclass(frozen=True, slots=True)
class Affine:
    """Leaf (i, j, ...) is row `base + i * strides[0] + j * strides[1] + ...`."""

    base: int
    strides: tuple[int, ...]

    def reached(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the first and last row of a nest that has leaves.

        >>> Affine(3, (2, -1)).reached((4, 3))
        (1, 9)
        """
        spans = [(n - 1) * stride for n, stride in zip(lengths, self.strides, strict=True)]
        return self.base + sum(min(s, 0) for s in spans), self.base + sum(max(s, 0) for s in spans)

    def rows(self, tree: IndexTree) -> Numbers:
        """Return the row of each leaf, in order."""
        return self.rows_of(tree, np.arange(check_count(tree.numel), dtype=np.int64))

    def rows_of(self, tree: IndexTree, leaves: Numbers) -> Numbers:
        """Return the rows of some leaves by number."""
        lengths = tree.uniform
        assert lengths is not None, "lists are equally long"
        rows = np.full(len(leaves), self.base, np.int64)
        for length, span, stride in zip(lengths, strides_of(lengths), self.strides, strict=True):
            if length > 1:
                rows += leaves // span % length * stride
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """A row for each leaf."""

    numbers: Numbers

    def rows(self, tree: IndexTree) -> Numbers:
        return self.numbers


IndexMap: TypeAlias = Affine | RowList


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """The lengths of a nest, and the row of each leaf."""

    tree: IndexTree
    map: IndexMap

    @staticmethod
    def whole(tree: IndexTree) -> Indexed:
        """Return the index of rows in order."""
        if tree.uniform is not None:
            return Indexed(tree, Affine(0, strides_of(tree.uniform)))
        return Indexed(tree, RowList(np.arange(check_count(tree.numel), dtype=np.int64)))

    def rows(self) -> Numbers:
        """Return the row of each leaf, in order."""
        return self.map.rows(self.tree)

    def simplified(self) -> Indexed:
        """Return the same index with an affine map if there is one."""
        tree, rows = self.tree, self.rows()
        if tree.uniform is not None and len(rows):
            shaped = rows.reshape(tree.uniform)
            strides = tuple([
                int(np.take(shaped, 1, axis).flat[0]) - int(rows[0]) if length > 1 else 0
                for axis, length in enumerate(tree.uniform)
            ])  # fmt: skip
            affine = Affine(int(rows[0]), strides)
            if np.array_equal(affine.rows(tree), rows):
                return Indexed(tree, affine)
        return Indexed(tree, RowList(rows))

    def element(self, index: int) -> Indexed:
        """Return one element of the outermost list of a nest of lists; 0 ≤ index < length."""
        if isinstance(self.map, Affine):
            base = self.map.base + index * self.map.strides[0]
            return Indexed(IndexTree.of(self.tree.lengths[1:]), Affine(base, self.map.strides[1:]))
        one = self.taken(np.array([index], np.int64))
        return Indexed(one.tree.inside(), one.map)

    def row(self, index: int) -> int:
        """Return the row of one element of a nest of depth 1; 0 ≤ index < length."""
        match self.map:
            case Affine(base, (stride,)):
                return base + index * stride
            case RowList(numbers):
                return int(numbers[index])
        raise AssertionError("depth 1")

    def sliced(self, chosen: range) -> Indexed:
        """Return equidistant elements of the outermost list; an affine map stays affine."""
        if len(chosen) < 2:
            chosen = range(chosen.start, chosen.start + len(chosen)) if chosen else range(0)
        if isinstance(self.map, Affine):
            first, *rest = self.map.strides
            base = self.map.base + chosen.start * first if chosen else self.map.base
            lengths = [len(chosen), *self.tree.lengths[1:]]
            return Indexed(IndexTree.of(lengths), Affine(base, (first * chosen.step, *rest)))
        check_count(len(chosen))
        return self.taken(np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64))

    def taken(self, chosen: Numbers) -> Indexed:
        """Return elements of the outermost list in this order; they may repeat."""
        tree, leaves = self.tree.taken(chosen)
        if isinstance(self.map, Affine):
            return Indexed(tree, RowList(self.map.rows_of(self.tree, leaves)))
        return Indexed(tree, RowList(self.map.numbers[leaves]))

    def windows(self, count: int, size: int, stride: int, dilation: int) -> Indexed:
        """Return `count` windows of `size` elements, `dilation` apart, `stride` between windows."""
        if isinstance(self.map, Affine):
            first, *rest = self.map.strides
            lengths = [count, size, *self.tree.lengths[1:]]
            strides = (first * stride, first * dilation, *rest)
            return Indexed(IndexTree.of(lengths), Affine(self.map.base, strides))
        begins = np.arange(check_count(count), dtype=np.int64) * (stride if count > 1 else 0)
        return self.grouped(spread(begins, size, dilation), size, count)

    def repeated(self, times: int) -> Indexed:
        """Return the nest `times` times: one level deeper."""
        if isinstance(self.map, Affine):
            return Indexed(
                IndexTree.of([times, *self.tree.lengths]),
                replace(self.map, strides=(0, *self.map.strides)),
            )
        check_count(times * max(1, self.tree.length))
        chosen = np.tile(np.arange(self.tree.length, dtype=np.int64), times)
        return self.grouped(chosen, self.tree.length, times)

    def spread(self, times: int) -> Indexed:
        """Repeat each element of the outermost list: one level deeper.

        >>> Indexed.whole(IndexTree.of([2])).spread(3).rows().tolist()
        [0, 0, 0, 1, 1, 1]
        """
        if isinstance(self.map, Affine):
            first, *rest = self.map.strides
            lengths = [self.tree.length, times, *self.tree.lengths[1:]]
            return Indexed(IndexTree.of(lengths), Affine(self.map.base, (first, 0, *rest)))
        check_count(times * max(1, self.tree.length))
        chosen = np.repeat(np.arange(self.tree.length, dtype=np.int64), times)
        return self.grouped(chosen, times, self.tree.length)

    def flattened(self) -> Indexed:
        """Concatenate the lists of the outermost list: one level less."""
        return Indexed(self.tree.inside(), RowList(self.rows())).simplified()

    def grouped(self, chosen: Numbers, sizes: int | Sequence[int], count: int) -> Indexed:
        """Return elements of the outermost list in `count` lists of these sizes."""
        taken = self.taken(chosen)
        return Indexed(taken.tree.grouped(sizes, count), taken.map)


# --------------------------------------------------------------------------------------------------
# Rows of symbolic tensors


def leaf_rows(data: SymbolicTensor, index: Indexed) -> SymbolicTensor:
    """Return the leaves of an index in order: `[numel, *leaf]`."""
    builder: Any = data.builder
    index = index if isinstance(index.map, Affine) else index.simplified()
    where, lengths, numel = index.map, index.tree.uniform, index.tree.numel
    if not isinstance(where, Affine) or lengths is None:
        rows = index.rows()
        is_whole = len(rows) == data.shape[0] and np.array_equal(rows, np.arange(len(rows)))
        found: SymbolicTensor = data if is_whole else builder.gather(data, rows)
        return found
    axes = _axes(lengths, where.strides)
    if not numel or not axes or (len(axes) == 1 and axes[0][1] == 1):
        first, last = where.base, where.base + numel
        return data if (first, last) == (0, data.shape[0]) else data[first:last]
    window = builder.window_rows(data, where.base, [s for _, s in axes], [n for n, _ in axes])
    leaves: SymbolicTensor = window.reshape(numel, *data.shape[1:])
    return leaves


def look_up(
    data: Any, index: Indexed, number: SymbolicTensor
) -> tuple[SymbolicTensor, IndexTree | None]:
    """Return the element that a symbolic number selects: its leaves, and their lengths if it is a
    nest.

    Raises `UsageError` for anything but a whole number, and for a ragged nest.
    """
    if number.shape or number.dtype.kind not in "iu":
        raise UsageError(
            "a FractalTensor is indexed by one whole number",
            got=f"{number.dtype}{list(number.shape)}",
            remedy="map over several numbers: ops.map(lambda i: xs[i], numbers)",
        )
    lengths = index.tree.uniform
    if lengths is None:
        raise UsageError(
            "a ragged FractalTensor cannot be indexed by a number that is computed at run time",
            remedy="index it by a Python number, or make its lists equally long",
        )
    builder: Any = number.builder
    builder = builder.innermost([number, data])
    if number.dtype.name not in ("int32", "int64"):
        number = number.cast("int64")  # `Gather` accepts int32 and int64.
    rows = leaf_rows(builder.tensor(data.numpy() if isinstance(data, Tensor) else data), index)
    if index.tree.depth == 1:
        return builder.gather(rows, number, 0), None
    inside = IndexTree.of(lengths[1:])
    shaped = rows.reshape(lengths[0], inside.numel, *rows.shape[1:])
    return builder.gather(shaped, number, 0), inside


def _axes(lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Merge the lengths and strides of a nest into as few axes as possible.

    >>> _axes((2, 1, 3, 4), (12, 99, 4, 1)), _axes((2, 3), (1, 2))
    ([(24, 1)], [(2, 1), (3, 2)])
    """
    axes: list[tuple[int, int]] = []
    for length, stride in zip(lengths, strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            length *= axes.pop()[0]
        axes.append((length, stride))
    return axes

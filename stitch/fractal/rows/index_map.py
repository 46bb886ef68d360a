"""Index maps: which row of its data each leaf of a nest is.

There are three forms, the narrowest that says it is used: *affine* (a first row and a stride for
each depth: nests whose lists are equally long), *rows* (each innermost list is a run of rows), and
a *list*. Access functions only make maps of maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from stitch.fractal.rows.index_tree import (
    IndexTree,
    Numbers,
    check_count,
    runs,
    spread,
    strides_of,
)


@dataclass(frozen=True, slots=True)
class Affine:
    """Leaf (i, j, …) is row `base + i * strides[0] + j * strides[1] + …`."""

    base: int
    strides: tuple[int, ...]

    def reached(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The least and the greatest row of a nest that has leaves.

        >>> Affine(3, (2, -1)).reached((4, 3))
        (1, 9)
        """
        spans = [(n - 1) * stride for n, stride in zip(lengths, self.strides, strict=True)]
        return self.base + sum(min(s, 0) for s in spans), self.base + sum(max(s, 0) for s in spans)

    def rows(self, tree: IndexTree) -> Numbers:
        """The row of each leaf, in order."""
        return self.rows_of(tree, np.arange(check_count(tree.numel), dtype=np.int64))

    def rows_of(self, tree: IndexTree, leaves: Numbers) -> Numbers:
        """The rows of some leaves by number."""
        lengths = tree.uniform
        assert lengths is not None, "lists are equally long"
        rows = np.full(len(leaves), self.base, np.int64)
        for length, span, stride in zip(lengths, strides_of(lengths), self.strides, strict=True):
            if length > 1:
                rows += leaves // span % length * stride
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The leaves of each innermost list lie in rows one after the other, from its start on."""

    starts: Numbers

    def rows(self, tree: IndexTree) -> Numbers:
        """The row of each leaf, in order."""
        return runs(self.starts, np.diff(tree.offsets(tree.depth - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Each leaf has a row of its own choice."""

    numbers: Numbers

    def rows(self, tree: IndexTree) -> Numbers:
        """The row of each leaf, in order."""
        return self.numbers


IndexMap: TypeAlias = Affine | Rows | Listed


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """A nest of rows: its lengths, and which row each leaf is."""

    tree: IndexTree
    map: IndexMap

    @staticmethod
    def whole(tree: IndexTree) -> Indexed:
        """Rows in their order, one for each leaf."""
        if tree.uniform is not None:
            return Indexed(tree, Affine(0, strides_of(tree.uniform)))
        return Indexed(tree, Rows(tree.offsets(tree.depth - 1)[:-1]))

    def rows(self) -> Numbers:
        """The row of each leaf, in order."""
        return self.map.rows(self.tree)

    def narrowed(self) -> Indexed:
        """The same in the narrowest form: affine, else rows, else a list."""
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
        offsets = tree.offsets(tree.depth - 1)
        if len(rows) and np.all(np.diff(offsets)):
            starts = rows[offsets[:-1]]
            if np.array_equal(Rows(starts).rows(tree), rows):
                return Indexed(tree, Rows(starts))
        return Indexed(tree, Listed(rows))

    def element(self, index: int) -> Indexed:
        """One element of the outermost list of a nest of lists; 0 ≤ index < length."""
        if isinstance(self.map, Affine):
            base = self.map.base + index * self.map.strides[0]
            return Indexed(IndexTree.of(self.tree.lengths[1:]), Affine(base, self.map.strides[1:]))
        one = self.taken(np.array([index], np.int64))
        return Indexed(one.tree.inside(), one.map)

    def row(self, index: int) -> int:
        """The row of one element of a nest of depth 1; 0 ≤ index < length."""
        match self.map:
            case Affine(base, (stride,)):
                return base + index * stride
            case Rows(starts):
                return int(starts[0]) + index
            case Listed(numbers):
                return int(numbers[index])
        raise AssertionError("depth 1")

    def sliced(self, chosen: range) -> Indexed:
        """Elements of the outermost list at equal distances: what is affine stays so."""
        if len(chosen) < 2:
            chosen = range(chosen.start, chosen.start + len(chosen)) if chosen else range(0)
        if isinstance(self.map, Affine):
            first, *rest = self.map.strides
            base = self.map.base + chosen.start * first if chosen else self.map.base
            lengths = [len(chosen), *self.tree.lengths[1:]]
            return Indexed(IndexTree.of(lengths), Affine(base, (first * chosen.step, *rest)))
        if self.tree.depth == 1 and isinstance(self.map, Rows) and chosen.step == 1:
            return Indexed(IndexTree.of([len(chosen)]), Rows(self.map.starts + chosen.start))
        check_count(len(chosen))
        return self.taken(np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64))

    def taken(self, chosen: Numbers) -> Indexed:
        """Elements of the outermost list in this order, perhaps repeated."""
        tree, kept = self.tree.taken(chosen)
        match self.map:
            case Rows(starts) if self.tree.depth > 1:
                return Indexed(tree, Rows(starts[kept[-2]]))
            case Affine(base, (*outer, 1)) if outer:
                lists = IndexTree.of(self.tree.lengths[:-1])
                return Indexed(tree, Rows(Affine(base, tuple(outer)).rows_of(lists, kept[-2])))
            case Affine():
                return Indexed(tree, Listed(self.map.rows_of(self.tree, kept[-1])))
        return Indexed(tree, Listed(self.rows()[kept[-1]]))

    def windows(self, count: int, size: int, stride: int, dilation: int) -> Indexed:
        """`count` windows of `size` elements of the outermost list, `dilation` apart, that begin
        `stride` apart: a nest deeper by one."""
        if isinstance(self.map, Affine):
            first, *rest = self.map.strides
            lengths = [count, size, *self.tree.lengths[1:]]
            strides = (first * stride, first * dilation, *rest)
            return Indexed(IndexTree.of(lengths), Affine(self.map.base, strides))
        begins = np.arange(check_count(count), dtype=np.int64) * (stride if count > 1 else 0)
        return self.grouped(spread(begins, size, dilation), size, count)

    def repeated(self, times: int) -> Indexed:
        """The nest so many times: a nest deeper by one."""
        if isinstance(self.map, Affine):
            return Indexed(
                IndexTree.of([times, *self.tree.lengths]),
                replace(self.map, strides=(0, *self.map.strides)),
            )
        check_count(times * max(1, self.tree.length))
        chosen = np.tile(np.arange(self.tree.length, dtype=np.int64), times)
        return self.grouped(chosen, self.tree.length, times)

    def spread(self, times: int) -> Indexed:
        """Each element of the outermost list so many times: a nest deeper by one.

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
        """The elements of the lists in the outermost one, one after the other: less deep by one."""
        return Indexed(self.tree.inside(), Listed(self.rows())).narrowed()

    def grouped(self, chosen: Numbers, sizes: int | Sequence[int], count: int) -> Indexed:
        """Elements of the outermost list in `count` lists of these sizes: a nest deeper by one."""
        taken = self.taken(chosen)
        return Indexed(taken.tree.grouped(sizes, count), taken.map)

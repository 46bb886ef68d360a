"""Deduplicate arrays by their bytes, without copies, reading only arrays of equal size."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any, final

import numpy as np

# Read-only views ----------------------------------------------------------------------------------

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]


class _Reading:
    """The base of a read-only view: not an array, so NumPy refuses to make the view writable."""

    __slots__ = ("__array_interface__", "base")

    def __init__(self, array: Array) -> None:
        self.base = array
        # As plain bytes, to be viewed as what they are: not every type has a name here.
        self.__array_interface__ = {
            "version": 3, "shape": array.shape, "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (array.__array_interface__["data"][0], True),
        }  # fmt: skip


def as_read_only(array: Array) -> Array:
    """Return a view that is read-only and cannot be made writable."""
    view: Array = np.asarray(_Reading(array)).view(array.dtype)
    return view


def can_change(array: Array) -> bool:
    """Return whether an array, or one that it is a view of, is writable."""
    base: Any = array
    while base is not None:
        if isinstance(base, np.ndarray):
            if base.flags.writeable:
                return True
            base = base.base
        elif isinstance(base, memoryview):
            if not base.readonly:
                return True
            lent = base.obj
            if lent is not None and not isinstance(lent, np.ndarray):
                return not memoryview(lent).readonly
            base = lent
        else:
            base = base.base if type(base) is _Reading else None
    return False


#: Bytes that are compared at once: what comparing takes of memory.
PIECE_NBYTES = 1 << 16


@final
class Contents:
    """Numbered distinct arrays.

    >>> seen = Contents()
    >>> [seen.number(np.array(row, np.int32)) for row in ([1, 2], [3, 4], [1, 2])]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._sums: dict[int, int] = {}
        self._at: dict[Hashable, int] = {}
        #: The first of a kind and size; None from the second on, when all are found by their sums.
        self._first: dict[Hashable, int | None] = {}
        self._by_sum: dict[Hashable, list[int]] = {}

    def number(self, data: Array, kind: Hashable = None) -> int:
        """Return the number of an array among those of one kind; equal bytes have one number."""
        place = (kind, data.nbytes, data.__array_interface__["data"][0])
        is_dense = data.flags.c_contiguous
        if is_dense and place in self._at:
            return self._at[place]
        found = self._known(data, kind)
        if found == len(self.arrays):
            self.arrays.append(data)
            if is_dense:  # It stays alive, and so nothing else comes to lie there.
                self._at[place] = found
        return found

    def crc32(self, number: int) -> int:
        """Return the CRC-32 of an array by number, computed once."""
        known = self._sums.get(number)
        if known is None:
            known = self._sums[number] = zlib.crc32(dense_bytes(self.arrays[number]).data)
        return known

    def _known(self, data: Array, kind: Hashable) -> int:
        new, size = len(self.arrays), (kind, data.nbytes)
        if size not in self._first:
            self._first[size] = new
            return new
        first = self._first[size]
        if first is not None:
            self._by_sum[size, self.crc32(first)] = [first]
            self._first[size] = None
        total = zlib.crc32(dense_bytes(data).data)
        alike = self._by_sum.setdefault((size, total), [])
        for number in alike:
            if same_bytes(self.arrays[number], data):
                return number
        alike.append(new)
        self._sums[new] = total
        return new


def same_bytes(one: Array, other: Array) -> bool:
    """Return whether two arrays have equal bytes, row-major; compare in pieces."""
    left, right = dense_bytes(one), dense_bytes(other)
    return left.nbytes == right.nbytes and all(
        np.array_equal(left[at : at + PIECE_NBYTES], right[at : at + PIECE_NBYTES])
        for at in range(0, left.nbytes, PIECE_NBYTES)
    )


def dense_bytes(data: Array) -> Array:
    """Return an array's elements, row-major, as bytes; a view if it is dense."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)

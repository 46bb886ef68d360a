"""Constants whose integers are symbolic sizes: shapes that operators are given as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from stitch.program.contents import Array
from stitch.program.symbolic_sizes import at_sizes, is_symbolic

_SCALAR = np.zeros((), np.int64)
_SCALAR.flags.writeable = False


class SymbolicData:
    """An int64 array with symbolic elements, in place of a NumPy array; immutable.

    Any attribute of arrays that it lacks, and NumPy's functions, specialise: they read the array
    of the hints.
    """

    __slots__ = ("elements", "shape")

    dtype = _SCALAR.dtype
    flags = _SCALAR.flags

    def __init__(self, elements: Iterable[Any], shape: tuple[int, ...]) -> None:
        self.elements = tuple(elements)
        self.shape = shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def at(self, sizes: Mapping[str, int]) -> Array:
        """Return the array at some sizes."""
        return np.array(at_sizes(self.elements, sizes), np.int64).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array([int(e) for e in self.elements], dtype or np.int64).reshape(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not hasattr(np.ndarray, name):
            raise AttributeError(name)
        return getattr(self.__array__(), name)


def int64_array(elements: Iterable[Any], shape: tuple[int, ...] | None = None) -> Array:
    """Return integers and symbolic sizes as an int64 array; a vector unless a shape is given.

    With symbolic elements it is a `SymbolicData`.
    """
    listed = tuple(elements)
    shape = (len(listed),) if shape is None else shape
    if any(map(is_symbolic, listed)):
        return cast(Array, SymbolicData(listed, shape))
    return np.array(listed, np.int64).reshape(shape)


def has_symbols(data: object) -> bool:
    """Return whether an array is a `SymbolicData`."""
    return isinstance(data, SymbolicData)


def integers_of(data: Array) -> tuple[int, ...]:
    """Return the integers of an array in row-major order, symbolic ones as they are."""
    if isinstance(data, SymbolicData):
        return data.elements
    return tuple([int(value) for value in np.ravel(data)])


def same_integers(one: Array, other: Array) -> bool:
    """Return whether two int64 arrays, of which one is symbolic, are equal; may record guards."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pairs = list(zip(integers_of(one), integers_of(other), strict=True))
    # Numbers first: they decide without a guard.
    pairs.sort(key=lambda pair: is_symbolic(pair[0]) or is_symbolic(pair[1]))
    return all(a == b for a, b in pairs)

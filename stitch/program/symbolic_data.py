"""Data that depend on symbolic sizes: integers that are expressions of them, and arrays that are
computed, and specialise the sizes, when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from stitch.program.contents import Array
from stitch.program.symbolic_sizes import is_symbolic, same_shape, size_text

_SCALAR = np.zeros((), np.int64)
_SCALAR.flags.writeable = False


class _Unread:
    """Shape and type of an array whose elements specialise when they are read: by NumPy's
    functions, or by any attribute of arrays that this class lacks."""

    __slots__ = ("dtype", "shape")

    flags = _SCALAR.flags

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def _read(self) -> Array:
        raise AssertionError("subclasses return the array")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self._read(), dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not hasattr(np.ndarray, name):
            raise AttributeError(name)
        return getattr(self.__array__(), name)


class SymbolicData(_Unread):
    """An int64 or int32 array with symbolic elements, in place of a NumPy array; immutable."""

    __slots__ = ("elements",)

    def __init__(
        self, elements: Iterable[Any], shape: tuple[int, ...],
        dtype: np.dtype[Any] = _SCALAR.dtype,
    ) -> None:  # fmt: skip
        super().__init__(shape, dtype)
        self.elements = tuple(elements)

    def _read(self) -> Array:
        return np.array([int(e) for e in self.elements], self.dtype).reshape(self.shape)


class DeferredData(_Unread):
    """An array that is computed from symbolic sizes, and specialises them, when it is read.

    Its shape may be symbolic, too. `compute` returns the array, and is called once.
    """

    __slots__ = ("_array", "_compute")

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], compute: Callable[[], Array]
    ) -> None:
        super().__init__(shape, dtype)
        self._compute = compute
        self._array: Array | None = None

    def _read(self) -> Array:
        if self._array is None:
            self._array = self._compute()
        return self._array


def int64_array(
    elements: Iterable[Any], shape: tuple[int, ...] | None = None,
    dtype: np.dtype[Any] = _SCALAR.dtype,
) -> Array:  # fmt: skip
    """Return integers and symbolic sizes as an int64 array; a vector unless a shape is given.

    With symbolic elements it is a `SymbolicData`. `dtype` may be int32, if the elements fit it.
    """
    listed = tuple(elements)
    shape = (len(listed),) if shape is None else shape
    if any(map(is_symbolic, listed)):
        return cast(Array, SymbolicData(listed, shape, dtype))
    return np.array(listed, dtype).reshape(shape)


def has_symbols(data: object) -> bool:
    """Return whether an array is a `SymbolicData`."""
    return isinstance(data, SymbolicData)


def elements_text(data: Array) -> str:
    """Return the text of the integers of a constant, with expressions for symbolic sizes."""
    return f"[{', '.join(map(size_text, integers_of(data)))}]"


def is_deferred(data: object) -> bool:
    """Return whether an array is a `DeferredData`."""
    return isinstance(data, DeferredData)


def integers_of(data: Array) -> tuple[int, ...]:
    """Return the integers of an array in row-major order, symbolic ones as they are."""
    if isinstance(data, SymbolicData):
        return data.elements
    return tuple([int(value) for value in np.ravel(data)])


def same_integers(one: Array, other: Array) -> bool:
    """Return whether two integer arrays, of which one is symbolic, are equal at every size."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same_shape(integers_of(one), integers_of(other))

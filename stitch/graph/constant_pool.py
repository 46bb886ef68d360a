"""Constants of a graph under construction, deduplicated and immutable.

Small equal arrays share one value by content, large ones by identity. Few integers do not: which
of them are equal may depend on named sizes, and a graph is to be alike at all of them. The passes
merge those that are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from stitch.errors import CompileError, LayoutError
from stitch.program import (
    Array,
    Constant,
    DataType,
    can_change,
    has_symbols,
    int64_array,
    is_symbolic,
    same_bytes,
)

#: Arrays up to this many bytes are compared by content.
SMALL_NBYTES = 4096

_Key = tuple[str, tuple[int, ...], bytes]


class ConstantPool:
    """Constants by value index, deduplicated."""

    __slots__ = ("_by_content", "_by_identity", "_constants")

    def __init__(self) -> None:
        self._constants: list[Constant] = []
        self._by_content: dict[_Key, int] = {}
        self._by_identity: dict[int, tuple[Array, Array, int]] = {}

    def find(self, data: Array) -> int | None:
        """Return the value that holds this data, None for few integers; large by identity."""
        if data.nbytes <= SMALL_NBYTES:
            return None if data.dtype.kind == "i" else self._by_content.get(_key(data))
        held = self._by_identity.get(id(data))
        if held is not None and held[0] is data and _same_bits(held[1], data):
            return held[2]
        return None

    def add(self, index: int, data: Array) -> Array:
        """Store the data of value `index` and return the read-only array; copies if writable."""
        if has_symbols(data):
            self._constants.append(Constant(index, data))
            return data
        kept = np.array(data, order="C") if can_change(data) else np.ascontiguousarray(data)
        kept = kept.reshape(data.shape)
        constant = Constant(index, kept)
        self._constants.append(constant)
        if data.nbytes <= SMALL_NBYTES:
            self._by_content.setdefault(_key(data), index)
        else:
            self._by_identity[id(data)] = (data, constant.data, index)
        return constant.data

    def constants(self) -> tuple[Constant, ...]:
        """Return all constants in the order they were added."""
        return tuple(self._constants)


def array_of(given: object, where: str, data_type: DataType | None = None) -> Array:
    """Convert a NumPy array, a number, a list of numbers or an object with `__array__`.

    Args:
        given: What to convert. A list of ints becomes an int64 vector.
        where: Location for messages.
        data_type: Type of Python and NumPy numbers; default float32, int64 or bool.

    Raises:
        CompileError: `given` is none of these, or does not fit `data_type`.
    """
    if isinstance(given, np.ndarray):
        return _storable(given, where)
    if has_symbols(given):
        return cast(Array, given)
    if is_symbolic(given):
        given = int(cast(Any, given))  # As data of a tensor it is a number.
    if isinstance(given, list | tuple) and any(map(is_symbolic, given)):
        return int64_array(given)
    if not isinstance(given, type | np.generic) and hasattr(type(given), "__array__"):
        return _storable(_handed_over(given, where), where)
    if isinstance(given, bool | int | float | np.generic):
        return _scalar(given, where, data_type)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return _listed(given, where, data_type)
    raise CompileError(
        f"expected a tensor, an array or a number, got {type(given).__name__}",
        where=where,
        got=repr(given)[:80],
        remedy="pass a symbolic tensor, a NumPy array or a number",
    )


def _handed_over(given: object, where: str) -> Array:
    """Call `__array__`; tensors that have no data yet raise here."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CompileError(
            f"{type(given).__name__} cannot be converted to an array: {str(error)[:200]}",
            where=where,
            remedy="pass a symbolic tensor, a NumPy array or a number",
        ) from error  # fmt: skip


def _storable(array: Array, where: str) -> Array:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        DataType.from_dtype(native.dtype)
    except LayoutError as error:
        raise CompileError(
            error.what, where=where, expected=error.expected, remedy=error.remedy
        ) from error
    return native


def _scalar(given: bool | int | float | np.generic, where: str, wanted: DataType | None) -> Array:
    number = given.item() if isinstance(given, np.generic) else given
    if not isinstance(number, bool | int | float):
        raise CompileError(f"expected a real number, got {number!r}", where=where)
    if wanted is None:
        if isinstance(given, np.generic):
            return _storable(np.asarray(given), where)
        wanted = _natural(number)
    if not _fits(number, wanted):
        raise _too_large(number, where, wanted)
    # NumPy warns when it converts NaN and infinities to narrow types; these conversions are valid.
    with np.errstate(all="ignore"):
        return np.asarray(number, wanted.dtype)


def _too_large(number: bool | int | float, where: str, wanted: DataType) -> CompileError:
    return CompileError(
        f"the number {number!r} does not fit a tensor of {wanted.value}",
        where=where,
        expected=f"a number in the range of {wanted.value}",
        remedy="cast the tensor first",
    )


def _natural(number: bool | int | float) -> DataType:
    if isinstance(number, bool):
        return DataType.BOOL
    return DataType.INT64 if isinstance(number, int) else DataType.FLOAT32


def _fits(number: bool | int | float, wanted: DataType) -> bool:
    if wanted is DataType.BOOL:
        return isinstance(number, bool)
    if wanted.is_floating:
        with np.errstate(all="ignore"):
            try:
                stored = float(np.asarray(float(number)).astype(wanted.dtype))
            except OverflowError:
                return False
        return math.isfinite(stored) or not math.isfinite(number)
    if isinstance(number, float):
        return False
    least, most = wanted.limits
    return least <= number <= most


def _listed(given: Sequence[object], where: str, wanted: DataType | None) -> Array:
    try:
        array: Array = np.asarray(given)
    except ValueError as error:
        raise CompileError(
            "the rows of a nested list must have equal lengths", where=where, got=repr(given)[:80]
        ) from error
    if array.size == 0 or array.dtype.kind == "i":
        return array.astype(np.int64)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind != "f":
        raise CompileError(
            "expected a list of numbers (integers of at most 64 bits)", where=where,
            got=repr(given)[:80],
        )  # fmt: skip
    floating = wanted if wanted is not None and wanted.is_floating else DataType.FLOAT32
    with np.errstate(all="ignore"):
        narrowed = array.astype(floating.dtype)
    lost = np.isfinite(array) & ~np.isfinite(narrowed.astype(np.float64))
    if lost.any():
        raise _too_large(float(array[lost][0]), where, floating)
    return narrowed


def _key(data: Array) -> _Key:
    return (data.dtype.str + data.dtype.name, data.shape, data.tobytes())


def _same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and same_bytes(a, b)

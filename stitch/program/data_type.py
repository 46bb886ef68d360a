"""Data types: the storage and compute types of elements."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stitch.errors import LayoutError

#: Elements that share one exponent byte in the block formats (tt-metal data formats).
BLOCK_ELEMENTS = 16


class DataType(enum.Enum):
    """The storage type of a tensor's elements; the enum value is its name in files.

    >>> DataType.BFLOAT16.short, DataType.BFLOAT16.compute_dtype.name
    ('bf16', 'float32')
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    BFP8 = "bfp8"
    BFP4 = "bfp4"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0 = "float8_e8m0fnu"
    FLOAT4_E2M1 = "float4_e2m1fn"
    INT4 = "int4"
    UINT4 = "uint4"
    INT2 = "int2"
    UINT2 = "uint2"

    __hash__ = object.__hash__

    @property
    def short(self) -> str:
        """Return the name in shapes such as `2x2xf32` (as in IREE)."""
        return _FACTS[self].short

    @property
    def is_floating(self) -> bool:
        """Return whether it is a floating type, block formats included."""
        return _FACTS[self].floating

    @property
    def is_block(self) -> bool:
        """Return whether sixteen elements share an exponent (bfp8, bfp4; tiled layouts only)."""
        return _FACTS[self].mantissa_bits != 0

    @property
    def in_arrays(self) -> DataType:
        """Return the type of array elements: float32 for block formats."""
        return DataType.FLOAT32 if self.is_block else self

    @property
    def is_narrow(self) -> bool:
        """Return whether it is float8, float4, int4 or int2, one element per byte.

        Operators move and convert such elements; none computes in them.
        """
        return self in _NARROW

    @property
    def bits(self) -> int:
        """Return the significant bits of an element: 4 for int4, although it takes a byte."""
        return _FACTS[self].bits or 8 * self.itemsize

    @property
    def limits(self) -> tuple[int, int]:
        """Return the smallest and largest number of an integer type; 0 and 1 for bool."""
        if self is DataType.BOOL:
            return (0, 1)
        if self.value.startswith("u"):
            return (0, 2**self.bits - 1)
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)

    def holds(self, stored: np.ndarray[Any, np.dtype[Any]]) -> bool:
        """Return whether bytes are valid elements: of bool 0 or 1, of int4 below 16.

        Kernels disagree about other bytes.
        """
        most = 2 if self is DataType.BOOL else 1 << min(8, self.bits)
        raw = stored.reshape(-1).view(np.uint8)
        return most == 256 or not raw.size or int(raw.max()) < most

    @property
    def mantissa_bits(self) -> int:
        """Return the bits of an element in a block format, with sign; 0 for other types."""
        return _FACTS[self].mantissa_bits

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the NumPy type of a stored element; raise `LayoutError` for block formats."""
        dtype = _FACTS[self].dtype
        if dtype is None:
            raise LayoutError(
                f"{self.value} has no element type of its own: its elements share exponents",
                remedy="convert to float32 with to_layout first",
            )
        return dtype

    @property
    def itemsize(self) -> int:
        """Return the bytes of a stored element; raise `LayoutError` for block formats."""
        return self.dtype.itemsize

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """Return the NumPy type of computations: float32 for float16 and bfloat16."""
        return _FACTS[self].compute

    def nbytes(self, elements: int) -> int:
        """Return the bytes of `elements` elements, a multiple of 16 for block formats."""
        bits = self.mantissa_bits
        if bits == 0:
            return elements * self.itemsize
        return elements * bits // 8 + elements // BLOCK_ELEMENTS

    @staticmethod
    def from_dtype(dtype: Any) -> DataType:
        """Return the data type of a NumPy dtype; raise `LayoutError` for unsupported ones."""
        data_type = _BY_DTYPE.get(np.dtype(dtype))
        if data_type is None:
            raise LayoutError(
                f"arrays of type {np.dtype(dtype)} are not supported",
                expected=", ".join(t.value for t in DataType if not t.is_block),
                remedy="convert the array with .astype(...) first",
            )
        return data_type

    @staticmethod
    def parse(name: str) -> DataType:
        """Return the data type of a long or short name; raise `LayoutError`."""
        data_type = _BY_NAME.get(name)
        if data_type is None:
            raise LayoutError(
                f"unknown data type {name!r}", expected=", ".join(t.value for t in DataType)
            )
        return data_type


@dataclass(frozen=True, slots=True)
class _Facts:
    short: str
    floating: bool
    dtype: np.dtype[Any] | None
    compute: np.dtype[Any]
    mantissa_bits: int = 0
    bits: int = 0  # where an element does not fill its bytes


_F32 = np.dtype(np.float32)
_BF16 = np.dtype(ml_dtypes.bfloat16)


def _plain(short: str, name: str) -> _Facts:
    dtype = np.dtype(name)
    return _Facts(short, dtype.kind == "f", dtype, dtype)


def _narrow(short: str, name: str, bits: int = 8) -> _Facts:
    """Return the facts of a type of ml_dtypes, one element per byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    return _Facts(short, name.startswith("float"), dtype, dtype, bits=bits)


_FACTS: dict[DataType, _Facts] = {
    DataType.FLOAT32: _plain("f32", "float32"),
    DataType.FLOAT16: _Facts("f16", True, np.dtype(np.float16), _F32),
    DataType.BFLOAT16: _Facts("bf16", True, _BF16, _F32),
    DataType.FLOAT64: _plain("f64", "float64"),
    DataType.INT8: _plain("i8", "int8"),
    DataType.INT16: _plain("i16", "int16"),
    DataType.INT32: _plain("i32", "int32"),
    DataType.INT64: _plain("i64", "int64"),
    DataType.UINT8: _plain("ui8", "uint8"),
    DataType.UINT16: _plain("ui16", "uint16"),
    DataType.UINT32: _plain("ui32", "uint32"),
    DataType.UINT64: _plain("ui64", "uint64"),
    DataType.BOOL: _plain("i1", "bool"),
    DataType.BFP8: _Facts("bfp8", True, None, _F32, 8),
    DataType.BFP4: _Facts("bfp4", True, None, _F32, 4),
    DataType.FLOAT8_E4M3FN: _narrow("f8E4M3FN", "float8_e4m3fn"),
    DataType.FLOAT8_E4M3FNUZ: _narrow("f8E4M3FNUZ", "float8_e4m3fnuz"),
    DataType.FLOAT8_E5M2: _narrow("f8E5M2", "float8_e5m2"),
    DataType.FLOAT8_E5M2FNUZ: _narrow("f8E5M2FNUZ", "float8_e5m2fnuz"),
    DataType.FLOAT8_E8M0: _narrow("f8E8M0FNU", "float8_e8m0fnu"),
    DataType.FLOAT4_E2M1: _narrow("f4E2M1FN", "float4_e2m1fn", 4),
    DataType.INT4: _narrow("i4", "int4", 4),
    DataType.UINT4: _narrow("ui4", "uint4", 4),
    DataType.INT2: _narrow("i2", "int2", 2),
    DataType.UINT2: _narrow("ui2", "uint2", 2),
}
_NARROW = frozenset(t for t, facts in _FACTS.items() if facts.bits)
_BY_DTYPE = {facts.dtype: t for t, facts in _FACTS.items() if facts.dtype is not None}
_BY_NAME = {t.value: t for t in DataType} | {facts.short: t for t, facts in _FACTS.items()}

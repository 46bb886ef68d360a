"""Sets of data types that operators accept, and ONNX's codes (`TensorProto.DataType`).

Block formats are in no set: they are storage formats, kernels never compute in them.
"""

from __future__ import annotations

from stitch.errors import CompileError
from stitch.program import DataType

FLOATS = frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT64})
SIGNED = frozenset({DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64})
UNSIGNED = frozenset({DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64})
INTEGERS = SIGNED | UNSIGNED
BYTES = frozenset({DataType.INT8, DataType.UINT8})
NUMERIC = FLOATS | INTEGERS
SIGNED_NUMERIC = FLOATS | SIGNED
BOOLEAN = frozenset({DataType.BOOL})
EVERY = NUMERIC | BOOLEAN
#: float8 types with a sign and a fraction: all but FLOAT8_E8M0.
FLOATS8 = frozenset(
    {DataType.FLOAT8_E4M3FN, DataType.FLOAT8_E4M3FNUZ, DataType.FLOAT8_E5M2,
     DataType.FLOAT8_E5M2FNUZ}
)  # fmt: skip
#: Types of 8 bits and fewer that kernels move and convert, but never compute in.
NARROW = frozenset(t for t in DataType if not t.is_block and t.is_narrow)
#: Types that operators accept which only move elements.
MOVED = EVERY | NARROW
INDICES = frozenset({DataType.INT32, DataType.INT64})
INT64 = frozenset({DataType.INT64})
#: Types of ONNX's matrix products.
PRODUCTS = FLOATS | {DataType.INT32, DataType.INT64, DataType.UINT32, DataType.UINT64}

_ONNX_CODES = {
    DataType.FLOAT32: 1, DataType.UINT8: 2, DataType.INT8: 3, DataType.UINT16: 4, DataType.INT16: 5,
    DataType.INT32: 6, DataType.INT64: 7, DataType.BOOL: 9, DataType.FLOAT16: 10,
    DataType.FLOAT64: 11, DataType.UINT32: 12, DataType.UINT64: 13, DataType.BFLOAT16: 16,
    DataType.FLOAT8_E4M3FN: 17, DataType.FLOAT8_E4M3FNUZ: 18, DataType.FLOAT8_E5M2: 19,
    DataType.FLOAT8_E5M2FNUZ: 20, DataType.UINT4: 21, DataType.INT4: 22, DataType.FLOAT4_E2M1: 23,
    DataType.FLOAT8_E8M0: 24, DataType.UINT2: 25, DataType.INT2: 26,
}  # fmt: skip
_BY_CODE = {code: data_type for data_type, code in _ONNX_CODES.items()}


def onnx_code(data_type: DataType) -> int:
    """Return ONNX's code of a data type; raise `CompileError` for block formats.

    >>> onnx_code(DataType.BFLOAT16)
    16
    """
    code = _ONNX_CODES.get(data_type)
    if code is None:
        raise CompileError(f"ONNX has no data type for the block format {data_type.value}")
    return code


def data_type_of_code(code: int, where: str = "") -> DataType:
    """Return the data type of an ONNX code; raise `CompileError` for unsupported ones.

    >>> data_type_of_code(7).value
    'int64'
    """
    data_type = _BY_CODE.get(code)
    if data_type is None:
        supported = ", ".join(f"{number} ({t.value})" for number, t in sorted(_BY_CODE.items()))
        raise CompileError(
            f"ONNX data type {code} is not supported",
            where=where,
            expected=supported,
            got=str(code),
        )
    return data_type

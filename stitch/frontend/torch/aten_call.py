"""`Call`: one ATen operator applied, as the lowerings see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.tensor_bytes import array_on
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType, int64_array, is_symbolic


@dataclass(frozen=True, slots=True)
class ComplexTensor:
    """A complex tensor as a real one: the last axis has the real and the imaginary part."""

    pairs: SymbolicTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the complex tensor."""
        return self.pairs.shape[:-1]


Number = bool | int | float
#: Tensor or Scalar of torch's schema.
Value = SymbolicTensor | Number
#: The results of an operator; None for one that is not read.
Several = tuple[SymbolicTensor | None, ...]
#: The result of a lowering: one tensor, or one per result (None for one that is not read).
Lowered = SymbolicTensor | ComplexTensor | Sequence[SymbolicTensor | ComplexTensor | None] | None
Lowering = Callable[..., Lowered]


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """A table row of an operator that torch must not decompose: that would cost speed or accuracy.

    `exported`: torch.export must not decompose it either, not only aot_autograd.
    """

    lowering: Lowering
    exported: bool = True


#: The entry of an overload in a family's table.
Row = Lowering | KeptWhole
_Lowering = TypeVar("_Lowering", bound=Lowering)

_DATA_TYPES: dict[Any, DataType] = {
    getattr(torch, kind.value): kind
    for kind in DataType
    if not (kind.is_block or kind.is_narrow) and hasattr(torch, kind.value)
}
_TORCH_TYPES = {kind: dtype for dtype, kind in _DATA_TYPES.items()}
#: Complex types, and the types of their parts.
PART_TYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def data_type_of(dtype: Any, where: str | None = None) -> DataType:
    """The data type of a torch dtype; raises `CompileError` for unsupported ones."""
    data_type = _DATA_TYPES.get(dtype)
    if data_type is None:
        raise CompileError(
            f"tensors of type {str(dtype).removeprefix('torch.')} are not supported",
            where=where,
            expected=", ".join(kind.value for kind in _TORCH_TYPES),
        )
    return data_type


def computing_type(data_type: DataType) -> DataType:
    """The type in which torch's kernels compute: float32 for float16 and bfloat16."""
    is_narrow = data_type in (DataType.FLOAT16, DataType.BFLOAT16)
    return DataType.FLOAT32 if is_narrow else data_type


def is_complex(value: Any) -> bool:
    """Whether a value is a complex number or a complex tensor of torch."""
    return isinstance(value, complex) or (
        isinstance(value, torch.Tensor) and value.dtype in PART_TYPES
    )


def type_of_tensor(tensor: Any) -> ValueType:
    """The type of a torch tensor, of a complex one that of its pairs; raises `CompileError` for
    unsupported data types."""
    shape = tuple(tensor.shape)
    if is_complex(tensor):
        return ValueType((*shape, 2), data_type_of(PART_TYPES[tensor.dtype]))
    return ValueType(shape, data_type_of(tensor.dtype))


def in_pairs(tensor: Any) -> Any:
    """A complex tensor of torch as pairs of parts, a view if possible; any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if is_complex(tensor) else tensor


def torch_type_of(data_type: DataType) -> Any:
    """The torch dtype of a data type; raises `CompileError` for the block formats."""
    dtype = _TORCH_TYPES.get(data_type)
    if dtype is None:
        raise CompileError(f"torch has no tensors of type {data_type.value}")
    return dtype


def check_dense(tensor: Any, what: str) -> None:
    """Raise `CompileError` for a tensor that is nested, quantized, sparse or without data."""
    kinds = (
        (tensor.is_nested, "nested", "to_padded_tensor(0.0) makes one dense tensor of it"),
        (tensor.is_quantized, "quantized", "dequantize() makes a dense tensor of it"),
        (tensor.layout is not torch.strided, str(tensor.layout), "call to_dense() first"),
        (tensor.is_meta, "on device meta, without data", "give it data first: load the weights, "
         "or torch.empty_like(tensor, device='cpu')"),
    )  # fmt: skip
    for applies, got, remedy in kinds:
        if applies:
            raise CompileError(
                f"{what} has no dense elements", expected="a dense tensor on the CPU", got=got,
                remedy=remedy,
            )  # fmt: skip


def array_of(tensor: Any) -> Array:
    """The elements of a torch tensor as an array, a view if possible; raises `CompileError` for
    tensors without dense elements."""
    check_dense(tensor, "a tensor of the module")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    data_type_of(plain.dtype)
    return array_on(plain)


@dataclass(frozen=True, slots=True)
class Call:
    """The builder that a lowering adds operations to, and the types of the results in torch."""

    builder: ComputationGraphBuilder
    results: tuple[ValueType | None, ...]
    #: Numbers of the results that are read.
    used: frozenset[int] = frozenset((0,))
    #: torch's traced operands: their tensors have strides and offsets, but no data.
    traced: tuple[Any, ...] = ()
    #: Whether the first result is complex; its type is that of its pairs then.
    is_complex: bool = False

    @property
    def type(self) -> ValueType:
        """The type of the first result."""
        first = self.results[0]
        assert first is not None, "every operator with a lowering has a tensor as first result"
        return first

    @property
    def data_type(self) -> DataType:
        """The data type of the first result."""
        return self.type.data_type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.type.shape

    def cast(self, value: Value, data_type: DataType | None = None) -> SymbolicTensor:
        """Cast an operand to a data type, by default that of the first result."""
        wanted = self.data_type if data_type is None else data_type
        if isinstance(value, SymbolicTensor):
            return self.builder.cast(value, wanted)
        if is_symbolic(value) and wanted in (DataType.INT32, DataType.INT64):
            return self.builder.cast(self.builder.constant(int64_array([value], ())), wanted)
        # A number outside the type's range becomes infinite, without a warning, as in torch.
        with np.errstate(over="ignore"):
            number = np.asarray(value).astype(wanted.dtype)
        return self.builder.constant(number)

    def promoted(self, a: Value, b: Value) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Cast two operands to the type to which torch promotes them."""
        wanted = data_type_of(torch.result_type(_stand_in(a), _stand_in(b)))
        return self.cast(a, wanted), self.cast(b, wanted)

    def cast_results(self, results: Sequence[SymbolicTensor | None]) -> Several:
        """Cast results to the data types that torch's graph states."""
        return tuple(
            None if value is None or result is None else self.cast(value, result.data_type)
            for value, result in zip(results, self.results, strict=True)
        )

    def filled(self, number: Number) -> SymbolicTensor:
        """A tensor of the first result's type and shape, filled with a number."""
        return self.builder.broadcast(self.cast(number), self.shape)

    def optional(
        self, value: SymbolicTensor | None, default: Number, shape: Sequence[int]
    ) -> SymbolicTensor:
        """Cast an operand; a number in this shape if it is absent."""
        if value is not None:
            return self.cast(value)
        return self.builder.broadcast(self.cast(default), tuple(shape))


def rounded_once(lowering: _Lowering) -> _Lowering:
    """Make a lowering of several steps round as torch's one kernel does: with narrow floats among
    operands or results it computes in float32 and rounds each result once."""

    @wraps(lowering)
    def lowered(call: Call, *operands: Any, **named: Any) -> Lowered:
        kinds = _floating((*operands, *named.values(), *call.results))
        if kinds <= {_wide(kinds)}:
            return lowering(call, *operands, **named)
        return _widened(lowering, call, operands, named, _wide(kinds))

    return cast(_Lowering, lowered)


def in_one_type(lowering: _Lowering) -> _Lowering:
    """Make a lowering that needs operands of one type cast operands of several types."""

    @wraps(lowering)
    def lowered(call: Call, *operands: Any, **named: Any) -> Lowered:
        kinds = _floating((*operands, *named.values()))
        if len(kinds) <= 1:
            return lowering(call, *operands, **named)
        return _widened(lowering, call, operands, named, _wide(kinds))

    return cast(_Lowering, lowered)


def built(method: Callable[..., Lowered], *, cast: bool = False) -> Lowering:
    """A lowering to a builder method with the operands of torch's schema; `cast`: each of them
    cast to the type of the result."""

    def lowered(call: Call, *operands: Any, **named: Any) -> Lowered:
        return method(call.builder, *(map(call.cast, operands) if cast else operands), **named)

    return lowered


def _floating(values: Sequence[Any]) -> set[DataType]:
    kinds = {v.data_type for v in values if isinstance(v, SymbolicTensor | ValueType)}
    return {kind for kind in kinds if kind.is_floating}


def _wide(kinds: Set[DataType]) -> DataType:
    return DataType.FLOAT64 if DataType.FLOAT64 in kinds else DataType.FLOAT32


def _widened(
    lowering: Lowering, call: Call, operands: Sequence[Any], named: Mapping[str, Any],
    wide: DataType,
) -> Lowered:  # fmt: skip
    """Lower with floating operands cast to a wide type, and cast the results back."""

    def widened(value: Any) -> Any:
        return call.cast(value, wide) if _floating((value,)) else value

    types = tuple(ValueType(r.shape, wide) if r and _floating((r,)) else r for r in call.results)
    results = lowering(
        Call(call.builder, types, call.used, call.traced),
        *map(widened, operands),
        **{name: widened(value) for name, value in named.items()},
    )
    if isinstance(results, SymbolicTensor):
        return call.cast(results)
    several: Any = results  # There are no narrow complex types.
    return None if several is None else call.cast_results(several)


def _stand_in(value: Value) -> Any:
    """A meta tensor of the operand's type and rank, for torch's type promotion."""
    if not isinstance(value, SymbolicTensor):
        return 0 if is_symbolic(value) else value
    shape = (1,) * len(value.shape)
    return torch.empty(shape, dtype=torch_type_of(value.data_type), device="meta")

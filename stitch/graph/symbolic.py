"""`SymbolicTensor`: stands for a value while a graph is built; arithmetic on it adds operations.

Comes in: a value of a builder. Goes out: more of them, through Python's operators, the methods
that arrays have, and NumPy's functions. Its data does not exist: asking for it is an error that
names the line. Must not know: how operators are named (that is the builder's say).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from stitch.errors import CompileError
from stitch.graph.source_location import mistake, user_location
from stitch.graph.tensor_operations import Axes, Scalar, TensorOperations
from stitch.program import Array, DataType, ValueType

#: `type` is a property of tensors, so Python's own needs another name inside the class.
Class = type
IndexPart = int | slice | EllipsisType | None | Sequence[int] | Array


Operations: TypeAlias = "TensorOperations[SymbolicTensor]"
_Operator: TypeAlias = "Callable[[SymbolicTensor, Operand], SymbolicTensor]"


def _both_ways(
    named: Callable[[Operations], Callable[[Any, Any], SymbolicTensor]],
) -> tuple[_Operator, _Operator]:
    """Python's operator for one of the builder's operations, and the one for the other side."""

    def operator(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return named(self.builder)(self, other)

    def reflected(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return named(self.builder)(other, self)

    return operator, reflected


class NoDataError(CompileError):
    """The data of a tensor was asked for, which there is none of while a graph is built."""


class SymbolicTensor:
    """A value of a graph under construction; immutable, made by a builder only.

    Python scalars take this tensor's type. `==` gives a tensor of booleans, as in NumPy.
    """

    __slots__ = ("builder", "index")
    __hash__ = object.__hash__

    def __init__(self, builder: Operations, index: int) -> None:
        self.builder = builder
        self.index = index

    @property
    def type(self) -> ValueType:
        """Shape and logical data type."""
        return self.builder.type_of(self.index)

    @property
    def name(self) -> str:
        """The value's name in the graph."""
        return self.builder.name_of(self.index)

    @property
    def written(self) -> Array | None:
        """The data, where it is there and any graph may take it: of a tensor of no graph."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def data_type(self) -> DataType:
        return self.type.data_type

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of one element."""
        return self.data_type.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def T(self) -> SymbolicTensor:
        """All axes in reverse order."""
        return self.builder.transpose(self)

    def __repr__(self) -> str:
        return f"<symbolic {self.name}: {self.type.text()}>"

    def __len__(self) -> int:
        if not self.shape:
            raise mistake("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[SymbolicTensor]:
        return (self[i] for i in range(len(self)))

    # Arithmetic --------------------------------------------------------------------------------

    __add__, __radd__ = _both_ways(lambda operations: operations.add)
    __sub__, __rsub__ = _both_ways(lambda operations: operations.sub)
    __mul__, __rmul__ = _both_ways(lambda operations: operations.mul)
    __truediv__, __rtruediv__ = _both_ways(lambda operations: operations.div)
    __floordiv__, __rfloordiv__ = _both_ways(lambda operations: operations.floordiv)
    __mod__, __rmod__ = _both_ways(lambda operations: operations.mod)
    __pow__, __rpow__ = _both_ways(lambda operations: operations.pow)

    def __matmul__(self, other: SymbolicTensor | Array) -> SymbolicTensor:
        return self.builder.matmul(self, other)

    def __rmatmul__(self, other: Any) -> SymbolicTensor:
        return self.builder.matmul(other, self)

    def __neg__(self) -> SymbolicTensor:
        return self.builder.neg(self)

    def __pos__(self) -> SymbolicTensor:
        return self

    def __abs__(self) -> SymbolicTensor:
        return self.builder.abs(self)

    # Comparison and logic ----------------------------------------------------------------------

    def __eq__(self, other: object) -> SymbolicTensor:  # type: ignore[override]  # as in NumPy
        return self.builder.equal(self, other)  # type: ignore[arg-type]  # checked there

    def __ne__(self, other: object) -> SymbolicTensor:  # type: ignore[override]  # as in NumPy
        return self.builder.not_equal(self, other)  # type: ignore[arg-type]  # checked there

    __lt__ = _both_ways(lambda operations: operations.less)[0]
    __le__ = _both_ways(lambda operations: operations.less_or_equal)[0]
    __gt__ = _both_ways(lambda operations: operations.greater)[0]
    __ge__ = _both_ways(lambda operations: operations.greater_or_equal)[0]
    __and__ = _both_ways(lambda operations: operations.logical_and)[0]
    __or__ = _both_ways(lambda operations: operations.logical_or)[0]
    __xor__ = _both_ways(lambda operations: operations.logical_xor)[0]

    def __invert__(self) -> SymbolicTensor:
        return self.builder.logical_not(self)

    # Shape -------------------------------------------------------------------------------------

    def __getitem__(self, key: IndexPart | tuple[IndexPart, ...]) -> SymbolicTensor:
        return self.builder.index(self, key)

    def reshape(self, *shape: int | Sequence[int]) -> SymbolicTensor:
        """The same elements under another shape; one dimension may be -1."""
        return self.builder.reshape(self, _joined(shape))

    def transpose(self, *axes: int | Sequence[int]) -> SymbolicTensor:
        """The axes in the given order, or reversed."""
        return self.builder.transpose(self, _joined(axes) or None)

    def swapaxes(self, first: int, second: int) -> SymbolicTensor:
        """Two axes exchanged."""
        return self.builder.swapaxes(self, first, second)

    def squeeze(self, axis: Axes = None) -> SymbolicTensor:
        """Without the given axes of length 1, or without any."""
        return self.builder.squeeze(self, axis)

    def ravel(self) -> SymbolicTensor:
        """As a vector."""
        return self.builder.reshape(self, (-1,))

    flatten = ravel

    def cast(self, data_type: DataType | str | np.dtype[Any] | Class) -> SymbolicTensor:
        """With another data type."""
        return self.builder.cast(self, data_type)

    astype = cast

    # Reductions --------------------------------------------------------------------------------

    def sum(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Sums over axes, or over all."""
        return self.builder.reduce_sum(self, axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Means over axes, or over all."""
        return self.builder.reduce_mean(self, axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Maxima over axes, or over all."""
        return self.builder.reduce_max(self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Minima over axes, or over all."""
        return self.builder.reduce_min(self, axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Products over axes, or over all."""
        return self.builder.reduce_prod(self, axis, keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Variances (divided by the count) over axes, or over all."""
        return self.builder.variance(self, axis, keepdims)

    def argmax(self, axis: int | None = None) -> SymbolicTensor:
        """The place of the maximum along an axis, or in the flattened tensor; int64."""
        return self.builder.argmax(self, axis)

    def argmin(self, axis: int | None = None) -> SymbolicTensor:
        """The place of the minimum along an axis, or in the flattened tensor; int64."""
        return self.builder.argmin(self, axis)

    # NumPy -------------------------------------------------------------------------------------

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, **arguments: object
    ) -> object:
        return self.builder.numpy_ufunc(ufunc, method, inputs, arguments)

    def __array_function__(
        self,
        function: Callable[..., object],
        types: Sequence[Class],
        inputs: tuple[object, ...],
        arguments: dict[str, object],
    ) -> object:
        return self.builder.numpy_function(function, inputs, arguments)

    # Data that does not exist ------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise self._no_data(
            "whether it is true",
            "choose with where(condition, a, b), or decide on shapes, which are known",
        )

    def __int__(self) -> NoReturn:
        raise self._no_data("its number", "keep it a tensor, or pass the number as an argument")

    __float__ = __int__
    __complex__ = __int__
    __index__ = __int__

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self._no_data("its elements", "use the tensor's own methods, or NumPy's functions")

    def item(self) -> NoReturn:
        """Raises `CompileError`: the data does not exist yet."""
        raise self._no_data("its number", "return the tensor and read it after the program ran")

    tolist = numpy = item

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise mistake(
            "a symbolic tensor cannot be written into",
            remedy="make a new tensor, with where(mask, new, old) or concat",
        )

    def _no_data(self, wanted: str, remedy: str) -> CompileError:
        return NoDataError(
            f"a symbolic tensor has no data while the graph is built, so {wanted} is not known",
            where=f"{user_location()}, {self!r}",
            remedy=remedy,
        )


#: What may stand beside a symbolic tensor in an expression.
Operand = SymbolicTensor | Array | Scalar


def _joined(parts: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(parts) == 1 and not isinstance(parts[0], int | np.integer):
        return tuple(int(p) for p in parts[0])
    flat: list[int] = []
    for part in parts:
        if not isinstance(part, int | np.integer):
            raise mistake("a shape is one list of integers", got=repr(parts))
        flat.append(int(part))
    return tuple(flat)

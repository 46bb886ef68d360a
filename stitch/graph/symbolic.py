"""`SymbolicTensor`: a placeholder for a value while a graph is built.

Python's operators, methods of arrays and NumPy's functions add operations to the graph, by NumPy's
type rules. A symbolic tensor has no data: reading it raises an error at the user's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np

from stitch.errors import CompileError, LayoutError
from stitch.graph.source_location import mistake, user_location
from stitch.program import Array, DataType, SymbolicSize, ValueType, size_of

#: `type` is a property of tensors; this is Python's own.
Class = type
Scalar = bool | int | float | np.generic
Axes = int | Sequence[int] | None
IndexPart = int | slice | EllipsisType | None | Sequence[int] | Array
_Operator: TypeAlias = "Callable[[SymbolicTensor, Operand], SymbolicTensor]"


class TensorBuilder(Protocol):
    """The builder methods that operators and methods of symbolic tensors call."""

    @property
    def name(self) -> str: ...
    def type_of(self, index: int, /) -> ValueType: ...
    def name_of(self, index: int, /) -> str: ...
    def cast(self, x: SymbolicTensor, data_type: Any, /) -> SymbolicTensor: ...
    def index(self, x: SymbolicTensor, key: object, /) -> SymbolicTensor: ...
    def transpose(self, x: SymbolicTensor, /) -> SymbolicTensor: ...
    def numpy_ufunc(
        self, ufunc: np.ufunc, method: str, inputs: tuple[object, ...],
        arguments: dict[str, object], /,
    ) -> SymbolicTensor: ...  # fmt: skip
    def numpy_function(
        self, function: Callable[..., object], inputs: tuple[object, ...],
        arguments: dict[str, object], /,
    ) -> SymbolicTensor: ...  # fmt: skip


def _operator(ufunc: np.ufunc) -> tuple[_Operator, _Operator]:
    """Return Python's operator for a ufunc, and the reflected one."""

    def operator(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (self, other), {})

    def reflected(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (other, self), {})

    return operator, reflected


def _in_place(ufunc: np.ufunc) -> _Operator:
    """Return Python's in-place operator for a ufunc.

    Like NumPy's array, the tensor keeps its type and shape; later reads of tensors that would share
    its memory in NumPy are refused.
    """
    apply = _operator(ufunc)[0]

    def operator(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        found = apply(self, other)
        if type(self) is not SymbolicTensor or not self.shape:
            return found  # NumPy's scalars are immutable.
        kinds = found.dtype, self.dtype
        is_kept = found.data_type.is_floating and self.data_type.is_floating
        if not (is_kept or np.can_cast(*kinds, "same_kind")) or found.shape != self.shape:
            raise mistake(
                f"the result of numpy.{ufunc.__name__} does not fit the tensor that it overwrites",
                expected=self.type.text(), got=found.type.text(),
                remedy="make a new tensor, as in x = x + y",
            )  # fmt: skip
        written: SymbolicTensor | None = self
        while written is not None:
            written.overwritten = user_location()
            written = written.base
        return self.builder.cast(found, self.data_type)

    return operator


def _unary(ufunc: np.ufunc) -> Callable[[SymbolicTensor], SymbolicTensor]:

    def operator(self: SymbolicTensor) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (self,), {})

    return operator


def _method(function: Callable[..., Any]) -> Callable[..., SymbolicTensor]:
    """Return the method that calls a NumPy function with the tensor as first argument."""

    def method(self: SymbolicTensor, *arguments: object, **named: object) -> SymbolicTensor:
        return self.builder.numpy_function(function, (self, *arguments), named)

    method.__name__ = method.__qualname__ = function.__name__
    method.__doc__ = f"Like `numpy.{function.__name__}`."
    return method


class NoDataError(CompileError):
    """The data of a symbolic tensor was requested while the graph is built."""


class NoMethodError(CompileError, AttributeError):
    """An attribute of NumPy arrays that symbolic tensors do not have."""


class SymbolicTensor:
    """A value of a graph under construction; immutable, created by a builder.

    Python scalars take this tensor's type. As in NumPy, `==` returns a tensor of booleans.
    """

    __slots__ = ("base", "builder", "index", "overwritten")
    __hash__ = object.__hash__

    def __init__(self, builder: TensorBuilder, index: int) -> None:
        self.builder = builder
        self.index = index
        #: The tensor whose memory NumPy's array would share, if any.
        self.base: SymbolicTensor | None = None
        #: The line that overwrote that memory since (`x += 1`), or empty.
        self.overwritten = ""

    def view_of(self, base: SymbolicTensor) -> SymbolicTensor:
        """Mark this tensor as a view of another one in NumPy, and return it."""
        if self is not base:
            self.base = base
        return self

    @property
    def type(self) -> ValueType:
        return self.builder.type_of(self.index)

    @property
    def name(self) -> str:
        """The name of the value in the graph."""
        return self.builder.name_of(self.index)

    @property
    def written(self) -> Array | None:
        """The data of an eager tensor, usable in any graph; None for a symbolic tensor."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def data_type(self) -> DataType:
        return self.type.data_type

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of an element."""
        return self.data_type.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> SymbolicTensor:
        """The tensor with its axes reversed."""
        return self.builder.transpose(self).view_of(self)

    def __repr__(self) -> str:
        return f"<symbolic {self.name}: {self.type.text()}>"

    def __len__(self) -> int:
        if not self.shape:
            raise mistake("a tensor without axes has no len()")
        return self.shape[0]

    def __iter__(self) -> Iterator[SymbolicTensor]:
        return (self[i] for i in range(len(self)))

    # Operators ---------------------------------------------------------------------------------

    __add__, __radd__ = _operator(np.add)
    __sub__, __rsub__ = _operator(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.true_divide)
    __floordiv__, __rfloordiv__ = _operator(np.floor_divide)
    __mod__, __rmod__ = _operator(np.remainder)
    __divmod__, __rdivmod__ = _operator(np.divmod)
    __pow__, __rpow__ = _operator(np.power)
    __matmul__, __rmatmul__ = _operator(np.matmul)
    __lshift__, __rlshift__ = _operator(np.left_shift)
    __rshift__, __rrshift__ = _operator(np.right_shift)
    __and__, __rand__ = _operator(np.bitwise_and)
    __or__, __ror__ = _operator(np.bitwise_or)
    __xor__, __rxor__ = _operator(np.bitwise_xor)
    __iadd__, __isub__, __imul__ = map(_in_place, (np.add, np.subtract, np.multiply))
    __itruediv__, __ifloordiv__ = _in_place(np.true_divide), _in_place(np.floor_divide)
    __imod__, __ipow__, __imatmul__ = map(_in_place, (np.remainder, np.power, np.matmul))
    __ilshift__, __irshift__ = _in_place(np.left_shift), _in_place(np.right_shift)
    __iand__, __ior__, __ixor__ = map(_in_place, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    __neg__, __abs__ = _unary(np.negative), _unary(np.absolute)
    __pos__, __invert__ = _unary(np.positive), _unary(np.invert)

    __lt__ = _operator(np.less)[0]
    __le__ = _operator(np.less_equal)[0]
    __gt__ = _operator(np.greater)[0]
    __ge__ = _operator(np.greater_equal)[0]

    def __eq__(self, other: object) -> SymbolicTensor:  # type: ignore[override]  # as in NumPy
        return self.builder.numpy_ufunc(np.equal, "__call__", (self, other), {})

    def __ne__(self, other: object) -> SymbolicTensor:  # type: ignore[override]  # as in NumPy
        return self.builder.numpy_ufunc(np.not_equal, "__call__", (self, other), {})

    # Shape -------------------------------------------------------------------------------------

    def __getitem__(self, key: IndexPart | tuple[IndexPart, ...]) -> SymbolicTensor:
        found = self.builder.index(self, key)
        parts = key if isinstance(key, tuple) else (key,)
        is_view = all(isinstance(p, int | slice | EllipsisType | None) for p in parts)
        return found.view_of(self) if is_view and found.shape else found

    def reshape(
        self, *shape: int | Sequence[int], order: str = "C", copy: bool | None = None
    ) -> SymbolicTensor:
        """Return the same elements in another shape; one dimension may be -1."""
        return _method(np.reshape)(self, _joined(shape), order)

    def transpose(self, *axes: int | Sequence[int] | None) -> SymbolicTensor:
        """Permute axes; reverse them by default."""
        order = None if axes in ((), (None,)) else _joined(axes)  # type: ignore[arg-type]
        return _method(np.transpose)(self, order)

    def cast(self, data_type: DataType | str | np.dtype[Any] | Class) -> SymbolicTensor:
        """Convert to another data type."""
        return self.builder.cast(self, data_type)

    def astype(
        self, dtype: DataType | str | np.dtype[Any] | Class, order: str = "K",
        casting: str = "unsafe", subok: bool = True, copy: bool = True,
    ) -> SymbolicTensor:  # fmt: skip
        """Convert to another data type, with the arguments of NumPy's method."""
        with suppress(TypeError, LayoutError):  # `cast` handles names that NumPy does not know.
            dtype = DataType.from_dtype(np.dtype(dtype))
        found = self.cast(dtype)
        return self.copy() if found is self else found

    @property
    def mT(self) -> SymbolicTensor:
        """The tensor with its last two axes exchanged."""
        return _method(np.matrix_transpose)(self)

    @property
    def real(self) -> SymbolicTensor:
        """The tensor itself."""
        return self

    @property
    def imag(self) -> SymbolicTensor:
        """Zeros."""
        return _method(np.imag)(self)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    all, any = _method(np.all), _method(np.any)
    argmax, argmin, argsort = _method(np.argmax), _method(np.argmin), _method(np.argsort)
    clip = _method(np.clip)
    copy, conj, conjugate = _method(np.copy), _unary(np.conjugate), _unary(np.conjugate)
    cumprod, cumsum = _method(np.cumprod), _method(np.cumsum)
    diagonal, dot = _method(np.diagonal), _method(np.dot)
    max, min, mean, prod = _method(np.max), _method(np.min), _method(np.mean), _method(np.prod)
    ravel = _method(np.ravel)
    repeat, round = _method(np.repeat), _method(np.round)
    squeeze, swapaxes = _method(np.squeeze), _method(np.swapaxes)
    std, sum, take = _method(np.std), _method(np.sum), _method(np.take)
    trace, var = _method(np.trace), _method(np.var)

    def flatten(self, order: str = "C") -> SymbolicTensor:
        """Return a copy with one axis."""
        return self.copy().ravel(order)

    def compress(self, condition: Any, axis: int | None = None, out: None = None) -> Any:
        """Like `numpy.compress`."""
        return self.builder.numpy_function(np.compress, (condition, self, axis, out), {})

    def __copy__(self) -> SymbolicTensor:
        return self

    def __deepcopy__(self, memo: object) -> SymbolicTensor:
        return self

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
            "its truth value", "use where(condition, a, b), or decide on shapes, which are known"
        )

    def __int__(self) -> NoReturn:
        raise self._no_data(
            "its value",
            "keep it a tensor, or pass the number as an argument; to index an array with it use "
            "numpy.take(array, index, axis)",
        )

    __float__ = __int__
    __complex__ = __int__
    __index__ = __int__

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self._no_data("its content", "use the tensor's methods, or NumPy's functions")

    def item(self, *_: object) -> NoReturn:
        """Raise `NoDataError`."""
        raise self._no_data("its value", "return the tensor and read it after the program ran")

    tolist = numpy = item

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._no_data("its value", "return the tensor and format it after the run")
        return repr(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error with an alternative for attributes of NumPy arrays."""
        if (name.startswith("__") and name != "__dlpack__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{Class(self).__name__!r} object has no attribute {name!r}")
        raise NoMethodError(
            f"symbolic tensors do not support numpy.ndarray.{name}",
            where=user_location(),
            remedy="use a function that returns a new array, or call it outside of the trace",
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise mistake(
            "a symbolic tensor cannot be written to",
            remedy="create a new tensor, with where(mask, new, old) or concat",
        )

    def _no_data(self, wanted: str, remedy: str) -> CompileError:
        return NoDataError(
            f"a symbolic tensor has no data while the graph is built, so {wanted} is unknown",
            where=f"{user_location()}, {self!r}",
            remedy=remedy,
        )


#: An operand of an expression with a symbolic tensor.
Operand = SymbolicTensor | Array | Scalar


_SIZE = int | np.integer | SymbolicSize


def _joined(parts: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(parts) == 1 and not isinstance(parts[0], _SIZE):
        return tuple(size_of(p) for p in parts[0])
    flat: list[int] = []
    for part in parts:
        if not isinstance(part, _SIZE):
            raise mistake("a shape must be one list of integers", got=repr(parts))
        flat.append(size_of(part))
    return tuple(flat)

"""`SymbolicTensor`: stands for a value while a graph is built; arithmetic on it adds operations.

Python's operators and the methods of arrays are NumPy's functions on it, with NumPy's types. Its
data does not exist: asking for it is an error that names the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from stitch.errors import CompileError, LayoutError
from stitch.graph.source_location import mistake, user_location
from stitch.graph.tensor_operations import Scalar, TensorOperations
from stitch.program import Array, DataType, ValueType

#: `type` is a property of tensors, so Python's own needs another name inside the class.
Class = type
IndexPart = int | slice | EllipsisType | None | Sequence[int] | Array


Operations: TypeAlias = "TensorOperations[SymbolicTensor]"
_Operator: TypeAlias = "Callable[[SymbolicTensor, Operand], SymbolicTensor]"


def _operator(ufunc: np.ufunc) -> tuple[_Operator, _Operator]:
    """Python's operator for a ufunc, and the one for the other side."""

    def operator(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (self, other), {})  # type: ignore[return-value]

    def reflected(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (other, self), {})  # type: ignore[return-value]

    return operator, reflected


def _in_place(ufunc: np.ufunc) -> _Operator:
    """Python's operator that writes: NumPy's array keeps its type and shape, and what else reads
    its bytes is refused from then on."""
    apply = _operator(ufunc)[0]

    def operator(self: SymbolicTensor, other: Operand) -> SymbolicTensor:
        found = apply(self, other)
        if type(self) is not SymbolicTensor or not self.shape:
            return found  # NumPy's single elements are never written to.
        kinds = found.dtype, self.dtype
        is_kept = found.data_type.is_floating and self.data_type.is_floating
        if not (is_kept or np.can_cast(*kinds, "same_kind")) or found.shape != self.shape:
            raise mistake(
                f"the result of numpy.{ufunc.__name__} does not fit the tensor that it is to be "
                "written into",
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
    """Python's operator for a ufunc of one operand."""

    def operator(self: SymbolicTensor) -> SymbolicTensor:
        return self.builder.numpy_ufunc(ufunc, "__call__", (self,), {})  # type: ignore[return-value]

    return operator


def _method(function: Callable[..., Any]) -> Callable[..., SymbolicTensor]:
    """The method that is a function of NumPy's with the tensor before its other arguments."""

    def method(self: SymbolicTensor, *arguments: object, **named: object) -> SymbolicTensor:
        return self.builder.numpy_function(function, (self, *arguments), named)  # type: ignore[return-value]

    method.__name__ = method.__qualname__ = function.__name__
    method.__doc__ = f"As `numpy.{function.__name__}` of the tensor."
    return method


class NoDataError(CompileError):
    """The data of a tensor was asked for, which there is none of while a graph is built."""


class NoMethodError(CompileError, AttributeError):
    """NumPy's arrays have this attribute, a symbolic tensor has not."""


#: What to write in place of some methods of arrays.
_INSTEAD = {
    "sort": "it sorts in place: write x = numpy.sort(x)",
    "partition": "it sorts in place: write x = numpy.sort(x)",
    "argpartition": "write numpy.argsort(x)",
    "fill": "it writes in place: write x = numpy.full_like(x, value)",
    "put": "it writes in place: write numpy.where(mask, new, x)",
    "resize": "it writes in place: write x = numpy.resize(x, shape)",
    "nonzero": "data decide how many places there are: write numpy.where(mask, a, b)",
    "flat": "write x.ravel()",
    "view": "write x.cast(dtype), or x itself",
}


class SymbolicTensor:
    """A value of a graph under construction; immutable, made by a builder only.

    Python scalars take this tensor's type. `==` gives a tensor of booleans, as in NumPy.
    """

    __slots__ = ("base", "builder", "index", "overwritten")
    __hash__ = object.__hash__

    def __init__(self, builder: Operations, index: int) -> None:
        self.builder = builder
        self.index = index
        #: The tensor whose bytes NumPy's array would share, if it would those of one.
        self.base: SymbolicTensor | None = None
        #: The line that wrote to those bytes since (`x += 1`), else empty.
        self.overwritten = ""

    def view_of(self, base: SymbolicTensor) -> SymbolicTensor:
        """The tensor itself, which NumPy would give as a view of another one."""
        if self is not base:
            self.base = base
        return self

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
        return self.builder.transpose(self).view_of(self)

    def __repr__(self) -> str:
        return f"<symbolic {self.name}: {self.type.text()}>"

    def __len__(self) -> int:
        if not self.shape:
            raise mistake("a tensor without axes has no length")
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
        return self.builder.numpy_ufunc(np.equal, "__call__", (self, other), {})  # type: ignore[return-value]

    def __ne__(self, other: object) -> SymbolicTensor:  # type: ignore[override]  # as in NumPy
        return self.builder.numpy_ufunc(np.not_equal, "__call__", (self, other), {})  # type: ignore[return-value]

    # Shape -------------------------------------------------------------------------------------

    def __getitem__(self, key: IndexPart | tuple[IndexPart, ...]) -> SymbolicTensor:
        found = self.builder.index(self, key)
        parts = key if isinstance(key, tuple) else (key,)
        is_view = all(isinstance(p, int | slice | EllipsisType | None) for p in parts)
        return found.view_of(self) if is_view and found.shape else found

    def reshape(
        self, *shape: int | Sequence[int], order: str = "C", copy: bool | None = None
    ) -> SymbolicTensor:
        """The same elements under another shape; one dimension may be -1."""
        return _method(np.reshape)(self, _joined(shape), order)

    def transpose(self, *axes: int | Sequence[int] | None) -> SymbolicTensor:
        """The axes in the given order, or reversed."""
        order = None if axes in ((), (None,)) else _joined(axes)  # type: ignore[arg-type]
        return _method(np.transpose)(self, order)

    def cast(self, data_type: DataType | str | np.dtype[Any] | Class) -> SymbolicTensor:
        """With another data type."""
        return self.builder.cast(self, data_type)

    def astype(
        self, dtype: DataType | str | np.dtype[Any] | Class, order: str = "K",
        casting: str = "unsafe", subok: bool = True, copy: bool = True,
    ) -> SymbolicTensor:  # fmt: skip
        """With another data type, as NumPy's arrays say it."""
        with suppress(TypeError, LayoutError):  # As for a name that is none of NumPy's.
            dtype = DataType.from_dtype(np.dtype(dtype))
        found = self.cast(dtype)
        return self.copy() if found is self else found

    @property
    def mT(self) -> SymbolicTensor:
        """The last two axes exchanged."""
        return _method(np.matrix_transpose)(self)

    @property
    def real(self) -> SymbolicTensor:
        """The tensor itself: its elements are real."""
        return self

    @property
    def imag(self) -> SymbolicTensor:
        """Zeros."""
        return _method(np.imag)(self)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
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
        """A copy with one axis."""
        return self.copy().ravel(order)

    def compress(self, condition: Any, axis: int | None = None, out: None = None) -> Any:
        """As `numpy.compress` of the tensor."""
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
            "whether it is true",
            "choose with where(condition, a, b), or decide on shapes, which are known",
        )

    def __int__(self) -> NoReturn:
        raise self._no_data(
            "its number",
            "keep it a tensor, or pass the number as an argument; an array is indexed by it with "
            "numpy.take(array, index, axis)",
        )

    __float__ = __int__
    __complex__ = __int__
    __index__ = __int__

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self._no_data("what it holds", "use the tensor's own methods, or NumPy's functions")

    def item(self, *_: object) -> NoReturn:
        """Raises `CompileError`: the data does not exist yet."""
        raise self._no_data("its number", "return the tensor and read it after the program ran")

    tolist = numpy = item

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._no_data("its number", "return the tensor and format it after the run")
        return repr(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Names what arrays have and a graph cannot give."""
        if (name.startswith("__") and name != "__dlpack__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{Class(self).__name__!r} object has no attribute {name!r}")
        raise NoMethodError(
            f"numpy.ndarray.{name} has no meaning on a symbolic tensor",
            where=user_location(),
            remedy=_INSTEAD.get(name, "call it outside of the traced function"),
        )

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

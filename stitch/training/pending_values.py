"""`PendingValue`: a tensor on a device that is computed with before it is there.

What was compiled for operands like these once is kept. A function of torch's is captured by the
front end, which is given.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, trace
from stitch.program import Array, DataType, TensorDesc, ValueType
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.ttb import Binary

#: Makes a graph of a call of torch's: the function, its arguments, and which of them are tensors.
CaptureCall = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], ComputationGraph]

#: Programs that are kept for one device; the oldest go first.
MAX_PROGRAMS = 256
#: Methods of NumPy's arrays that traced tensors have; torch's word for an axis is taken too.
_METHODS = frozenset({
    "argmax", "argmin", "cast", "max", "mean", "min", "prod", "ravel", "reshape", "squeeze", "sum",
    "swapaxes", "transpose", "var",
})  # fmt: skip
#: Methods that give two values where torch's word for an axis is said, as torch's do.
_PAIRS = frozenset({"max", "min"})
#: What torch says of a tensor without its elements.
_OF_SHAPES = frozenset({"dim", "ndimension", "nelement", "numel", "size"})
#: As what truths are counted.
_COUNTS = {"sum": DataType.INT64, "mean": DataType.FLOAT32}
_programs: WeakKeyDictionary[RuntimeDevice, dict[Any, LoadedProgram]] = WeakKeyDictionary()


def _operator(name: str, function: Callable[..., Any], *, reflected: bool) -> Any:
    def method(self: PendingValue, other: Any) -> Any:
        if _is_tensor(other) and not isinstance(other, PendingValue):
            other = _array(other)
        if isinstance(other, PendingValue | np.ndarray):
            pair = (lambda x, y: function(y, x)) if reflected else function
            return self._apply((name, reflected), pair, other)
        if not isinstance(other, int | float | np.generic):
            return NotImplemented
        number = other.item() if isinstance(other, np.generic) else other
        return self._apply(
            (name, reflected, repr(number)),
            (lambda x: function(number, x)) if reflected else (lambda x: function(x, number)),
        )

    return method


def _operators(name: str, function: Callable[..., Any]) -> tuple[Any, Any]:
    """An operator, and the one for a value on its right."""
    return (
        _operator(name, function, reflected=False), _operator(name, function, reflected=True),
    )  # fmt: skip


class PendingValue:
    """A value on a device, perhaps not there yet; reading it runs what is queued.

    Operators, indices and methods give further pending values. `tensor` is the tensor on the
    device, for stitching it with other programs.
    """

    __slots__ = ("__weakref__", "_capture", "tensor")
    #: NumPy's arrays leave operators to it.
    __array_priority__ = 1000

    def __init__(self, tensor: Tensor, capture: CaptureCall | None = None) -> None:
        self.tensor = tensor
        self._capture = capture

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of an element."""
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    # -- reading -----------------------------------------------------------------------------------

    def numpy(self) -> Array:
        """Its elements as an array of its own."""
        return self.tensor.numpy()

    def wait(self) -> Self:
        """Run what is queued until it is there; gives it back. Raises what a failed task raised."""
        self.tensor.settle()
        return self

    def item(self) -> Any:
        """Its only element as a Python number; raises `ValueError` if there are more."""
        return self.tensor.item()

    def tolist(self) -> Any:
        """Its elements as Python numbers, in nested lists."""
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.tensor.__array__(dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Its bytes in place, once it is there, as `Tensor.__dlpack__` gives them."""
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tensor!r}>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec or not self.shape else repr(self)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, PendingValue):
            return self is other
        # Torch's tensors compare elements, and ask `__torch_function__`.
        return NotImplemented if hasattr(other, "__torch_function__") else self.tensor == other

    __hash__ = object.__hash__

    # -- computing ---------------------------------------------------------------------------------

    __add__, __radd__ = _operators("add", operator.add)
    __sub__, __rsub__ = _operators("sub", operator.sub)
    __mul__, __rmul__ = _operators("mul", operator.mul)
    __truediv__, __rtruediv__ = _operators("div", operator.truediv)
    __floordiv__, __rfloordiv__ = _operators("floordiv", operator.floordiv)
    __mod__, __rmod__ = _operators("mod", operator.mod)
    __pow__, __rpow__ = _operators("pow", operator.pow)
    __matmul__, __rmatmul__ = _operators("matmul", operator.matmul)
    __lt__, __gt__ = _operators("less", operator.lt)
    __le__, __ge__ = _operators("less_equal", operator.le)

    __and__, __rand__ = _operators("and", operator.and_)
    __or__, __ror__ = _operators("or", operator.or_)
    __xor__, __rxor__ = _operators("xor", operator.xor)

    def __invert__(self) -> PendingValue:
        return self._apply(("invert",), operator.invert)

    def __neg__(self) -> PendingValue:
        return self._apply(("neg",), operator.neg)

    def __abs__(self) -> PendingValue:
        return self._apply(("abs",), operator.abs)

    def multiplied(self, by: float) -> PendingValue:
        """Times a number, in its own type and by one program whatever the number is."""
        kind = self.tensor.data_type

        def product(x: Any, y: Any) -> Any:
            return (x.cast(DataType.FLOAT32) * y).cast(kind)

        return self._apply(("multiplied",), product, np.asarray(by, np.float32))

    def _apply(
        self, key: tuple[Any, ...], function: Callable[..., Any], *operands: Any
    ) -> PendingValue:
        """Queue a function over this and other operands; `key` says what it does."""

        def made(descs: Sequence[TensorDesc | ValueType]) -> ComputationGraph:
            return trace(function, *descs, name=str(key[0]))

        (result,) = self._queued(key, made, [self, *operands])
        return result

    def _queued(
        self, key: tuple[Any, ...],
        made: Callable[[Sequence[TensorDesc | ValueType]], ComputationGraph],
        operands: Sequence[Any],
    ) -> tuple[PendingValue, ...]:  # fmt: skip
        device: RuntimeDevice = self.tensor.device
        given = [o.tensor if isinstance(o, PendingValue) else np.asarray(o) for o in operands]
        descs = [g.desc.without_address() if isinstance(g, Tensor) else _desc(g) for g in given]
        programs = _programs.setdefault(device, {})
        known = (*key, *map(repr, descs))
        loaded = programs.get(known)
        if loaded is None:
            options = CompileOptions(executor=rated_executor(device.executor))
            program = compile_graph(made(descs), device.machine, options).program
            binary = Binary((program,), device.machine.shape, "stitch pending value")
            loaded = programs[known] = device.load(binary)
            while len(programs) > MAX_PROGRAMS:
                del programs[next(iter(programs))]
        result = loaded(*given)
        results = (result,) if isinstance(result, Tensor) else result
        return tuple([PendingValue(one, self._capture) for one in results])

    def __getitem__(self, index: Any) -> PendingValue:
        """A part of it, as NumPy's basic indexing takes it."""
        plain = _plain_index(index)
        return self._apply(("index", _written(plain)), lambda x: x[plain])

    def __iter__(self) -> Iterator[PendingValue]:
        return iter([self[row] for row in range(len(self))])

    @property
    def T(self) -> PendingValue:
        """With its axes in the opposite order."""
        return self._apply(("transpose", "()", "[]"), lambda x: x.transpose())

    def __getattr__(self, name: str) -> Any:
        """NumPy's methods, and, where torch is loaded, those of its tensors."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _METHODS:
            return _Method(self, name)
        if name == "backward" or name.endswith("_"):
            raise UsageError(
                f"a value that is computed from a prediction has no {name}()",
                remedy="loss_fn(pred, y).backward() of a loss that the model was compiled with, "
                "or value.numpy()",
            )
        torch = sys.modules.get("torch")
        method = None if torch is None else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return lambda *arguments, **named: self._captured(method, (self, *arguments), named)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """A function of torch's over pending values."""
        first = _first_pending([*arguments, *(named or {}).values()])
        return first._captured(function, arguments, named or {})

    def _captured(
        self, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """One value, or, of what gives several, all of them as torch names them."""
        word = getattr(function, "__name__", "?")
        if word in _OF_SHAPES:
            shape = sys.modules["torch"].empty(self.shape, device="meta")
            return function(shape, *arguments[1:], **named)
        if self._capture is None:
            raise UsageError(
                f"this value takes no function of torch's: {word}",
                remedy="value.numpy(), or a method of NumPy's arrays",
            )
        capture = self._capture
        operands = [v for v in _leaves([*arguments, *named.values()]) if _is_tensor(v)]

        def made(_: Sequence[TensorDesc | ValueType]) -> ComputationGraph:
            return capture(function, arguments, named)

        plain = [_written(v) for v in _leaves([*arguments, *named.items()]) if not _is_tensor(v)]
        where = [type(v).__name__ for v in _leaves([*arguments, *named.values()])]
        key = (getattr(function, "__qualname__", ""), id(function), *plain, *where)
        results = self._queued(key, made, [_array(o) for o in operands])
        if len(results) == 1:
            return results[0]
        kind = getattr(sys.modules["torch"].return_types, word, None)
        return results if kind is None else kind(results)


class _Method:
    """A method of NumPy's arrays, bound to a pending value."""

    def __init__(self, value: PendingValue, name: str) -> None:
        self._value, self._name = value, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if "dim" in named and self._name in _PAIRS and "torch" in sys.modules:
            torchs = getattr(sys.modules["torch"].Tensor, self._name)
            return self._value._captured(torchs, (self._value, *arguments), named)
        words = {"dim": "axis", "keepdim": "keepdims"}
        given = {words.get(word, word): value for word, value in named.items()}
        name = self._name
        key = (name, _written(arguments), _written(sorted(given.items())))
        # As NumPy and torch do, truths are counted.
        kind = _COUNTS.get(name) if self._value.tensor.data_type is DataType.BOOL else None

        def method(x: Any) -> Any:
            operand = x if kind is None else x.cast(kind)
            return getattr(operand, name)(*arguments, **given)

        return self._value._apply(key, method)


def _first_pending(values: Sequence[Any]) -> PendingValue:
    return next(v for v in _leaves(values) if isinstance(v, PendingValue))


def _leaves(values: Sequence[Any]) -> list[Any]:
    """What lies in nested lists and tuples, in order."""
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, list | tuple) else [value]
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, PendingValue) or hasattr(value, "__torch_function__")


def _array(value: Any) -> Any:
    """A tensor of torch's as an array, without loading torch to ask."""
    if isinstance(value, PendingValue):
        return value
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _plain_index(index: Any) -> Any:
    """An index with arrays in the places of torch's tensors."""
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    return index if isinstance(index, PendingValue) else _array(index)


def _written(value: Any) -> Any:
    """What tells a value that is no operand from others: of arrays every element."""
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_written, value))
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return repr(value)


def _desc(array: Array) -> ValueType:
    return ValueType(array.shape, DataType.from_dtype(array.dtype))

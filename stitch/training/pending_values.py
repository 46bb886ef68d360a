"""`PendingValue`: a tensor on a device, computed when it is read; `LossTensor`: a pending loss.

Operations on pending values are compiled once per operand types and cached. Functions of torch are
captured by a function that the caller supplies.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraph, trace
from stitch.program import Array, DataType, TensorDesc, ValueType
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.training.from_torch import is_loss_call, loss_of_call
from stitch.training.losses import Loss
from stitch.ttb import Binary

#: Captures a call of a torch function as a graph: function, positional and keyword arguments.
CaptureCall = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], ComputationGraph]

#: Size of the program cache of a device; the oldest entries are evicted first.
MAX_PROGRAMS = 256
#: Methods of NumPy's arrays that traced tensors have; torch's `dim` and `keepdim` are accepted.
_METHODS = frozenset({
    "argmax", "argmin", "cast", "max", "mean", "min", "prod", "ravel", "reshape", "squeeze", "sum",
    "swapaxes", "transpose", "var",
})  # fmt: skip
#: Methods that return values and indices when called with `dim`, as in torch.
_PAIRS = frozenset({"max", "min"})
#: Methods of torch that depend on the shape alone.
_OF_SHAPES = frozenset({"dim", "ndimension", "nelement", "numel", "size"})
#: The type in which booleans are summed.
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
    """Return an operator and its reflected form."""
    return (
        _operator(name, function, reflected=False), _operator(name, function, reflected=True),
    )  # fmt: skip


class PendingValue:
    """A pending value on a device; reading it runs the queue.

    Operators, indexing and methods return further pending values. `tensor` is the device's tensor,
    which other programs accept as input.
    """

    __slots__ = ("__weakref__", "_capture", "tensor")
    #: Makes NumPy use the operators of this class.
    __array_priority__ = 1000

    def __init__(self, tensor: Tensor, capture: CaptureCall | None = None) -> None:
        self.tensor = tensor
        self._capture = capture

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def numpy(self) -> Array:
        """Return the elements as a new array."""
        return self.tensor.numpy()

    def wait(self) -> Self:
        """Run the queue until the value is computed; return it. Raises the error of a failed
        task."""
        self.tensor.settle()
        return self

    def item(self) -> Any:
        """Return the only element as a Python number; raise `ValueError` if there are more."""
        return self.tensor.item()

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.tensor.__array__(dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the elements without a copy, as `Tensor.__dlpack__` does."""
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
        # Torch tensors compare elementwise, through `__torch_function__`.
        return NotImplemented if hasattr(other, "__torch_function__") else self.tensor == other

    __hash__ = object.__hash__

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
        """Return the product with a number, in the same type, by one program for all numbers."""
        kind = self.tensor.data_type

        def product(x: Any, y: Any) -> Any:
            return (x.cast(DataType.FLOAT32) * y).cast(kind)

        return self._apply(("multiplied",), product, np.asarray(by, np.float32))

    def _apply(
        self, key: tuple[Any, ...], function: Callable[..., Any], *operands: Any
    ) -> PendingValue:
        """Queue a traced function of this and other operands; `key` identifies the function."""

        def made(descs: Sequence[TensorDesc | ValueType]) -> ComputationGraph:
            return trace(function, *descs, name=str(key[0]))

        (result,) = self._queued(key, made, [self, *operands])
        return result

    def _queued(
        self, key: tuple[Any, ...],
        build: Callable[[Sequence[TensorDesc | ValueType]], ComputationGraph],
        operands: Sequence[Any],
    ) -> tuple[PendingValue, ...]:  # fmt: skip
        """Queue a graph over operands; it is compiled once per key and operand types."""
        device: RuntimeDevice = self.tensor.device
        values = [o.tensor if isinstance(o, PendingValue) else np.asarray(o) for o in operands]
        descs = [g.desc.without_address() if isinstance(g, Tensor) else _desc(g) for g in values]
        programs = _programs.setdefault(device, {})
        key_with_types = (*key, *map(repr, descs))
        loaded = programs.get(key_with_types)
        if loaded is None:
            options = CompileOptions(executor=rated_executor(device.executor))
            program = compile_graph(build(descs), device.machine, options).program
            binary = Binary((program,), device.machine.shape, "stitch pending value")
            loaded = programs[key_with_types] = device.load(binary)
            while len(programs) > MAX_PROGRAMS:
                del programs[next(iter(programs))]
        result = loaded(*values)
        results = (result,) if isinstance(result, Tensor) else result
        return tuple([PendingValue(one, self._capture) for one in results])

    def __getitem__(self, index: Any) -> PendingValue:
        """Return a part, with NumPy's basic indexing."""
        plain = _plain_index(index)
        return self._apply(("index", _value_key(plain)), lambda x: x[plain])

    def __iter__(self) -> Iterator[PendingValue]:
        return iter([self[row] for row in range(len(self))])

    @property
    def T(self) -> PendingValue:
        """The transpose."""
        return self._apply(("transpose", "()", "[]"), lambda x: x.transpose())

    def __getattr__(self, name: str) -> Any:
        """Return a method of NumPy's arrays, or of torch's tensors if torch is loaded."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _METHODS:
            return _Method(self, name)
        if name == "backward" or name.endswith("_"):
            raise UsageError(
                f"a value computed from a prediction does not support {name}()",
                remedy="call backward() on loss_fn(pred, y), or read value.numpy()",
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
        """Queue a function of torch; several results are returned as torch returns them."""
        word = getattr(function, "__name__", "?")
        if word in _OF_SHAPES:
            shape = sys.modules["torch"].empty(self.shape, device="meta")
            return function(shape, *arguments[1:], **named)
        if self._capture is None:
            raise UsageError(
                f"this value does not support the torch function {word}",
                remedy="value.numpy(), or a method of NumPy's arrays",
            )
        capture = self._capture
        operands = [v for v in _flat([*arguments, *named.values()]) if _is_tensor(v)]

        def made(_: Sequence[TensorDesc | ValueType]) -> ComputationGraph:
            return capture(function, arguments, named)

        plain = [_value_key(v) for v in _flat([*arguments, *named.items()]) if not _is_tensor(v)]
        where = [type(v).__name__ for v in _flat([*arguments, *named.values()])]
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
        options = {words.get(word, word): value for word, value in named.items()}
        name = self._name
        key = (name, _value_key(arguments), _value_key(sorted(options.items())))
        # NumPy and torch sum booleans as integers.
        kind = _COUNTS.get(name) if self._value.tensor.data_type is DataType.BOOL else None

        def method(x: Any) -> Any:
            operand = x if kind is None else x.cast(kind)
            return getattr(operand, name)(*arguments, **options)

        return self._value._apply(key, method)


def _first_pending(values: Sequence[Any]) -> PendingValue:
    return next(v for v in _flat(values) if isinstance(v, PendingValue))


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return the elements of nested lists and tuples, in order."""
    leaves: list[Any] = []
    for value in values:
        leaves += _flat(value) if isinstance(value, list | tuple) else [value]
    return leaves


def _is_tensor(value: Any) -> bool:
    return isinstance(value, PendingValue) or hasattr(value, "__torch_function__")


def _array(value: Any) -> Any:
    """Return a torch tensor as an array, without importing torch."""
    if isinstance(value, PendingValue):
        return value
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _plain_index(index: Any) -> Any:
    """Return an index with torch tensors as arrays."""
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    return index if isinstance(index, PendingValue) else _array(index)


def _value_key(value: Any) -> Any:
    """Return a key for a value that is not an operand; of arrays it has every element."""
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_value_key, value))
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return repr(value)


def _desc(array: Array) -> ValueType:
    return ValueType(array.shape, DataType.from_dtype(array.dtype))


# --------------------------------------------------------------------------------------------------
# Losses as tensors


class ModelInTraining(Protocol):
    """The training instance of a prediction or loss."""

    @property
    def loss_fn(self) -> Loss: ...

    @property
    def capture_call(self) -> CaptureCall | None: ...

    @property
    def forwards(self) -> int:
        """Number of forward passes, which is the number of the last prediction."""

    def compute_loss(self, label: Any) -> LossTensor:
        """Queue the loss of the last prediction."""

    def backward_of(self, loss: LossTensor, by: float) -> None:
        """Queue the backward program of a loss, with its gradients multiplied by a number."""


_T = TypeVar("_T")


def live_training(training: _T | None) -> _T:
    """Return the training of a prediction or a loss; raise `TaskError` if it was collected.

    Predictions and losses reference it weakly: those that a notebook keeps do not keep a model.
    """
    if training is None:
        raise TaskError(
            "the training has ended: its compiled model was garbage collected",
            remedy="keep a reference to the model while its predictions and losses are used",
        )
    return training


def _loss_operator(compute: Callable[[Any, Any], Any], change: Callable[[float], float]) -> Any:
    def method(self: LossTensor, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return ComputedLoss(self, lambda loss: compute(loss, np.float32(number)), change(number))

    return method


def _comparison(compare: Callable[[float, float], bool]) -> Any:
    def method(self: LossTensor, other: Any) -> Any:
        if isinstance(other, LossTensor):
            return compare(self.item(), other.item())
        number = _number(other)
        return NotImplemented if number is None else compare(self.item(), number)

    return method


def _number(value: Any) -> float | None:
    """Return a number, also of NumPy or torch; None for other values.

    Raises `UsageError` for another loss or a value with a gradient, which backward would ignore.
    """
    has_gradient = isinstance(value, PendingValue) or getattr(value, "requires_grad", False)
    if has_gradient or isinstance(value, LossTensor):
        raise UsageError(
            "a loss can be combined with numbers only: backward() has one loss",
            got=type(value).__name__,
            remedy="use float(value); or call backward() of each loss before the next call of the "
            "model, which adds the gradients; or compute penalties inside the module, with "
            "loss=stitch.losses.IdentityLoss()",
        )
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else value
    return float(number) if isinstance(number, int | float) else None


class LossOperationError(UsageError, AttributeError, TypeError):
    """A loss was asked for something other than `+ - * /` with numbers."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"a loss has no {operation}: backward() goes back through + - * / with numbers only",
            remedy="float(loss) is its number; what is computed of it and has gradients belongs "
            "into the module (loss=stitch.losses.IdentityLoss() takes what it gives as the loss)",
        )


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options of torch's `backward` that are set."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise UsageError(
            "backward() of a loss takes no options: it goes back once",
            got=", ".join(given),
            remedy="loss.backward(), and for more gradients another call of the model",
        )


def _refused(operation: str) -> Any:
    def method(self: LossTensor, *operands: Any) -> Any:
        raise LossOperationError(operation)

    return method


class LossTensor:
    """A scalar loss: `item` reads it, `backward` queues the backward program, once.

    `+ - * /` with numbers return losses: `(loss / 4).backward()` scales the gradients by 1/4.
    """

    __slots__ = ("_tensor", "_training", "_value")
    #: Makes NumPy use the operators of this class.
    __array_priority__ = 1000

    def __init__(self, training: ModelInTraining | None, tensor: Tensor | None) -> None:
        self._training = None if training is None else weakref.ref(training)
        self._tensor = tensor
        self._value: float | None = None

    def backward(self, **options: Any) -> None:
        """Queue the gradients of all parameters, which are added to existing ones.

        Raises `UsageError` when called twice, for a loss that is not the last one, and for options
        of torch's `backward` that are set.
        """
        _refuse_options(options)
        self.training.backward_of(self, 1.0)

    @property
    def training(self) -> ModelInTraining:
        """The training of this loss; raises `TaskError` if it has ended."""
        assert self._training is not None, "a computed loss has no training"
        return live_training(self._training())

    def wait(self) -> LossTensor:
        """Run the queue until the loss is computed; return it. Raises the error of a failed
        task."""
        self.item()
        return self

    def item(self) -> float:
        """Return the loss as a Python number; the first call runs the queue."""
        tensor = self._tensor
        if tensor is not None:
            self._value = float(tensor.numpy())
            # A caller that collects losses keeps numbers, not device memory.
            self._tensor = None
        assert self._value is not None
        return self._value

    def numpy(self) -> Array:
        """Return the loss as an array without axes."""
        return np.asarray(self.item(), np.float32)

    def detach(self) -> LossTensor:
        """Return the loss without a backward pass."""
        return ComputedLoss(self, None, None)

    def cpu(self) -> LossTensor:
        """Return the loss itself, which can be read on the host."""
        return self

    __add__ = __radd__ = _loss_operator(operator.add, lambda number: 1.0)
    __sub__ = _loss_operator(operator.sub, lambda number: 1.0)
    __rsub__ = _loss_operator(lambda loss, number: number - loss, lambda number: -1.0)
    __mul__ = __rmul__ = _loss_operator(operator.mul, lambda number: number)
    __truediv__ = _loss_operator(
        operator.truediv, lambda number: 1.0 / number if number else math.inf
    )
    __rtruediv__ = _refused("number / loss")
    __pow__, __rpow__ = _refused("loss ** exponent"), _refused("base ** loss")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __mod__ = __rmod__ = _refused("%")
    __matmul__ = __rmatmul__ = _refused("@")
    __abs__, __pos__, __round__ = _refused("abs()"), _refused("unary +"), _refused("round()")
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self) -> LossTensor:
        return ComputedLoss(self, operator.neg, -1.0)

    def __getattr__(self, name: str) -> Any:
        """Refuse what torch's tensors have and a loss has not."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise LossOperationError(f"{name!r}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.item(), dtype or np.float32)

    def __float__(self) -> float:
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, LossTensor) else self.item() == other

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        shown = "pending" if self._value is None else repr(self._value)
        return f"<{type(self).__name__} {shown}>"


class ComputedLoss(LossTensor):
    """A loss after float32 operations with numbers.

    `change` is the derivative with respect to `loss`, None if it was detached.
    """

    __slots__ = ("_change", "_loss", "_steps")

    def __init__(
        self, loss: LossTensor, step: Callable[[Any], Any] | None, change: float | None
    ) -> None:
        super().__init__(None, None)
        self._loss = loss
        self._steps: tuple[Callable[[Any], Any], ...] = () if step is None else (step,)
        self._change = change
        # Extend the steps of a computed loss, so that chains do not nest.
        if isinstance(loss, ComputedLoss):
            self._loss, self._steps = loss._loss, loss._steps + self._steps
            if change is not None:
                self._change = None if loss._change is None else loss._change * change

    def item(self) -> float:
        if self._value is None:
            value = np.float32(self._loss.item())
            with np.errstate(all="ignore"):
                for step in self._steps:
                    value = step(value)
            self._value = float(value)
        return self._value

    def backward(self, **options: Any) -> None:
        """Run the backward pass of the original loss, scaled.

        Raises `UsageError` for a detached loss, and as `LossTensor.backward`.
        """
        _refuse_options(options)
        if self._change is None:
            raise UsageError(
                "backward() was called on a detached loss",
                remedy="call backward() of the loss itself",
            )
        if not math.isfinite(self._change):
            raise UsageError(
                "the derivative of this value with respect to its loss is not finite",
                got=f"{self._change}, for a loss of {self._loss.item()}",
            )
        self._loss.training.backward_of(self._loss, self._change)


# --------------------------------------------------------------------------------------------------
# Predictions


class TensorFuture(PendingValue):
    """The prediction of a model in training for one batch."""

    __slots__ = ("_instance", "number")

    def __init__(self, instance: ModelInTraining, tensor: Tensor, number: int) -> None:
        super().__init__(tensor, instance.capture_call)
        self._instance = weakref.ref(instance)
        self.number = number

    @property
    def instance(self) -> ModelInTraining:
        """The training that predicted it; raises `TaskError` if it has ended."""
        return live_training(self._instance())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Compute a loss of torch by the model's loss program; capture other functions."""
        if not is_loss_call(function):
            return super().__torch_function__(function, types, arguments, named)
        call = loss_of_call(function, arguments, named or {})
        if not isinstance(call.pred, cls):
            raise UsageError(
                "the first argument of a loss is the prediction, the second the labels",
                got=f"{function.__name__}({type(call.pred).__name__}, ...)",
            )
        return call.pred.loss_with(call.loss, call.label)

    def loss_with(self, loss: Loss, label: Any) -> LossTensor:
        """Queue the loss; raise `UsageError` if the model has another loss, or was called again."""
        instance = self.instance
        if loss is not instance.loss_fn and loss.config() != instance.loss_fn.config():
            raise UsageError(
                "the model was compiled with another loss",
                expected=repr(instance.loss_fn), got=repr(loss),
            )  # fmt: skip
        if self.number != instance.forwards:
            raise UsageError(
                "this is not the model's last prediction: its activations were released",
                remedy="call loss_fn(pred, label) before the model is called again",
            )
        return instance.compute_loss(label)

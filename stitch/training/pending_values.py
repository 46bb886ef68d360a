"""`PendingValue`: a tensor on a device that is computed with before it is there.

What was compiled for operands like these once is kept. A function of torch's is captured by the
front end, which is given.
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


# --------------------------------------------------------------------------------------------------
# Losses as tensors


class SupportsBackward(Protocol):
    """What a loss asks of the training that it belongs to."""

    def backward_of(self, loss: LossTensor, by: float) -> None:
        """Queue the backward program for a loss, its gradients multiplied by a number."""


_T = TypeVar("_T")


def still_on(training: _T | None) -> _T:
    """The training of a prediction or a loss; raises `TaskError` where it has ended with its model.

    Neither keeps it alive: a loop's last `pred` and `loss` outlive the model in a notebook.
    """
    if training is None:
        raise TaskError(
            "the training has ended: the compiled model that it belongs to is gone",
            remedy="keep the model for as long as its predictions and losses are used",
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
    """A number, also of NumPy or torch; None for what is none.

    Raises `UsageError` for another loss, and for what has a gradient: backward goes to neither.
    """
    has_gradient = isinstance(value, PendingValue) or getattr(value, "requires_grad", False)
    if has_gradient or isinstance(value, LossTensor):
        raise UsageError(
            "a loss is computed with numbers only: backward() goes back from one loss",
            got=type(value).__name__,
            remedy="float(value) is its number; backward() of each loss, before the next call of "
            "the model, adds up gradients; a penalty on weights or outputs belongs into the module "
            "(loss=stitch.losses.IdentityLoss() takes what it gives as the loss)",
        )
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else value
    return float(number) if isinstance(number, int | float) else None


class LossTensor:
    """A scalar loss. `item` reads it; `backward` queues the backward program, once.

    `+ - * /` with a number gives a loss too: `(loss / 4).backward()` goes back with a quarter of
    the gradients.
    """

    __slots__ = ("_tensor", "_training", "_value")
    #: NumPy's numbers leave operators to it.
    __array_priority__ = 1000

    def __init__(self, training: SupportsBackward | None, tensor: Tensor | None) -> None:
        """`training` is not kept alive: it ends with its model, whoever still has its losses."""
        self._training = None if training is None else weakref.ref(training)
        self._tensor = tensor
        self._value: float | None = None

    def backward(self) -> None:
        """Queue the gradients of all parameters; they are added to those that are there already.

        Raises `UsageError` a second time, and for a loss that is not the last one.
        """
        self.training.backward_of(self, 1.0)

    @property
    def training(self) -> SupportsBackward:
        """The training that it belongs to; raises `TaskError` where that has ended."""
        assert self._training is not None, "what is not computed was judged"
        return still_on(self._training())

    def wait(self) -> LossTensor:
        """Run what is queued until it is there; gives it back. Raises what a failed task raised."""
        self.item()
        return self

    def item(self) -> float:
        """The loss as a Python number; runs what is queued, the first time."""
        tensor = self._tensor
        if tensor is not None:
            self._value = float(tensor.numpy())
            # A caller that keeps all losses keeps numbers, not places on the device.
            self._tensor = None
        assert self._value is not None
        return self._value

    def numpy(self) -> Array:
        """The loss as an array without axes."""
        return np.asarray(self.item(), np.float32)

    def detach(self) -> LossTensor:
        """Its number as a loss that nothing goes back from."""
        return ComputedLoss(self, None, None)

    def cpu(self) -> LossTensor:
        """Itself: what reads it has its number."""
        return self

    __add__ = __radd__ = _loss_operator(operator.add, lambda number: 1.0)
    __sub__ = _loss_operator(operator.sub, lambda number: 1.0)
    __rsub__ = _loss_operator(lambda loss, number: number - loss, lambda number: -1.0)
    __mul__ = __rmul__ = _loss_operator(operator.mul, lambda number: number)
    __truediv__ = _loss_operator(
        operator.truediv, lambda number: 1.0 / number if number else math.inf
    )
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self) -> LossTensor:
        return ComputedLoss(self, operator.neg, -1.0)

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
    """A loss after operations with numbers, in float32 as losses are.

    `change`: by how much it changes with `loss`; None where it was detached.
    """

    __slots__ = ("_change", "_loss", "_steps")

    def __init__(
        self, loss: LossTensor, step: Callable[[Any], Any] | None, change: float | None
    ) -> None:
        super().__init__(None, None)
        self._loss = loss
        self._steps: tuple[Callable[[Any], Any], ...] = () if step is None else (step,)
        self._change = change
        # What is computed from a computed loss continues its steps: chains do not get deeper.
        if isinstance(loss, ComputedLoss):
            self._loss, self._steps = loss._loss, loss._steps + self._steps
            if change is not None:
                self._change = None if loss._change is None else loss._change * change

    def item(self) -> float:
        """Its number; runs what is queued, the first time."""
        if self._value is None:
            value = np.float32(self._loss.item())
            with np.errstate(all="ignore"):
                for step in self._steps:
                    value = step(value)
            self._value = float(value)
        return self._value

    def backward(self) -> None:
        """Go back from the loss that it was computed from.

        Raises `UsageError` where it was detached, and as that loss does.
        """
        if self._change is None:
            raise UsageError(
                "there is nothing to go back from: this loss was detached",
                remedy="call backward() of the loss itself",
            )
        if not math.isfinite(self._change):
            raise UsageError(
                "this value does not change with its loss by a finite number",
                got=f"{self._change}, where the loss is {self._loss.item()}",
            )
        self._loss.training.backward_of(self._loss, self._change)


# --------------------------------------------------------------------------------------------------
# Predictions before their loss


class ModelInTraining(Protocol):
    """What a prediction and its loss ask of the instance that made them."""

    @property
    def loss_fn(self) -> Loss: ...

    @property
    def capture_call(self) -> CaptureCall | None:
        """Makes graphs of torch's functions over what the model predicts."""

    @property
    def forwards(self) -> int:
        """How many batches the model was called with: the number of the last prediction."""

    def compute_loss(self, label: Any) -> LossTensor:
        """The loss of the last prediction."""


class TensorFuture(PendingValue):
    """What a model in training predicted for one batch; reading it runs what is queued, computing
    with it queues more."""

    __slots__ = ("_instance", "number")

    def __init__(self, instance: ModelInTraining, tensor: Tensor, number: int) -> None:
        super().__init__(tensor, instance.capture_call)
        self._instance = weakref.ref(instance)
        self.number = number

    @property
    def instance(self) -> ModelInTraining:
        """The training that made it; raises `TaskError` where that has ended."""
        return still_on(self._instance())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """What torch's functions do with a prediction: losses judge it, others compute with it."""
        if not is_loss_call(function):
            return super().__torch_function__(function, types, arguments, named)
        call = loss_of_call(function, arguments, named or {})
        if not isinstance(call.pred, cls):
            raise UsageError(
                "a loss takes the prediction first, then the labels",
                got=f"{function.__name__}({type(call.pred).__name__}, ...)",
            )
        return call.pred.judged_by(call.loss, call.label)

    def judged_by(self, loss: Loss, label: Any) -> LossTensor:
        """Its loss; raises `UsageError` for another loss, and where it is not the last one."""
        instance = self.instance
        if loss is not instance.loss_fn and loss.config() != instance.loss_fn.config():
            raise UsageError(
                "the model was compiled with another loss",
                expected=repr(instance.loss_fn),
                got=repr(loss),
            )
        if self.number != instance.forwards:
            raise UsageError(
                "this prediction is not the last one: its saved activations are gone",
                remedy="call loss_fn(pred, label) before the model is called again",
            )
        return instance.compute_loss(label)

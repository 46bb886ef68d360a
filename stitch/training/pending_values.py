"""`PendingValue`: a tensor on a device, computed when it is read; `LossTensor`: a pending loss;
`Prediction`: what a loss is computed of."""

from __future__ import annotations

import math
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import Array
from stitch.runtime import Tensor
from stitch.training.from_torch import is_loss_call, loss_of_call
from stitch.training.losses import Loss
from stitch.training.views import (
    VIEWS,
    View,
    shape_after,
    step_of_call,
    step_of_index,
    view_text,
    viewed,
)

if TYPE_CHECKING:
    from stitch.training.instance import TrainingInstance


class PredictionArray(np.ndarray[Any, Any]):
    """Elements of a prediction, and what is computed from them by NumPy; a loss refuses them as
    addends, as backward would ignore their gradients."""


def _operators(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return an operator and its reflected form."""

    def forward(self: ReadValue, other: Any) -> Any:
        return function(self.elements(), _elements(other))

    def reflected(self: ReadValue, other: Any) -> Any:
        return function(_elements(other), self.elements())

    return forward, reflected


class ReadValue(ABC):
    """A value whose operators, indexing, methods and functions read its elements: torch computes
    with them if it is loaded, else NumPy."""

    __slots__ = ()
    #: Makes NumPy use the operators of this class.
    __array_priority__ = 1000
    #: Whether losses depend on it.
    has_gradient = False

    @abstractmethod
    def elements(self) -> Any:
        """Return the elements as a new tensor of torch if it is loaded, else as an array."""

    __add__, __radd__ = _operators(operator.add)
    __sub__, __rsub__ = _operators(operator.sub)
    __mul__, __rmul__ = _operators(operator.mul)
    __truediv__, __rtruediv__ = _operators(operator.truediv)
    __floordiv__, __rfloordiv__ = _operators(operator.floordiv)
    __mod__, __rmod__ = _operators(operator.mod)
    __pow__, __rpow__ = _operators(operator.pow)
    __matmul__, __rmatmul__ = _operators(operator.matmul)
    __lt__, __gt__ = _operators(operator.lt)
    __le__, __ge__ = _operators(operator.le)
    __and__, __rand__ = _operators(operator.and_)
    __or__, __ror__ = _operators(operator.or_)
    __xor__, __rxor__ = _operators(operator.xor)

    def __invert__(self) -> Any:
        return ~self.elements()

    def __neg__(self) -> Any:
        return -self.elements()

    def __abs__(self) -> Any:
        return abs(self.elements())

    def __getitem__(self, index: Any) -> Any:
        return self.elements()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements())

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the elements: of a tensor of torch if it is loaded, else of an
        array."""
        torch = sys.modules.get("torch")
        kind: Any = np.ndarray if torch is None else torch.Tensor
        if name.startswith("_") or not hasattr(kind, name):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        _refuse_in_place(name)
        if not callable(getattr(kind, name)):
            return getattr(self.elements(), name)
        return lambda *arguments, **named: getattr(self.elements(), name)(*arguments, **named)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Call a function of torch on the elements of pending values."""
        _refuse_in_place(getattr(function, "__name__", ""))
        return function(*_elements(arguments), **_elements(named or {}))


class PendingValue(ReadValue):
    """A pending value on a device; reading it runs the queue.

    `tensor` is the device's tensor, which other programs accept as input.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

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

    def elements(self) -> Any:
        """Return the elements as a new tensor of torch if it is loaded, else as an array."""
        array, torch = self.numpy(), sys.modules.get("torch")
        if torch is None:
            return array.view(PredictionArray) if self.has_gradient else array
        if array.dtype.kind not in "biufc":  # NumPy's types beside its own, such as bfloat16.
            array = array.astype(np.float32)
        found = torch.from_numpy(array).to(getattr(torch, self.tensor.data_type.value))
        return refusing_backward(found) if self.has_gradient else found

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


def _elements(value: Any) -> Any:
    """Return a value, or nested ones, with the elements of pending values in their place."""
    if isinstance(value, ReadValue):
        return value.elements()
    if type(value) in (list, tuple):
        return type(value)(map(_elements, value))
    if isinstance(value, dict):
        return {name: _elements(one) for name, one in value.items()}
    torch = sys.modules.get("torch")
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return value if torch is None or not is_array else torch.from_numpy(value)


#: Methods of torch that change or keep the gradient of a tensor.
_OF_GRADIENT = frozenset({"backward", "register_hook", "retain_grad"})


def _refuse_in_place(name: str) -> None:
    """Raise `UsageError` for methods of torch that write in place, or to the gradient."""
    if name in _OF_GRADIENT or (name.endswith("_") and not name.endswith("__")):
        raise UsageError(
            f"a value computed from a prediction does not support {name}()",
            remedy="call backward() on loss_fn(pred, y) with the prediction itself, the one tensor "
            "that the module returns, or a view of it; or read value.numpy()",
        )


def refusing_backward(found: Any) -> Any:
    """Return a torch tensor of a prediction, whose backward raises `UsageError`."""
    if found.is_floating_point() and sys.modules["torch"].is_grad_enabled():
        found.requires_grad_().register_hook(_refuse_gradient)
    return found


def _refuse_gradient(gradient: Any) -> None:
    """Raise `UsageError` when torch's backward reaches a prediction."""
    _refuse_in_place("backward")


# --------------------------------------------------------------------------------------------------
# Losses as tensors


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
    def method(self: LossTensor, other: Any) -> bool:
        return compare(self.item(), other.item() if hasattr(other, "item") else other)

    return method


def _number(value: Any) -> float | None:
    """Return a number, also of NumPy or torch; None for other values.

    Raises `UsageError` for another loss or a value with a gradient, which backward would ignore.
    """
    if isinstance(value, ComputedLoss) and value.is_detached:
        return value.item()
    of_prediction = isinstance(value, ReadValue | PredictionArray | LossTensor)
    if of_prediction or getattr(value, "requires_grad", False):
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


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options of torch's `backward` that are set."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise UsageError(
            "backward() of a loss takes no options: it goes back once",
            got=", ".join(given),
            remedy="loss.backward(), and for more gradients another call of the model",
        )


class Differentiating(Protocol):
    """A training: `backward_of` computes the gradients of a loss, times `by`."""

    def backward_of(self, loss: LossTensor, by: float) -> None: ...


class Readable(Protocol):
    """What has the elements of a tensor once they are computed."""

    def numpy(self) -> Array: ...


class LossTensor:
    """A scalar loss: `item` reads it, `backward` queues the backward program, once.

    `+ - * /` with numbers return losses: `(loss / 4).backward()` scales the gradients by 1/4.
    """

    __slots__ = ("_tensor", "_training", "_value")
    #: Makes NumPy use the operators of this class.
    __array_priority__ = 1000

    def __init__(self, training: Differentiating | None, tensor: Readable | None) -> None:
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
    def training(self) -> Differentiating:
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

    @property
    def is_detached(self) -> bool:
        """Whether it has no backward pass."""
        return self._change is None

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


class Prediction(ReadValue):
    """A prediction, or a view of one: losses of torch and of Stitch take it.

    Methods of torch that change shapes, and indices as `[..., :-1, :]`, return views of it.
    """

    __slots__ = ()
    has_gradient = True

    @abstractmethod
    def loss_with(self, loss: Loss, label: Any) -> LossTensor:
        """Queue a loss of this prediction."""

    @abstractmethod
    def numpy(self) -> Array:
        """Return the elements as an array."""

    @abstractmethod
    def wait(self) -> Self:
        """Wait for the elements, if they are queued."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape, which reads no elements."""

    @property
    def whole(self) -> tuple[Prediction, View]:
        """The prediction that this is a view of, and the view."""
        return self, ()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype)

    def __len__(self) -> int:
        return len(self.elements())

    def __bool__(self) -> bool:
        return bool(self.elements())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def __getitem__(self, index: Any) -> Any:
        whole, view = self.whole
        step = step_of_index(lambda: whole.shape, view, index)
        return super().__getitem__(index) if step is None else PredictionView(whole, (*view, step))

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in VIEWS:
            return partial(self._reshaped, name, found)
        if name in _OF_SHAPE and callable(found):  # Of torch.
            return partial(_OF_SHAPE[name], self.shape)
        # A loss computes in float32, and the elements are on the host.
        is_same = name == "float" and str(self.dtype).endswith("float32")
        if is_same or (name in ("contiguous", "cpu") and callable(found)):
            return lambda **_: self
        return found

    def _reshaped(self, name: str, read: Any, *arguments: Any, **named: Any) -> Any:
        whole, view = self.whole
        step = step_of_call(whole.shape, view, name, arguments, named)
        return read(*arguments, **named) if step is None else PredictionView(whole, (*view, step))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Compute a loss of torch, or return a view; call other functions on the elements."""
        if is_loss_call(function):
            call = loss_of_call(function, arguments, named or {})
            if not isinstance(call.pred, Prediction):
                raise UsageError(
                    "the first argument of a loss function is not the prediction",
                    got=f"{function.__name__}({type(call.pred).__name__}, ...)",
                    remedy="loss_fn(prediction, labels)",
                )
            return call.pred.loss_with(call.loss, call.label)
        name = getattr(function, "__name__", "")
        if name in VIEWS and arguments and isinstance(arguments[0], Prediction):
            return getattr(arguments[0], name)(*arguments[1:], **(named or {}))
        return super().__torch_function__(function, types, arguments, named)


#: Methods of torch that read the shape only.
_OF_SHAPE: dict[str, Callable[..., Any]] = {
    "dim": len, "numel": math.prod,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
}  # fmt: skip


class PredictionView(Prediction):
    """A prediction after shape operations, which become a part of its loss."""

    __slots__ = ("__weakref__", "_steps", "_whole")

    def __init__(self, whole: Prediction, steps: View) -> None:
        self._whole, self._steps = whole, steps

    @property
    def whole(self) -> tuple[Prediction, View]:
        return self._whole, self._steps

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_after(self._whole.shape, self._steps)

    def loss_with(self, loss: Loss, label: Any) -> LossTensor:
        return self._whole.loss_with(loss.of_view(self._steps), label)

    def elements(self) -> Any:
        return viewed(self._whole.elements(), self._steps)

    def numpy(self) -> Array:
        array: Array = viewed(self._whole.numpy(), self._steps)
        return array

    def wait(self) -> Self:
        self._whole.wait()
        return self

    __eq__, __ne__ = _operators(operator.eq)[0], _operators(operator.ne)[0]
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {view_text(self._steps)} of {self._whole!r}>"


class TensorFuture(PendingValue, Prediction):
    """The prediction of a model in training for one batch."""

    __slots__ = ("_instance", "number")

    def __init__(self, instance: TrainingInstance, tensor: Tensor, number: int) -> None:
        super().__init__(tensor)
        self._instance = weakref.ref(instance)
        self.number = number

    @property
    def instance(self) -> TrainingInstance:
        """The training that predicted it; raises `TaskError` if it has ended."""
        return live_training(self._instance())

    def loss_with(self, loss: Loss, label: Any) -> LossTensor:
        """Queue the loss; raise `UsageError` if the model has another loss, or was called again."""
        instance = self.instance
        if loss is not instance.loss_fn and loss.config() != instance.loss_fn.config():
            raise UsageError(
                "the model was compiled with another loss",
                expected=repr(instance.loss_fn), got=repr(loss),
                remedy="compile it with that loss, or a torch module without loss=: its first loss "
                "is the model's",
            )  # fmt: skip
        if self.number != instance.forwards:
            raise UsageError(
                "this is not the model's last prediction: its activations were released",
                remedy="call loss_fn(pred, label) before the model is called again",
            )
        return instance.compute_loss(label)

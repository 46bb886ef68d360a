"""`LossTensor`: the loss of a batch, read as a number and gone back from.

Sums, differences, products and quotients with numbers are losses too. Whatever else is to be
computed with a loss is computed with its number, `float(loss)`.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import Array
from stitch.runtime import Tensor
from stitch.training.pending_values import PendingValue


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


def _operator(compute: Callable[[Any, Any], Any], change: Callable[[float], float]) -> Any:
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

    __add__ = __radd__ = _operator(operator.add, lambda number: 1.0)
    __sub__ = _operator(operator.sub, lambda number: 1.0)
    __rsub__ = _operator(lambda loss, number: number - loss, lambda number: -1.0)
    __mul__ = __rmul__ = _operator(operator.mul, lambda number: number)
    __truediv__ = _operator(operator.truediv, lambda number: 1.0 / number if number else math.inf)
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

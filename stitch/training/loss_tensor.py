"""`LossTensor`: the loss of a batch, which is read, computed with, and gone back from.

Comes in: a loss's tensor and the training that it belongs to; numbers. Goes out: the loss as a
number; further losses by arithmetic, whose `backward` goes back by the chain rule. Must not know:
programs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import Array
from stitch.runtime import Tensor
from stitch.training.pending_values import PendingValue


class GoesBack(Protocol):
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


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """What is done with operands, and by how much the result changes with each of them.

    Derivatives are given the operands as they are: one that needs no value reads none.
    """

    value: Callable[..., Any]
    derivatives: tuple[Callable[..., float], ...]


def _real(operand: Any) -> Any:
    """As a number whose quotient by 0 is infinite, as that of torch's numbers is."""
    return np.float64(float(operand))


_ADD = _Arithmetic(np.add, (lambda a, b: 1.0, lambda a, b: 1.0))
_SUB = _Arithmetic(np.subtract, (lambda a, b: 1.0, lambda a, b: -1.0))
_MUL = _Arithmetic(np.multiply, (lambda a, b: _real(b), lambda a, b: _real(a)))
_DIV = _Arithmetic(np.divide, (lambda a, b: 1.0 / _real(b), lambda a, b: -_real(a) / _real(b) ** 2))
_POW = _Arithmetic(
    np.power,
    (
        # What is constant does not change, where the rule would be 0 times infinity.
        lambda a, b: _real(b) * _real(a) ** (_real(b) - 1.0) if float(b) else 0.0,
        lambda a, b: _real(a) ** _real(b) * np.log(_real(a)) if float(a) or float(b) < 0 else 0.0,
    ),
)
_NEG = _Arithmetic(np.negative, (lambda a: -1.0,))
_ABS = _Arithmetic(np.abs, (lambda a: np.sign(_real(a)),))
_DETACHED = _Arithmetic(np.positive, ())


def _operator(arithmetic: _Arithmetic, *, reflected: bool = False) -> Any:
    def method(self: LossTensor, other: Any) -> Any:
        operand = _operand(other)
        if operand is None:
            return NotImplemented
        return ComputedLoss(arithmetic, (operand, self) if reflected else (self, operand))

    return method


def _comparison(compare: Callable[[float, float], bool]) -> Any:
    def method(self: LossTensor, other: Any) -> Any:
        operand = _operand(other)
        return NotImplemented if operand is None else compare(float(self), float(operand))

    return method


def _operand(value: Any) -> LossTensor | float | None:
    """A loss or a number; raises `UsageError` for what has a gradient, which is not gone back to.

    None for what is neither.
    """
    if isinstance(value, LossTensor):
        return value
    if isinstance(value, PendingValue) or getattr(value, "requires_grad", False):
        raise UsageError(
            "a loss is computed with numbers and other losses: nothing goes back to this value",
            got=type(value).__name__,
            remedy="make it a part of the module (loss=stitch.losses.IdentityLoss() takes what it "
            "gives as the loss), or give its number: .item()",
        )
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else value
    return float(number) if isinstance(number, int | float) else None


class LossTensor:
    """A scalar loss. `item` reads it; `backward` queues the backward program, once.

    Arithmetic with numbers gives losses too: `(loss / 4).backward()` goes back with a quarter of
    the gradients.
    """

    __slots__ = ("_tensor", "_training", "_value")
    #: NumPy's numbers leave operators to it.
    __array_priority__ = 1000

    def __init__(self, training: GoesBack | None, tensor: Tensor | None) -> None:
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
    def training(self) -> GoesBack:
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

    def tolist(self) -> float:
        """The same."""
        return self.item()

    def numpy(self) -> Array:
        """The loss as an array without axes."""
        return np.asarray(self.item(), np.float32)

    def detach(self) -> LossTensor:
        """Its number as a loss that nothing goes back from."""
        return ComputedLoss(_DETACHED, (self,))

    def cpu(self) -> LossTensor:
        """Itself: what reads it has its number."""
        return self

    __add__, __radd__ = _operator(_ADD), _operator(_ADD, reflected=True)
    __sub__, __rsub__ = _operator(_SUB), _operator(_SUB, reflected=True)
    __mul__, __rmul__ = _operator(_MUL), _operator(_MUL, reflected=True)
    __truediv__, __rtruediv__ = _operator(_DIV), _operator(_DIV, reflected=True)
    __pow__, __rpow__ = _operator(_POW), _operator(_POW, reflected=True)
    __lt__, __le__ = _comparison(lambda a, b: a < b), _comparison(lambda a, b: a <= b)
    __gt__, __ge__ = _comparison(lambda a, b: a > b), _comparison(lambda a, b: a >= b)

    def __neg__(self) -> LossTensor:
        return ComputedLoss(_NEG, (self,))

    def __pos__(self) -> LossTensor:
        return self

    def __abs__(self) -> LossTensor:
        return ComputedLoss(_ABS, (self,))

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.item(), dtype or np.float32)

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

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
    """What was computed from losses and numbers, in float32 as the losses are."""

    __slots__ = ("_arithmetic", "_operands")

    def __init__(self, arithmetic: _Arithmetic, operands: Sequence[LossTensor | float]) -> None:
        super().__init__(None, None)
        self._arithmetic, self._operands = arithmetic, tuple(operands)

    def item(self) -> float:
        """Its number; sums that grew over many steps are as deep, so no call goes into another."""
        stack = [self]
        while stack:
            node = stack[-1]
            if node._value is None:
                waited_for = [
                    o for o in node._operands if isinstance(o, ComputedLoss) and o._value is None
                ]
                if waited_for:
                    stack += waited_for
                    continue
                numbers = [np.float32(float(operand)) for operand in node._operands]
                with np.errstate(all="ignore"):
                    node._value = float(node._arithmetic.value(*numbers))
            stack.pop()
        assert self._value is not None
        return self._value

    def backward(self) -> None:
        """Go back from the loss that it was computed from, by the chain rule.

        Raises `UsageError` where that is none, or more than one, and as that loss does.
        """
        changes: dict[LossTensor, float] = {self: 1.0}
        for node in self._in_order():
            change = changes.pop(node)
            pairs = zip(node._operands, node._arithmetic.derivatives, strict=False)
            for operand, derivative in pairs:
                if isinstance(operand, LossTensor):
                    with np.errstate(all="ignore"):
                        more = float(change * derivative(*node._operands))
                    changes[operand] = changes.get(operand, 0.0) + more
        if not changes:
            raise UsageError(
                "there is nothing to go back from: this loss was detached",
                remedy="call backward() of the loss itself",
            )
        if len(changes) > 1:
            raise UsageError(
                "backward() goes back from one loss: a later batch replaces the activations of "
                "the one before",
                got=f"a value that is computed from {len(changes)} losses",
                remedy="call backward() of each, before the model is called again: gradients are "
                "added up",
            )
        ((judged, change),) = changes.items()
        if not math.isfinite(change):
            raise UsageError(
                "this value does not change with its loss by a finite number",
                got=f"{change}, where the loss is {judged.item()}",
            )
        judged.training.backward_of(judged, change)

    def _in_order(self) -> list[ComputedLoss]:
        """This and what it was computed from by arithmetic, each before its own operands."""
        order: list[ComputedLoss] = []
        entered: set[LossTensor] = set()
        stack: list[tuple[ComputedLoss, bool]] = [(self, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif node not in entered:
                entered.add(node)
                stack.append((node, True))
                ways = zip(node._operands, node._arithmetic.derivatives, strict=False)
                stack += [(o, False) for o, _ in ways if isinstance(o, ComputedLoss)]
        return order[::-1]

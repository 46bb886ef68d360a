"""Losses of predictions and labels of one shape, element by element."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import numpy as np

from stitch.argument_kinds import NUMBER
from stitch.errors import CompileError, UsageError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType
from stitch.training.losses.loss import Loss, listed

#: The least probability that has a logarithm of its own: PyTorch's logarithms end at -100.
_LEAST = 3.783505853677006e-44


class _Elementwise(Loss):
    """Labels like the prediction; mean or sum of one number for each element."""

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType(pred.shape, DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._reduced(b, self.each(b, pred, label))

    @abstractmethod
    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        """The loss of every element."""

    def _broadcast(self, word: str, weights: Array | None, each: Any) -> Array | None:
        """Weights, if they go with the elements; raises `CompileError`."""
        shape = tuple(each.shape)
        if weights is not None and np.broadcast_shapes(weights.shape, shape) != shape:
            raise CompileError(
                f"{word} of {type(self).__name__} goes with the elements of the prediction",
                expected=str(list(shape)), got=str(list(weights.shape)),
            )  # fmt: skip
        return weights


@final
class MSELoss(_Elementwise):
    """Squared differences, their mean or sum (`torch.nn.MSELoss`); labels like the prediction."""

    name = "mse"

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        difference = pred - label
        return difference * difference


@final
class L1Loss(_Elementwise):
    """Absolute differences, their mean or sum (`torch.nn.L1Loss`)."""

    name = "l1"

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        return b.op("Abs", pred - label)


class _Bent(_Elementwise):
    """Squared differences up to a bend, absolute ones beyond it."""

    def _bend(self, word: str, value: float, *, may_be_zero: bool) -> float:
        NUMBER.check(type(self).__name__, word, value)
        if not (value > 0 or (may_be_zero and value == 0)):
            least = "at least 0" if may_be_zero else "above 0"
            raise UsageError(f"{word} of {type(self).__name__} is {least}", got=str(value))
        return float(value)


@final
class SmoothL1Loss(_Bent):
    """`torch.nn.SmoothL1Loss`: d² / (2 beta) below beta, d - beta / 2 from there."""

    name = "smooth_l1"

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = self._bend("beta", beta, may_be_zero=True)

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        distance, beta = b.op("Abs", pred - label), np.float32(self.beta)
        if not beta:
            return distance
        bent = b.op("Min", distance, beta)
        return bent / beta * (distance - bent * 0.5)

    def settings(self) -> dict[str, Any]:
        return {"beta": self.beta}


@final
class HuberLoss(_Bent):
    """`torch.nn.HuberLoss`: d² / 2 below delta, delta (d - delta / 2) from there."""

    name = "huber"

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = self._bend("delta", delta, may_be_zero=False)

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        distance = b.op("Abs", pred - label)
        bent = b.op("Min", distance, np.float32(self.delta))
        return bent * (distance - bent * 0.5)

    def settings(self) -> dict[str, Any]:
        return {"delta": self.delta}


@final
class BCELoss(_Elementwise):
    """`torch.nn.BCELoss`: probabilities and labels in [0, 1]; logarithms end at -100."""

    name = "bce"

    def __init__(self, reduction: str = "mean", weight: Any = None) -> None:
        super().__init__(reduction)
        self.weight = self._weights("weight", weight)

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        yes = b.op("Log", b.op("Max", pred, _LEAST))
        no = b.op("Log", b.op("Max", 1.0 - pred, _LEAST))
        each = -(label * yes + (1.0 - label) * no)
        weight = self._broadcast("weight", self.weight, pred)
        return each if weight is None else each * b.constant(weight)

    def settings(self) -> dict[str, Any]:
        return listed(weight=self.weight)


@final
class BCEWithLogitsLoss(_Elementwise):
    """`torch.nn.BCEWithLogitsLoss`: logits and probabilities of one shape, no overflow.

    `pos_weight`: by how much labels of 1 count; `weight`: by how much each element does.
    """

    name = "bce_with_logits"

    def __init__(self, reduction: str = "mean", weight: Any = None, pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.weight = self._weights("weight", weight)
        self.pos_weight = self._weights("pos_weight", pos_weight)

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        # log(1 + e^x) - x y, with softplus as max(x, 0) + log(1 + e^-|x|), which never overflows.
        magnitude = b.op("Abs", pred)
        tail = b.op("Log", b.op("Exp", -magnitude) + 1.0)
        positive = self._broadcast("pos_weight", self.pos_weight, pred)
        if positive is None:
            each = b.op("Relu", pred) - pred * label + tail
        else:
            share = label * b.constant(positive - np.float32(1)) + 1.0
            each = (1.0 - label) * pred + share * (tail + b.op("Relu", -pred))
        weight = self._broadcast("weight", self.weight, pred)
        return each if weight is None else each * b.constant(weight)

    def settings(self) -> dict[str, Any]:
        return listed(weight=self.weight, pos_weight=self.pos_weight)


@final
class IdentityLoss(Loss):
    """The prediction itself, its mean or sum, as the loss; labels are one number, not looked at."""

    name = "identity"

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType((), DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._reduced(b, pred)

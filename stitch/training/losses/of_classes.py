"""Losses of predictions with one number for each class along axis 1."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from stitch.argument_kinds import WHOLE
from stitch.errors import UsageError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType
from stitch.training.losses.loss import Loss, listed, require_classes


class _ClassNumbers(Loss):
    """Labels are numbers of classes; `weight` says by how much each class counts, labels of
    `ignore_index` count nothing."""

    def __init__(self, reduction: str, weight: Any, ignore_index: int | None) -> None:
        super().__init__(reduction)
        self.weight = self._weights("weight", weight)
        if ignore_index is not None:
            WHOLE.check(type(self).__name__, "ignore_index", ignore_index)
        self.ignore_index = None if ignore_index is None else int(ignore_index)

    def label_type(self, pred: ValueType) -> ValueType:
        require_classes(self, pred, self.weight)
        return ValueType((pred.shape[0], *pred.shape[2:]), DataType.INT64)

    def check_label(self, label: Array, pred: ValueType) -> None:
        if label.dtype.kind not in "iu":
            wanted = self.label_type(pred).text()
            raise self.refusal("labels are class indices", wanted, str(label.dtype))
        super().check_label(label, pred)
        classes = pred.shape[1]
        if not label.size or (label.min() >= 0 and label.max() < classes):
            return
        wrong = (label < 0) | (label >= classes)
        if self.ignore_index is not None:
            wrong &= label != self.ignore_index
        if wrong.any():
            bad = np.argwhere(wrong)[0]
            also = "" if self.ignore_index is None else f", or {self.ignore_index}"
            raise self.refusal(
                "a label is out of range",
                f"0 to {classes - 1}, for {classes} classes{also}",
                f"{label[tuple(bad)]} at {[int(i) for i in bad]}",
            )

    def settings(self) -> dict[str, Any]:
        ignored = {} if self.ignore_index is None else {"ignore_index": self.ignore_index}
        return listed(weight=self.weight) | ignored

    def _of_logarithms(
        self, b: ComputationGraphBuilder, logs: Any, label: Any, smoothing: float = 0.0
    ) -> SymbolicTensor:
        """The loss from the logarithms of probabilities: the weighted mean, or the sum."""
        label = b.unsqueeze(label, 1)
        counts: Any = None
        if self.ignore_index is not None:
            taken = b.op("Not", b.op("Equal", label, self.ignore_index))
            label, counts = (
                b.op("Where", taken, label, b.constant(np.int64(0))),
                b.cast(taken, DataType.FLOAT32),
            )
        picked = b.op("GatherElements", logs, label, axis=1)
        if self.weight is None and counts is None and not smoothing:
            return -self._reduced(b, picked)
        weights = counts
        if self.weight is not None:
            weights = b.op("Gather", b.constant(self.weight), label)
            weights = weights if counts is None else weights * counts
        total = self._sum(b, picked if weights is None else picked * weights)
        if smoothing:
            shape = [1, -1, *[1] * (len(logs.shape) - 2)]
            if self.weight is not None:
                logs = logs * b.constant(self.weight.reshape(shape))
            each = b.op("ReduceSum", logs, np.array([1], np.int64), keepdims=1)
            others = self._sum(b, each if counts is None else each * counts)
            total = total * (1.0 - smoothing) + others * (smoothing / logs.shape[1])
        if self.reduction == "sum":
            return -total
        if weights is None:
            return total * (-1.0 / float(np.prod(label.shape)))
        return -(total / self._sum(b, weights))

    def _sum(self, b: ComputationGraphBuilder, each: Any) -> SymbolicTensor:
        total = b.op("ReduceSum", each, keepdims=0)
        assert isinstance(total, SymbolicTensor)
        return total


@final
class CrossEntropyLoss(_ClassNumbers):
    """`torch.nn.CrossEntropyLoss` on logits [N, C, ...] and class indices [N, ...], int64."""

    name = "sparse_categorical_crossentropy"

    def __init__(
        self, reduction: str = "mean", weight: Any = None, ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(reduction, weight, ignore_index)
        self.label_smoothing = _smoothing(self, label_smoothing)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        logs = b.op("LogSoftmax", pred, axis=1)
        return self._of_logarithms(b, logs, label, self.label_smoothing)

    def settings(self) -> dict[str, Any]:
        smoothed = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        return super().settings() | smoothed


@final
class NLLLoss(_ClassNumbers):
    """`torch.nn.NLLLoss` on logarithms of probabilities [N, C, ...] and class indices [N, ...]."""

    name = "nll"

    def __init__(
        self, reduction: str = "mean", weight: Any = None, ignore_index: int | None = None
    ) -> None:
        super().__init__(reduction, weight, ignore_index)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._of_logarithms(b, pred, label)


@final
class CategoricalCrossEntropyLoss(Loss):
    """Cross-entropy of logits [N, C, ...] and class probabilities of the same shape.

    What `torch.nn.CrossEntropyLoss` does with floating targets: the mean divides by all but C.
    """

    name = "categorical_crossentropy"

    def __init__(
        self, reduction: str = "mean", weight: Any = None, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(reduction)
        self.weight = self._weights("weight", weight)
        self.label_smoothing = _smoothing(self, label_smoothing)

    def label_type(self, pred: ValueType) -> ValueType:
        require_classes(self, pred, self.weight)
        return ValueType(pred.shape, DataType.FLOAT32)

    def refusal(self, what: str, expected: str, got: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__}: {what}", expected=f"{expected}, the classes' probabilities",
            got=got, remedy="class numbers are integers: give label.long() to CrossEntropyLoss",
        )  # fmt: skip

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        if self.label_smoothing:
            share = self.label_smoothing / pred.shape[1]
            label = label * (1.0 - self.label_smoothing) + share
        picked = b.op("LogSoftmax", pred, axis=1) * label
        if self.weight is not None:
            shape = [1, -1, *[1] * (len(pred.shape) - 2)]
            picked = picked * b.constant(self.weight.reshape(shape))
        total = b.op("ReduceSum", picked, keepdims=0)
        assert isinstance(total, SymbolicTensor)
        count = np.prod([d for i, d in enumerate(pred.shape) if i != 1])
        return total * (-1.0 / float(count) if self.reduction == "mean" else -1.0)

    def settings(self) -> dict[str, Any]:
        smoothed = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        return listed(weight=self.weight) | smoothed


def _smoothing(loss: Loss, share: float) -> float:
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UsageError(f"label_smoothing of {type(loss).__name__} lies in [0, 1]",
                         got=repr(share))  # fmt: skip
    return float(share)

"""Losses: graphs (prediction, label) → a scalar, and what labels must be.

Comes in: the type of the prediction. Goes out: a computation graph with the inputs `pred` and
`label` and the output `loss`, a float32 scalar. Its gradient is the compiler's work. Must not know:
programs, devices, optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

import numpy as np

from stitch.argument_kinds import instance_of
from stitch.errors import CompileError, UsageError, closest
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType

REDUCTIONS = ("mean", "sum")


class Loss(ABC):
    """A loss function, before compilation and after: called with what a compiled model gave.

    `loss_fn(pred, label)` on a compiled model's prediction queues the loss program and gives a
    `LossTensor`; the model must have been compiled with this loss.
    """

    name: ClassVar[str]

    def __init__(self, reduction: str = "mean") -> None:
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise UsageError(
                f"{type(self).__name__} has no such reduction",
                expected=", ".join(REDUCTIONS),
                got=repr(reduction),
            )
        self.reduction = reduction

    @abstractmethod
    def label_type(self, pred: ValueType) -> ValueType:
        """Shape and type of the labels for a prediction; raises `CompileError` if it has none."""

    @abstractmethod
    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        """Write the loss down: float32 tensors in, a float32 scalar out."""

    def check_label(self, label: Array, pred: ValueType) -> None:
        """Raise `UsageError` where a host array cannot be this prediction's labels."""
        wanted = self.label_type(pred)
        if label.dtype.kind not in "fiub" and label.dtype != DataType.BFLOAT16.dtype:
            raise self.refusal("labels are numbers", wanted.text(), str(label.dtype))
        if label.shape != wanted.shape:
            raise self.refusal("labels have another shape", wanted.text(), str(list(label.shape)))

    def refusal(self, what: str, expected: str, got: str) -> UsageError:
        """The error for labels that this loss does not take."""
        return UsageError(f"{type(self).__name__}: {what}", expected=expected, got=got)

    def graph(self, pred: ValueType, pred_name: str = "pred") -> ComputationGraph:
        """The loss of a prediction of a type: inputs `pred_name` and `label`, output `loss`."""
        b = ComputationGraphBuilder(self.name)
        tensor = b.input(pred_name, pred.shape, pred.data_type)
        kind = self.label_type(pred)
        label = b.input("label", kind.shape, kind.data_type)
        b.output("loss", self.write(b, b.cast(tensor, DataType.FLOAT32), label))
        return b.build()

    def config(self) -> dict[str, Any]:
        """What `loss_from_config` makes this loss of again."""
        return {"loss": self.name, "reduction": self.reduction}

    def __call__(self, pred: Any, label: Any) -> Any:
        """The loss of a compiled model's prediction, as a `LossTensor`."""
        judge = getattr(pred, "judged_by", None)
        if judge is None:
            raise UsageError(
                "a loss takes the prediction of a model that was compiled for training",
                got=type(pred).__name__,
                remedy="compiled = stitch.compile(model, example, optimizer=..., loss=loss_fn)",
            )
        return judge(self, label)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reduction={self.reduction!r})"

    def _reduced(self, b: ComputationGraphBuilder, each: Any) -> SymbolicTensor:
        """Mean or sum over all elements."""
        reduced = b.op("ReduceMean" if self.reduction == "mean" else "ReduceSum", each, keepdims=0)
        assert isinstance(reduced, SymbolicTensor)
        return reduced


@final
class MSELoss(Loss):
    """Squared differences, their mean or sum (`torch.nn.MSELoss`); labels like the prediction."""

    name = "mse"

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType(pred.shape, DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        difference = pred - label
        return self._reduced(b, difference * difference)


@final
class CrossEntropyLoss(Loss):
    """`torch.nn.CrossEntropyLoss` on logits [N, C, ...] and class indices [N, ...], int64."""

    name = "sparse_categorical_crossentropy"

    def label_type(self, pred: ValueType) -> ValueType:
        _require_classes(self, pred)
        return ValueType((pred.shape[0], *pred.shape[2:]), DataType.INT64)

    def check_label(self, label: Array, pred: ValueType) -> None:
        if label.dtype.kind not in "iu":
            wanted = self.label_type(pred).text()
            raise self.refusal("labels are class indices", wanted, str(label.dtype))
        super().check_label(label, pred)
        classes = pred.shape[1]
        if label.size and (label.min() < 0 or label.max() >= classes):
            bad = np.argwhere((label < 0) | (label >= classes))[0]
            raise self.refusal(
                "a label is out of range",
                f"0 to {classes - 1}, for {classes} classes",
                f"{label[tuple(bad)]} at {[int(i) for i in bad]}",
            )

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        picked = b.op(
            "GatherElements", b.op("LogSoftmax", pred, axis=1), b.unsqueeze(label, 1), axis=1
        )
        return -self._reduced(b, picked)


@final
class CategoricalCrossEntropyLoss(Loss):
    """Cross-entropy of logits [N, C, ...] and class probabilities of the same shape.

    What `torch.nn.CrossEntropyLoss` does with floating targets: the mean divides by all but C.
    """

    name = "categorical_crossentropy"

    def label_type(self, pred: ValueType) -> ValueType:
        _require_classes(self, pred)
        return ValueType(pred.shape, DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        picked = b.op("LogSoftmax", pred, axis=1) * label
        total = b.op("ReduceSum", picked, keepdims=0)
        assert isinstance(total, SymbolicTensor)
        count = np.prod([d for i, d in enumerate(pred.shape) if i != 1])
        return total * (-1.0 / float(count) if self.reduction == "mean" else -1.0)


@final
class BCEWithLogitsLoss(Loss):
    """`torch.nn.BCEWithLogitsLoss`: logits and probabilities of one shape, no overflow."""

    name = "bce_with_logits"

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType(pred.shape, DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        # log(1 + e^x) - x y, with softplus as max(x, 0) + log(1 + e^-|x|), which never overflows.
        magnitude = b.op("Abs", pred)
        tail = b.op("Log", b.op("Exp", -magnitude) + 1.0)
        return self._reduced(b, b.op("Relu", pred) - pred * label + tail)


@final
class IdentityLoss(Loss):
    """The prediction itself, its mean or sum, as the loss; labels are one number, not looked at."""

    name = "identity"

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType((), DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._reduced(b, pred)


LOSSES: tuple[type[Loss], ...] = (
    MSELoss, CrossEntropyLoss, CategoricalCrossEntropyLoss, BCEWithLogitsLoss, IdentityLoss,
)  # fmt: skip
_BY_NAME: dict[str, type[Loss]] = {kind.name: kind for kind in LOSSES}
#: PyTorch's word is for class numbers, where ours that look like it are not.
_ALSO_CALLED = dict.fromkeys(("cross_entropy", "crossentropy"), CrossEntropyLoss.name)


#: What stands for a loss: `loss_from_config` takes it.
LOSS_KIND = instance_of("a loss of stitch.losses, its name, or a mapping", Loss, str, Mapping)


def loss_from_config(config: Loss | str | dict[str, Any]) -> Loss:
    """A loss by name (`mse`, `mse_sum` ...) or by what `Loss.config` gave; raises `UsageError`."""
    if isinstance(config, Loss):
        return config
    if isinstance(config, str):
        name, _, last = config.rpartition("_")
        config = {"loss": config}
        if last in REDUCTIONS and name in _BY_NAME:
            config = {"loss": name, "reduction": last}
    named = str(config.get("loss", ""))
    kind = _BY_NAME.get(named)
    if kind is None:
        raise UsageError(
            "no such loss",
            expected=", ".join(_BY_NAME) + ", each also with _mean or _sum",
            got=repr(named),
            remedy=closest(_ALSO_CALLED.get(named, named), _BY_NAME) or None,
        )
    return kind(config.get("reduction", "mean"))


def _require_classes(loss: Loss, pred: ValueType) -> None:
    if len(pred.shape) < 2:
        raise CompileError(
            f"{type(loss).__name__} takes logits [N, C, ...]",
            expected="two axes or more",
            got=pred.text(),
        )

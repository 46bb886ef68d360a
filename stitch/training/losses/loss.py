"""`Loss`: a graph (prediction, label) → a scalar, and what labels must be.

Its gradient is the compiler's work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from stitch.errors import CompileError, UsageError
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

    def settings(self) -> dict[str, Any]:
        """What it is told beside its reduction, where that says something."""
        return {}

    def config(self) -> dict[str, Any]:
        """What `loss_from_config` makes this loss of again."""
        return {"loss": self.name, "reduction": self.reduction, **self.settings()}

    def __call__(self, pred: Any, label: Any) -> Any:
        """The loss of a compiled model's prediction, as a `LossTensor`."""
        compute_loss = getattr(pred, "judged_by", None)
        if compute_loss is None:
            raise UsageError(
                "a loss takes the prediction of a model that was compiled for training",
                got=type(pred).__name__,
                remedy="compiled = stitch.compile(model, example, optimizer=..., loss=loss_fn)",
            )
        return compute_loss(self, label)

    def __repr__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}(reduction={self.reduction!r}{more})"

    def _reduced(self, b: ComputationGraphBuilder, each: Any) -> SymbolicTensor:
        """Mean or sum over all elements."""
        reduced = b.op("ReduceMean" if self.reduction == "mean" else "ReduceSum", each, keepdims=0)
        assert isinstance(reduced, SymbolicTensor)
        return reduced

    def _weights(self, word: str, given: Any) -> Array | None:
        """Numbers by which parts of the loss count; raises `UsageError` for what is none."""
        if given is None:
            return None
        try:
            array: Array = np.array(given, np.float32)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{word} of {type(self).__name__} holds numbers",
                             got=repr(given)[:60]) from error  # fmt: skip
        if not np.isfinite(array).all():
            raise UsageError(f"{word} of {type(self).__name__} holds finite numbers",
                             got=repr(given)[:60])  # fmt: skip
        return array


def require_classes(loss: Loss, pred: ValueType, weights: Array | None = None) -> None:
    """Raise `CompileError` where a prediction has no axis of classes, or another number of them
    than there are weights."""
    name = type(loss).__name__
    if len(pred.shape) < 2:
        raise CompileError(
            f"{name} takes logits [N, C, ...]", expected="two axes or more", got=pred.text()
        )
    if weights is not None and weights.shape != pred.shape[1:2]:
        raise CompileError(
            f"{name} takes a weight for each class",
            expected=f"{pred.shape[1]} numbers, for {pred.text()}",
            got=f"weight of shape {list(weights.shape)}",
        )


def listed(**weights: Array | None) -> dict[str, Any]:
    """Weights as plain data, where there are any."""
    return {word: array.tolist() for word, array in weights.items() if array is not None}

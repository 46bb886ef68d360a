"""Loss functions: graphs from prediction and label to a scalar, and checks of labels."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, final

import numpy as np

from stitch.argument_kinds import NUMBER, WHOLE, instance_of
from stitch.errors import CompileError, UsageError, unknown
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType
from stitch.training.views import (
    View,
    view_config,
    view_from_config,
    view_text,
    viewed,
    viewed_type,
)

REDUCTIONS = ("mean", "sum")


class Loss(ABC):
    """A loss function, passed to `stitch.compile` and called in the training loop.

    `loss_fn(pred, label)` on the prediction of a model that was compiled with this loss queues the
    loss program and returns a `LossTensor`.
    """

    name: ClassVar[str]
    #: The shape operations between the prediction and the loss.
    view: View = ()

    def __init__(self, reduction: str = "mean") -> None:
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise UsageError(
                f"reduction of {type(self).__name__} is unknown",
                expected=", ".join(REDUCTIONS),
                got=repr(reduction),
            )
        self.reduction = reduction

    def of_view(self, view: View) -> Self:
        """Return this loss of a view of the prediction."""
        if not view:
            return self
        loss = copy.copy(self)
        loss.view = view
        return loss

    @abstractmethod
    def label_type(self, pred: ValueType) -> ValueType:
        """Return shape and type of the labels for a view of the prediction; raise `CompileError`
        if it is invalid."""

    @abstractmethod
    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        """Write the loss of a view of the prediction: float32 tensors in, a float32 scalar out."""

    @final
    def check_label(self, label: Array, pred: ValueType) -> None:
        """Raise `UsageError` if an array cannot be the labels of a prediction."""
        self._check_label(label, viewed_type(pred, self.view))

    def _check_label(self, label: Array, pred: ValueType) -> None:
        expected = self.label_type(pred)
        if label.dtype.kind not in "fiub" and label.dtype != DataType.BFLOAT16.dtype:
            raise self.refusal("labels are not numbers", expected.text(), str(label.dtype))
        if label.shape != expected.shape:
            raise self.refusal("labels have another shape", expected.text(), str(list(label.shape)))

    def refusal(self, what: str, expected: str, got: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__}: {what}", expected=expected, got=got,
            remedy="pass the labels of the batch that the prediction was made of, one for each row",
        )  # fmt: skip

    def graph(self, pred: ValueType, pred_name: str = "pred") -> ComputationGraph:
        """Return the loss as a graph with inputs `pred_name` and `label` and output `loss`."""
        b = ComputationGraphBuilder(self.name)
        tensor = b.input(pred_name, pred.shape, pred.data_type)
        kind = self.label_type(viewed_type(pred, self.view))
        label = b.input("label", kind.shape, kind.data_type)
        view = viewed(b.cast(tensor, DataType.FLOAT32), self.view)
        b.output("loss", self.write(b, view, label))
        return b.build()

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments beside `reduction` that differ from their defaults."""
        words = inspect.signature(type(self)).parameters
        values = {word: getattr(self, word) for word in words if word != "reduction"}
        return {
            word: value.tolist() if isinstance(value, np.ndarray) else value
            for word, value in values.items()
            if value is not None and (isinstance(value, np.ndarray) or value != words[word].default)
        }

    def config(self) -> dict[str, Any]:
        """Return the configuration that `loss_from_config` accepts."""
        view = {"view": view_config(self.view)} if self.view else {}
        return {"loss": self.name, "reduction": self.reduction, **self.settings(), **view}

    def __call__(self, pred: Any, label: Any) -> Any:
        """Queue the loss of a compiled model's prediction; return a `LossTensor`."""
        compute_loss = getattr(pred, "loss_with", None)
        if compute_loss is None:
            raise UsageError(
                f"{type(self).__name__} was not called on the prediction of a compiled model",
                got=type(pred).__name__,
                remedy="compiled = stitch.compile(model, example, optimizer=..., loss=loss_fn)",
            )
        return compute_loss(self, label)

    def __repr__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.settings().items())
        of = f" of {view_text(self.view)}" if self.view else ""
        return f"{type(self).__name__}(reduction={self.reduction!r}{more}){of}"

    def _reduced(self, b: ComputationGraphBuilder, each: Any) -> SymbolicTensor:
        return _scalar(b, "ReduceMean" if self.reduction == "mean" else "ReduceSum", each)

    def _weights(self, word: str, weights: Any) -> Array | None:
        """Return weights as an array; raise `UsageError` if they are not finite numbers."""
        if weights is None:
            return None
        try:
            array: Array = np.array(weights, np.float32)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{word} of {type(self).__name__} must be numbers",
                             got=repr(weights)[:60]) from error  # fmt: skip
        if not np.isfinite(array).all():
            raise UsageError(f"{word} of {type(self).__name__} must be finite",
                             got=repr(weights)[:60])  # fmt: skip
        return array


def _scalar(b: ComputationGraphBuilder, op: str, each: Any) -> SymbolicTensor:
    reduced = b.op(op, each, keepdims=0)
    assert isinstance(reduced, SymbolicTensor)
    return reduced


def require_classes(loss: Loss, pred: ValueType, weights: Array | None = None) -> None:
    """Raise `CompileError` for a prediction without a class axis, or with a class count that
    differs from the number of weights."""
    name = type(loss).__name__
    if len(pred.shape) < 2:
        raise CompileError(
            f"{name} needs a prediction [N, C, ...]", expected="two axes or more", got=pred.text()
        )
    if weights is not None and weights.shape != pred.shape[1:2]:
        raise CompileError(
            f"{name} needs one weight per class",
            expected=f"{pred.shape[1]} numbers, for {pred.text()}",
            got=f"weight of shape {list(weights.shape)}",
        )


# --------------------------------------------------------------------------------------------------
# Classification losses


class _ClassIndexLoss(Loss):
    """A loss with class indices as labels.

    `weight` scales each class; labels equal to `ignore_index` do not contribute.
    """

    def __init__(
        self, reduction: str = "mean", weight: Any = None, ignore_index: int | None = None
    ) -> None:
        super().__init__(reduction)
        self.weight = self._weights("weight", weight)
        if ignore_index is not None:
            WHOLE.check(type(self).__name__, "ignore_index", ignore_index)
        self.ignore_index = None if ignore_index is None else int(ignore_index)

    def label_type(self, pred: ValueType) -> ValueType:
        require_classes(self, pred, self.weight)
        return ValueType((pred.shape[0], *pred.shape[2:]), DataType.INT64)

    def _check_label(self, label: Array, pred: ValueType) -> None:
        if label.dtype.kind not in "iu":
            expected = self.label_type(pred).text()
            raise self.refusal("labels must be class indices", expected, str(label.dtype))
        super()._check_label(label, pred)
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

    def _of_logarithms(
        self, b: ComputationGraphBuilder, logs: Any, label: Any, smoothing: float = 0.0
    ) -> SymbolicTensor:
        """Return the weighted mean or sum of negative log-probabilities."""
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
        total = _scalar(b, "ReduceSum", picked if weights is None else picked * weights)
        if smoothing:
            shape = [1, -1, *[1] * (len(logs.shape) - 2)]
            if self.weight is not None:
                logs = logs * b.constant(self.weight.reshape(shape))
            each = b.op("ReduceSum", logs, np.array([1], np.int64), keepdims=1)
            others = _scalar(b, "ReduceSum", each if counts is None else each * counts)
            total = total * (1.0 - smoothing) + others * (smoothing / logs.shape[1])
        if self.reduction == "sum":
            return -total
        if weights is None:
            return total * (-1.0 / float(np.prod(label.shape)))
        return -(total / _scalar(b, "ReduceSum", weights))


@final
class CrossEntropyLoss(_ClassIndexLoss):
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


@final
class NLLLoss(_ClassIndexLoss):
    """`torch.nn.NLLLoss` on logarithms of probabilities [N, C, ...] and class indices [N, ...]."""

    name = "nll"

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._of_logarithms(b, pred, label)


@final
class CategoricalCrossEntropyLoss(Loss):
    """Cross-entropy of logits [N, C, ...] and class probabilities of the same shape.

    As `torch.nn.CrossEntropyLoss` with floating targets: the mean divides by all axes except C.
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
            got=got, remedy="for class indices, pass label.long() to CrossEntropyLoss",
        )  # fmt: skip

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        if self.label_smoothing:
            share = self.label_smoothing / pred.shape[1]
            label = label * (1.0 - self.label_smoothing) + share
        picked = b.op("LogSoftmax", pred, axis=1) * label
        if self.weight is not None:
            shape = [1, -1, *[1] * (len(pred.shape) - 2)]
            picked = picked * b.constant(self.weight.reshape(shape))
        total = _scalar(b, "ReduceSum", picked)
        count = np.prod([d for i, d in enumerate(pred.shape) if i != 1])
        return total * (-1.0 / float(count) if self.reduction == "mean" else -1.0)


def _smoothing(loss: Loss, share: float) -> float:
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UsageError(f"label_smoothing of {type(loss).__name__} must be in [0, 1]",
                         got=repr(share))  # fmt: skip
    return float(share)


# --------------------------------------------------------------------------------------------------
# Elementwise losses

#: exp(-100): PyTorch clamps logarithms at -100.
_LEAST = 3.783505853677006e-44


class _Elementwise(Loss):
    """A loss per element, reduced by mean or sum; labels have the shape of the prediction."""

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType(pred.shape, DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._reduced(b, self.each(b, pred, label))

    @abstractmethod
    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        """Return the loss of every element."""

    def _broadcast(self, word: str, weights: Array | None, each: Any) -> Array | None:
        """Return weights; raise `CompileError` if they do not broadcast to the elements."""
        shape = tuple(each.shape)
        try:
            fits = weights is None or np.broadcast_shapes(weights.shape, shape) == shape
        except ValueError:
            fits = False
        if weights is not None and not fits:
            raise CompileError(
                f"{word} of {type(self).__name__} must broadcast to the prediction",
                expected=str(list(shape)), got=str(list(weights.shape)),
            )  # fmt: skip
        return weights


@final
class MSELoss(_Elementwise):
    """`torch.nn.MSELoss`: the mean or sum of squared differences."""

    name = "mse"

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        difference = pred - label
        return difference * difference


@final
class L1Loss(_Elementwise):
    """`torch.nn.L1Loss`: the mean or sum of absolute differences."""

    name = "l1"

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        return b.op("Abs", pred - label)


class _PiecewiseLoss(_Elementwise):
    """Squared differences up to a threshold, absolute ones beyond it."""

    def _bend(self, word: str, value: float, *, may_be_zero: bool) -> float:
        NUMBER.check(type(self).__name__, word, value)
        if not (value > 0 or (may_be_zero and value == 0)):
            least = "at least 0" if may_be_zero else "above 0"
            raise UsageError(f"{word} of {type(self).__name__} must be {least}", got=str(value))
        return float(value)


@final
class SmoothL1Loss(_PiecewiseLoss):
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


@final
class HuberLoss(_PiecewiseLoss):
    """`torch.nn.HuberLoss`: d² / 2 below delta, delta (d - delta / 2) from there."""

    name = "huber"

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = self._bend("delta", delta, may_be_zero=False)

    def each(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> Any:
        distance = b.op("Abs", pred - label)
        bent = b.op("Min", distance, np.float32(self.delta))
        return bent * (distance - bent * 0.5)


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


@final
class BCEWithLogitsLoss(_Elementwise):
    """`torch.nn.BCEWithLogitsLoss`: logits and probabilities of one shape, without overflow.

    `pos_weight` scales labels of 1, `weight` each element.
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


@final
class IdentityLoss(Loss):
    """The mean or sum of the prediction itself; the label is one number, which is ignored."""

    name = "identity"

    def label_type(self, pred: ValueType) -> ValueType:
        return ValueType((), DataType.FLOAT32)

    def write(self, b: ComputationGraphBuilder, pred: Any, label: Any) -> SymbolicTensor:
        return self._reduced(b, pred)


# --------------------------------------------------------------------------------------------------
# Losses by name

__all__ = [
    "LOSSES", "LOSS_KIND", "REDUCTIONS", "BCELoss", "BCEWithLogitsLoss",
    "CategoricalCrossEntropyLoss", "CrossEntropyLoss", "HuberLoss", "IdentityLoss", "L1Loss",
    "Loss", "MSELoss", "NLLLoss", "SmoothL1Loss", "loss_from_config",
]  # fmt: skip

LOSSES: tuple[type[Loss], ...] = (
    MSELoss, CrossEntropyLoss, CategoricalCrossEntropyLoss, BCEWithLogitsLoss, IdentityLoss,
    L1Loss, SmoothL1Loss, HuberLoss, BCELoss, NLLLoss,
)  # fmt: skip
_BY_NAME: dict[str, type[Loss]] = {kind.name: kind for kind in LOSSES}
#: Names in PyTorch and Keras for a cross-entropy of class indices.
_ALSO_CALLED = dict.fromkeys(("cross_entropy", "crossentropy"), CrossEntropyLoss.name)


#: What `loss_from_config` accepts.
LOSS_KIND = instance_of("a loss of stitch.losses, its name, or a mapping", Loss, str, Mapping)


def loss_from_config(config: Loss | str | dict[str, Any]) -> Loss:
    """Return a loss by name (`mse`, `mse_sum`, ...) or configuration; raise `UsageError`."""
    if isinstance(config, Loss):
        return config
    LOSS_KIND.check("training", "loss", config)
    if isinstance(config, str):
        name, _, last = config.rpartition("_")
        config = {"loss": config}
        if last in REDUCTIONS and name in _BY_NAME:
            config = {"loss": name, "reduction": last}
    settings = dict(config)
    named, view = str(settings.pop("loss", "")), settings.pop("view", ())
    kind = _BY_NAME.get(named)
    if kind is None:
        raise unknown(
            "unknown loss", _ALSO_CALLED.get(named, named), _BY_NAME, got=repr(named),
            expected=", ".join(_BY_NAME) + ", each also with _mean or _sum",
        )  # fmt: skip
    try:
        return kind(**settings).of_view(view_from_config(view))
    except TypeError as error:
        takes = list(inspect.signature(kind).parameters)
        wrong = [word for word in settings if word not in takes]
        if not wrong:
            raise UsageError(f"loss {named!r}: {error}", got=repr(config)[:100]) from error
        raise unknown(f"loss {named!r} takes no {wrong[0]}", wrong[0], takes) from error

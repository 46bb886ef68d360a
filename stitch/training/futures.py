"""`TensorFuture`: the prediction as the training loop holds it, for a loss to judge."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from stitch.errors import UsageError
from stitch.runtime import Tensor
from stitch.training.from_torch import is_loss_call, loss_of_call
from stitch.training.loss_tensor import LossTensor, still_on
from stitch.training.losses import Loss
from stitch.training.pending_values import CaptureCall, PendingValue


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

"""RMSprop and Adagrad: steps by the root of squared gradients, averaged or summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType
from stitch.training.optimizers.optimizer import Optimizer, given
from stitch.training.schedules import Schedule


@final
class RMSprop(Optimizer):
    """`torch.optim.RMSprop`: by the average of squares, less the squared average if `centered`."""

    name = "rmsprop"

    def __init__(
        self, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule, maximize)
        self.alpha = self._at_least_zero("alpha", alpha)
        self.eps = self._at_least_zero("eps", eps)
        self.momentum = self._at_least_zero("momentum", momentum)
        self.centered = bool(centered)
        more = [("momentum_buffer", momentum), ("grad_avg", centered)]
        self.states = ("square_avg", *(name for name, wanted in more if wanted))

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        return (rate,)

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        (rate,) = rates
        if self.weight_decay:
            gradient = gradient + parameter * self.weight_decay
        square = states["square_avg"]
        square = square + (gradient * gradient - square) * (1.0 - self.alpha)
        after, spread = {"square_avg": square}, square
        if self.centered:
            mean = states["grad_avg"]
            mean = after["grad_avg"] = mean + (gradient - mean) * (1.0 - self.alpha)
            spread = square - mean * mean
        change = gradient / (b.op("Sqrt", spread) + self.eps)
        if self.momentum:
            before = states["momentum_buffer"]
            change = before + (change - before * (1.0 - self.momentum))
            after["momentum_buffer"] = change
        return parameter - change * rate, after

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "alpha": self.alpha, "eps": self.eps, "momentum": self.momentum,
            **given(centered=self.centered),
        }  # fmt: skip


@final
class Adagrad(Optimizer):
    """`torch.optim.Adagrad`: by the root of the sum of all squares, at a rate that falls."""

    name = "adagrad"
    states = ("sum",)

    def __init__(
        self, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule, maximize)
        self.lr_decay = self._at_least_zero("lr_decay", lr_decay)
        self.initial_accumulator_value = self._at_least_zero(
            "initial_accumulator_value", initial_accumulator_value
        )
        self.eps = self._at_least_zero("eps", eps)
        self.counts_steps = bool(lr_decay)

    def start_of(self, state: str) -> float:
        return self.initial_accumulator_value

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        if not self.counts_steps:
            return (rate,)
        before = b.cast(step - 1, DataType.FLOAT64)
        fallen = b.cast(rate, DataType.FLOAT64) / (before * self.lr_decay + 1.0)
        return (b.cast(fallen, DataType.FLOAT32),)

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        (rate,) = rates
        if self.weight_decay:
            gradient = gradient + parameter * self.weight_decay
        total = states["sum"] + gradient * gradient
        return parameter - gradient * rate / (b.op("Sqrt", total) + self.eps), {"sum": total}

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "lr_decay": self.lr_decay, "eps": self.eps,
            "initial_accumulator_value": self.initial_accumulator_value,
        }  # fmt: skip

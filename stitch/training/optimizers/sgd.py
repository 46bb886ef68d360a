"""SGD, with momentum, dampening and Nesterov's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from stitch.errors import UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.training.optimizers.optimizer import Optimizer, given
from stitch.training.schedules import Schedule


@final
class SGD(Optimizer):
    """`torch.optim.SGD`: g + wd p; v = momentum v + (1 - dampening) g, from g in the first step;
    p - lr v, or p - lr (g + momentum v)."""

    name = "sgd"

    def __init__(
        self, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, dampening: float = 0.0, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule, maximize)
        self.momentum = self._at_least_zero("momentum", momentum)
        self.dampening = self._at_least_zero("dampening", dampening)
        self.nesterov = bool(nesterov)
        if nesterov and (not momentum or dampening):
            raise UsageError("Nesterov's step needs a momentum and no dampening",
                             got=f"momentum={momentum}, dampening={dampening}")  # fmt: skip
        self.states = ("momentum_buffer",) if momentum else ()
        self.counts_steps = bool(momentum and dampening)

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        if not self.counts_steps:
            return rate, None
        first = b.op("Equal", step, 1)
        return rate, b.op("Where", first, b.constant(1.0), b.constant(1.0 - self.dampening))

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        rate, share = rates
        if self.weight_decay:
            gradient = gradient + parameter * self.weight_decay
        if not self.momentum:
            return parameter - gradient * rate, {}
        before = states["momentum_buffer"]
        # momentum v + g, written so that the last operation reads what it overwrites.
        added = gradient if share is None else gradient * share
        after = before + (added - before * (1.0 - self.momentum))
        step = gradient + after * self.momentum if self.nesterov else after
        return parameter - step * rate, {"momentum_buffer": after}

    def settings(self) -> dict[str, Any]:
        own = {"momentum": self.momentum, "nesterov": self.nesterov}
        return super().settings() | own | given(dampening=self.dampening)

"""Adam and its kin: averages of gradients and of their squares, corrected for the first steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType
from stitch.training.optimizers.optimizer import Optimizer, given
from stitch.training.schedules import Schedule

_WIDE = DataType.FLOAT64.dtype.type
#: RAdam steps by the average alone while the length of its estimate is not above this.
_SHORTEST = 5.0
#: NAdam's momentum rises by this power of the steps.
_RISE = 0.96


class AdamLike(Optimizer):
    """The settings and averages that all of the family have."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    counts_steps = True
    #: Whether weight decay shrinks the parameter itself.
    shrinks: bool = False

    def __init__(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        schedule: Any, maximize: bool,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule, maximize)
        self.betas = self._two_shares(betas)
        self.eps = self._at_least_zero("eps", eps)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"betas": list(self.betas), "eps": self.eps}

    def _count(self, b: ComputationGraphBuilder, step: Any) -> tuple[Any, list[Any]]:
        """The step's number, and what the averages are corrected by: 1 - beta ** step.

        In float32 the correction of the first steps would lose three digits.
        """
        count = b.cast(step, DataType.FLOAT64)
        return count, [1.0 - b.op("Pow", b.constant(_WIDE(beta)), count) for beta in self.betas]

    def _decayed(self, gradient: Any, parameter: Any) -> Any:
        decays = self.weight_decay and not self.shrinks
        return gradient + parameter * self.weight_decay if decays else gradient

    def _averages(self, gradient: Any, states: Mapping[str, Any]) -> tuple[Any, Any]:
        """Both as linear interpolations: their last operation reads what it overwrites."""
        average, square = states["exp_avg"], states["exp_avg_sq"]
        average = average + (gradient - average) * (1.0 - self.betas[0])
        return average, square + (gradient * gradient - square) * (1.0 - self.betas[1])

    def _stepped(self, parameter: Any, change: Any, rate: Any) -> Any:
        if self.weight_decay and self.shrinks:
            change = change + parameter * (rate * self.weight_decay)
        return parameter - change


class Adam(AdamLike):
    """`torch.optim.Adam`: weight decay is added to the gradient."""

    name = "adam"

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, amsgrad: bool = False, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, schedule, maximize)
        self.amsgrad = bool(amsgrad)
        if amsgrad:
            self.states = (*AdamLike.states, "max_exp_avg_sq")

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        _, corrections = self._count(b, step)
        size = b.cast(b.cast(rate, DataType.FLOAT64) / corrections[0], DataType.FLOAT32)
        return rate, size, b.cast(b.op("Sqrt", corrections[1]), DataType.FLOAT32)

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        rate, size, root = rates
        average, square = self._averages(self._decayed(gradient, parameter), states)
        after = {"exp_avg": average, "exp_avg_sq": square}
        if self.amsgrad:
            square = after["max_exp_avg_sq"] = b.op("Max", states["max_exp_avg_sq"], square)
        # Epsilon after the bias correction, as in PyTorch.
        change = average * size / (b.op("Sqrt", square) / root + self.eps)
        return self._stepped(parameter, change, rate), after

    def settings(self) -> dict[str, Any]:
        return super().settings() | given(amsgrad=self.amsgrad)


@final
class AdamW(Adam):
    """`torch.optim.AdamW`: weight decay shrinks the parameter itself, by lr wd."""

    name, shrinks = "adamw", True

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, amsgrad: bool = False, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, schedule=schedule
        )


class _Decoupled(AdamLike):
    """Weight decay shrinks the parameter itself where that is asked for."""

    def __init__(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        schedule: Any, maximize: bool, decoupled_weight_decay: bool,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, schedule, maximize)
        self.shrinks = self.decoupled_weight_decay = bool(decoupled_weight_decay)

    def settings(self) -> dict[str, Any]:
        return super().settings() | given(decoupled_weight_decay=self.shrinks)


@final
class NAdam(_Decoupled):
    """`torch.optim.NAdam`: Nesterov's step, with a momentum that rises."""

    name = "nadam"
    states = (*AdamLike.states, "mu_product")
    scalar_states: ClassVar[tuple[str, ...]] = ("mu_product",)

    def __init__(
        self, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum_decay: float = 4e-3, *,
        decoupled_weight_decay: bool = False, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, schedule, maximize, decoupled_weight_decay)
        self.momentum_decay = self._at_least_zero("momentum_decay", momentum_decay)

    def start_of(self, state: str) -> float:
        return 1.0 if state == "mu_product" else 0.0

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        count, corrections = self._count(b, step)
        root = b.cast(b.op("Sqrt", corrections[1]), DataType.FLOAT32)
        return (
            b.cast(rate, DataType.FLOAT64),
            rate,
            root,
            self._mu(b, count),
            self._mu(b, count + 1),
        )

    def _mu(self, b: ComputationGraphBuilder, count: Any) -> Any:
        power = b.op("Pow", b.constant(_WIDE(_RISE)), count * self.momentum_decay)
        return (1.0 - power * 0.5) * self.betas[0]

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        wide, rate, root, mu, mu_next = rates
        gradient = self._decayed(gradient, parameter)
        average, square = self._averages(gradient, states)
        product = states["mu_product"] * b.cast(mu, DataType.FLOAT32)
        wide_product = b.cast(product, DataType.FLOAT64)
        own = b.cast(wide * (1.0 - mu) / (1.0 - wide_product), DataType.FLOAT32)
        kept = b.cast(wide * mu_next / (1.0 - wide_product * mu_next), DataType.FLOAT32)
        below = b.op("Sqrt", square) / root + self.eps
        stepped = self._stepped(parameter, (gradient * own + average * kept) / below, rate)
        return stepped, {"exp_avg": average, "exp_avg_sq": square, "mu_product": product}

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"momentum_decay": self.momentum_decay}


@final
class RAdam(_Decoupled):
    """`torch.optim.RAdam`: the adaptive part counts once its variance can be told."""

    name = "radam"

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, decoupled_weight_decay: bool = False, maximize: bool = False,
        schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, schedule, maximize, decoupled_weight_decay)

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        count, corrections = self._count(b, step)
        longest = 2.0 / (1.0 - self.betas[1]) - 1.0
        length = longest - count * (1.0 - corrections[1]) * 2.0 / corrections[1]
        adapts = b.op("Greater", length, _SHORTEST)
        # Where it is not used a length below 4 would have no root.
        safe = b.op("Max", length, _SHORTEST)
        part = (safe - 4.0) * (safe - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * safe)
        size = b.cast(rate, DataType.FLOAT64) / corrections[0]
        adaptive = size * b.op("Sqrt", part) * b.op("Sqrt", corrections[1])
        plain = b.cast(size, DataType.FLOAT32)
        return rate, plain, b.cast(adaptive, DataType.FLOAT32), adapts

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        rate, plain, adaptive, adapts = rates
        average, square = self._averages(self._decayed(gradient, parameter), states)
        below = b.op("Sqrt", square) + self.eps
        change = average * b.op("Where", adapts, adaptive / below, plain)
        after = {"exp_avg": average, "exp_avg_sq": square}
        return self._stepped(parameter, change, rate), after

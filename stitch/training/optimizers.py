"""Optimizers: the formulas of PyTorch's, written as graphs over donated parameters and states.

Comes in: hyperparameters. Goes out: for one parameter the operations of one step, whose last one
reads what it overwrites, so that the compiler can prove the alias. The learning rate and the number
of steps are inputs: schedules need no other program. Must not know: devices, programs.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, final

from stitch.argument_kinds import NUMBER, ArgumentKind, instance_of, several
from stitch.errors import UsageError, closest
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType
from stitch.training.schedules import Schedule, schedule_from_config

_NUMBERS = several("numbers", NUMBER)
BETAS = ArgumentKind("two numbers", lambda value: _NUMBERS.accepts(value) and len(value) == 2)


class Stepping(Protocol):
    """What an optimizer drives once training has started: a training instance."""

    @property
    def is_closed(self) -> bool: ...
    def update(self) -> Any: ...
    def zero_grad(self) -> None: ...


class Optimizer(ABC):
    """Hyperparameters of an update, and the handle that the training loop steps with.

    `lr` may be set at any time; `schedule` gives the rate of each step from it. One optimizer
    belongs to one model; `step` and `zero_grad` raise `UsageError` before the model's first call
    and after training has stopped.
    """

    name: ClassVar[str]
    #: What is kept beside each parameter, in PyTorch's words.
    states: tuple[str, ...] = ()
    #: Whether the formula needs the number of steps taken.
    counts_steps: ClassVar[bool] = False

    def __init__(self, lr: float, weight_decay: float, schedule: Any) -> None:
        self.lr = self._at_least_zero("lr", lr)
        self.weight_decay = self._at_least_zero("weight_decay", weight_decay)
        self.schedule: Schedule = schedule_from_config(schedule)
        self._stepping: weakref.ref[Any] | None = None

    def _at_least_zero(self, word: str, value: float) -> float:
        NUMBER.check(type(self).__name__, word, value)
        if not value >= 0 or value == float("inf"):
            raise UsageError(f"{word} of {type(self).__name__} is a number of at least 0",
                             got=str(value))  # fmt: skip
        return float(value)

    @abstractmethod
    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        """Scalars that all parameters share, from the learning rate and the step's number (1 …)."""

    @abstractmethod
    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        """One step of one float32 parameter: its new value and its new states."""

    def config(self) -> dict[str, Any]:
        """What `optimizer_from_config` makes this optimizer of again."""
        return {
            "optimizer": self.name, "lr": self.lr, "weight_decay": self.weight_decay,
            "schedule": self.schedule.config(),
        }  # fmt: skip

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        return self.schedule.rate(self.lr, step)

    # -- in the loop -------------------------------------------------------------------------------

    def check_free(self) -> None:
        """Raise `UsageError` while another training goes by it: `step` drives one."""
        if self.bound_to is not None and not self.bound_to.is_closed:
            raise UsageError(
                "this optimizer trains another model already", got=repr(self),
                remedy="give each model an optimizer of its own, or close the other training "
                "first: model.instance.close()",
            )  # fmt: skip

    def bind(self, stepping: Stepping | None) -> None:
        """From now on `step` drives this instance (None: no one); it is not kept alive."""
        self._stepping = None if stepping is None else weakref.ref(stepping)

    @property
    def bound_to(self) -> Stepping | None:
        """The instance that `step` drives."""
        return None if self._stepping is None else self._stepping()

    def step(self) -> None:
        """Update the parameters with the gradients of the last `backward`; raises `TaskError`."""
        self._bound("step").update()

    def zero_grad(self) -> None:
        """Drop the gradients; the next `backward` starts anew instead of adding to them."""
        self._bound("zero_grad").zero_grad()

    def _bound(self, word: str) -> Stepping:
        bound = self.bound_to
        if bound is None:
            raise UsageError(
                f"{word}(): this optimizer trains no model just now",
                remedy="compile with optimizer=..., and call the compiled model first",
            )
        return bound

    def __repr__(self) -> str:
        given = {key: value for key, value in self.config().items() if key != "optimizer"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


@final
class SGD(Optimizer):
    """`torch.optim.SGD`: g + wd p; v = momentum v + g; p - lr v, or p - lr (g + momentum v)."""

    name = "sgd"

    def __init__(
        self, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule)
        self.momentum = self._at_least_zero("momentum", momentum)
        self.nesterov = bool(nesterov)
        if nesterov and not momentum:
            raise UsageError("Nesterov's step needs a momentum", got="momentum=0")
        self.states = ("momentum_buffer",) if momentum else ()

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        return (rate,)

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        (rate,) = rates
        if self.weight_decay:
            gradient = gradient + parameter * self.weight_decay
        if not self.momentum:
            return parameter - gradient * rate, {}
        before = states["momentum_buffer"]
        # momentum v + g, written so that the last operation reads what it overwrites.
        after = before + (gradient - before * (1.0 - self.momentum))
        step = gradient + after * self.momentum if self.nesterov else after
        return parameter - step * rate, {"momentum_buffer": after}

    def config(self) -> dict[str, Any]:
        return super().config() | {"momentum": self.momentum, "nesterov": self.nesterov}


class Adam(Optimizer):
    """`torch.optim.Adam`: weight decay is added to the gradient."""

    name = "adam"
    states = ("exp_avg", "exp_avg_sq")
    counts_steps = True
    #: Whether weight decay shrinks the parameter itself.
    shrinks: ClassVar[bool] = False

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, schedule)
        BETAS.check(type(self).__name__, "betas", betas)
        first, second = betas
        if not (0 <= first < 1 and 0 <= second < 1):
            raise UsageError(f"betas of {type(self).__name__} lie in [0, 1)", got=str(betas))
        self.betas = (float(first), float(second))
        self.eps = self._at_least_zero("eps", eps)

    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        # In float32 the correction of the first steps would lose three digits.
        count = b.cast(step, DataType.FLOAT64)
        wide = DataType.FLOAT64.dtype.type
        corrections = [1.0 - b.op("Pow", b.constant(wide(beta)), count) for beta in self.betas]
        size = b.cast(b.cast(rate, DataType.FLOAT64) / corrections[0], DataType.FLOAT32)
        return rate, size, b.cast(b.op("Sqrt", corrections[1]), DataType.FLOAT32)

    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        rate, size, root = rates
        if self.weight_decay and not self.shrinks:
            gradient = gradient + parameter * self.weight_decay
        # Both averages as linear interpolations: their last operation reads what it overwrites.
        average, square = states["exp_avg"], states["exp_avg_sq"]
        average = average + (gradient - average) * (1.0 - self.betas[0])
        square = square + (gradient * gradient - square) * (1.0 - self.betas[1])
        # Epsilon after the bias correction, as in PyTorch.
        change = average * size / (b.op("Sqrt", square) / root + self.eps)
        if self.weight_decay and self.shrinks:
            change = change + parameter * (rate * self.weight_decay)
        return parameter - change, {"exp_avg": average, "exp_avg_sq": square}

    def config(self) -> dict[str, Any]:
        return super().config() | {"betas": list(self.betas), "eps": self.eps}


@final
class AdamW(Adam):
    """`torch.optim.AdamW`: weight decay shrinks the parameter itself, by lr wd."""

    name, shrinks = "adamw", True

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, schedule: Schedule | str | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, schedule=schedule)


_BY_NAME: dict[str, type[Optimizer]] = {kind.name: kind for kind in (SGD, Adam, AdamW)}


#: What stands for an optimizer: `optimizer_from_config` takes it.
OPTIMIZER_KIND = instance_of(
    "an optimizer of stitch (SGD, Adam, AdamW), its name, or a mapping", Optimizer, str, Mapping
)


def optimizer_from_config(config: Optimizer | str | dict[str, Any]) -> Optimizer:
    """An optimizer by name or by what `Optimizer.config` gave; raises `UsageError`."""
    if isinstance(config, Optimizer):
        return config
    given: dict[str, Any] = {"optimizer": config} if isinstance(config, str) else dict(config)
    named = str(given.pop("optimizer", "")).lower()
    kind = _BY_NAME.get(named)
    if kind is None:
        raise UsageError(
            "no such optimizer", expected=", ".join(_BY_NAME), got=repr(config),
            remedy=closest(named, _BY_NAME) or None,
        )  # fmt: skip
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"optimizer {kind.name!r}: {error}", got=repr(config)) from error

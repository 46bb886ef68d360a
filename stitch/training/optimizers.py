"""Optimizers: the formulas of PyTorch's, written as graphs over donated parameters and states.

A family of formulas is a file.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol, final

from stitch.argument_kinds import MAPPING, NUMBER, WORDS, ArgumentKind, instance_of, several
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

    `lr` may be set at any time; `schedule` gives the rate of each step from it. `add_group` gives
    some parameters settings of their own. One optimizer belongs to one model; `step`
    raises `UsageError` before the model's first call and after training has stopped.
    """

    name: ClassVar[str]
    #: What is kept beside each parameter, in PyTorch's words; which of it is one number.
    states: tuple[str, ...] = ()
    scalar_states: ClassVar[tuple[str, ...]] = ()
    #: Whether the formula needs the number of steps taken.
    counts_steps: bool = False

    def __init__(
        self, lr: float, weight_decay: float, schedule: Any, maximize: bool = False
    ) -> None:
        self.lr = self._at_least_zero("lr", lr)
        self.weight_decay = self._at_least_zero("weight_decay", weight_decay)
        self.schedule: Schedule = schedule_from_config(schedule)
        self.maximize = bool(maximize)
        #: Whose settings differ: optimizers of the same kind, and what they step.
        self._groups: list[tuple[Optimizer, tuple[str, ...]]] = []
        self._stepping: weakref.ref[Any] | None = None
        self._watchers: list[Callable[[bool], object]] = []
        #: How often settings have changed that are no inputs of the update.
        self.changes = 0

    def _at_least_zero(self, word: str, value: float) -> float:
        NUMBER.check(type(self).__name__, word, value)
        if not value >= 0 or value == float("inf"):
            raise UsageError(f"{word} of {type(self).__name__} is a number of at least 0",
                             got=str(value))  # fmt: skip
        return float(value)

    def _share(self, word: str, value: float) -> float:
        """A number in [0, 1)."""
        NUMBER.check(type(self).__name__, word, value)
        if not 0 <= value < 1:
            raise UsageError(f"{word} of {type(self).__name__} lies in [0, 1)", got=str(value))
        return float(value)

    def _two_shares(self, betas: tuple[float, float]) -> tuple[float, float]:
        BETAS.check(type(self).__name__, "betas", betas)
        first, second = betas
        if not (0 <= first < 1 and 0 <= second < 1):
            raise UsageError(f"betas of {type(self).__name__} lie in [0, 1)", got=str(betas))
        return float(first), float(second)

    @abstractmethod
    def write_rates(self, b: ComputationGraphBuilder, rate: Any, step: Any) -> tuple[Any, ...]:
        """Scalars that all parameters share, from the learning rate and the step's number (1 …)."""

    @abstractmethod
    def write(
        self, b: ComputationGraphBuilder, parameter: Any, gradient: Any,
        states: Mapping[str, Any], rates: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        """One step of one float32 parameter: its new value and its new states."""

    def start_of(self, state: str) -> float:
        """What a state holds before the first step."""
        return 0.0

    def start_of_slot(self, parameter: str, state: str) -> float:
        """What the slot `parameter.state` of an update holds before the first step."""
        group = self.groups[self.group_of(parameter)]
        return group.start_of(state) if parameter and state in group.states else 0.0

    # -- settings ----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What the class takes to make this optimizer again, without its groups."""
        return {
            "lr": self.lr, "weight_decay": self.weight_decay, "schedule": self.schedule.config(),
            **given(maximize=self.maximize),
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        """What `optimizer_from_config` makes this optimizer of again."""
        groups = [{"parameters": list(names), **o.settings()} for o, names in self._groups]
        return {"optimizer": self.name, **self.settings(), **given(groups=groups)}

    def add_group(self, parameters: Iterable[str], **settings: Any) -> None:
        """Settings of their own for these parameters, by name; what is not said is as here.

        Raises `UsageError` for an unknown setting, and for a parameter that has a group already.
        """
        kind = type(self).__name__
        WORDS.check(f"{kind}.add_group", "parameters", parameters)
        names = tuple(parameters)
        twice = sorted(
            {name for _, grouped in self._groups for name in grouped}.intersection(names)
        )
        if twice:
            raise UsageError(f"{kind}: a parameter is in one group", got=", ".join(twice))
        known = [*inspect.signature(type(self)).parameters]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise UsageError(
                f"{kind} has no setting {', '.join(map(repr, unknown))}",
                expected=", ".join(known), remedy=closest(unknown[0], known) or None,
            )  # fmt: skip
        self._groups.append((type(self)(**{**self.settings(), **settings}), names))

    def restate(self, number: int, **settings: Any) -> None:
        """Settings of a group as they are from now on; others than `lr` are part of the update,
        which is compiled anew where they change."""
        group = self.groups[number]
        changed = {word for word, value in settings.items() if getattr(group, word) != value}
        if changed <= {"lr"}:
            group.lr = settings.get("lr", group.lr)
            return
        anew = type(group)(**{**group.settings(), **settings})
        kept = ("_groups", "_stepping", "_watchers", "changes")
        # What settings of before added, such as a state, is gone with them.
        for word in vars(group).keys() - vars(anew).keys():
            delattr(group, word)
        vars(group).update({w: value for w, value in vars(anew).items() if w not in kept})
        self.changes += 1

    @property
    def groups(self) -> tuple[Optimizer, ...]:
        """This optimizer, for all that no group names, and those of the groups."""
        return (self, *(optimizer for optimizer, _ in self._groups))

    @property
    def grouped(self) -> tuple[str, ...]:
        """The parameters that groups name."""
        return tuple(name for _, names in self._groups for name in names)

    def group_of(self, parameter: str) -> int:
        """Which of the groups steps a parameter."""
        return next((i for i, (_, n) in enumerate(self._groups, 1) if parameter in n), 0)

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0, of all that no group names."""
        return self.schedule.rate(self.lr, step)

    def rates(self, step: int) -> tuple[float, ...]:
        """The learning rate of each group in step `step`, from 0."""
        return tuple([group.rate(step) for group in self.groups])

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
        for watcher in self._watchers:
            watcher(stepping is not None)

    def watch(self, watcher: Callable[[bool], object]) -> None:
        """Call this whenever a training begins to be driven (True), or none is any more (False)."""
        self._watchers.append(watcher)

    @property
    def bound_to(self) -> Stepping | None:
        """The instance that `step` drives."""
        return None if self._stepping is None else self._stepping()

    def step(self) -> None:
        """Update the parameters with the gradients of the last `backward`; raises `TaskError`."""
        bound = self.bound_to
        if bound is None:
            raise UsageError(
                "step(): this optimizer trains no model just now",
                remedy="compile with optimizer=..., and call the compiled model first",
            )
        bound.update()

    def zero_grad(self) -> None:
        """Drop the gradients; the next `backward` starts anew instead of adding to them.

        Before the model's first call, where loops begin with it, there are none.
        """
        bound = self.bound_to
        if bound is not None:
            bound.zero_grad()

    def __repr__(self) -> str:
        given = {key: value for key, value in self.config().items() if key != "optimizer"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def given(**settings: Any) -> dict[str, Any]:
    """The settings that say something: files of before they were there stay the same."""
    return {name: value for name, value in settings.items() if value}


# --------------------------------------------------------------------------------------------------
# The Adam family

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


# --------------------------------------------------------------------------------------------------
# SGD


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


# --------------------------------------------------------------------------------------------------
# RMSprop and Adagrad


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


# --------------------------------------------------------------------------------------------------
# Optimizers by name


OPTIMIZERS: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
_BY_NAME: dict[str, type[Optimizer]] = {kind.name: kind for kind in OPTIMIZERS}


#: What stands for an optimizer: `optimizer_from_config` takes it.
OPTIMIZER_KIND = instance_of(
    f"an optimizer of stitch ({', '.join(kind.__name__ for kind in OPTIMIZERS)}), its name, or a "
    "mapping",
    Optimizer, str, Mapping,
)  # fmt: skip
_GROUPS = several("mappings", MAPPING)


def optimizer_from_config(config: Optimizer | str | dict[str, Any]) -> Optimizer:
    """An optimizer by name or by what `Optimizer.config` gave; raises `UsageError`."""
    if isinstance(config, Optimizer):
        return config
    OPTIMIZER_KIND.check("training", "optimizer", config)
    given: dict[str, Any] = {"optimizer": config} if isinstance(config, str) else dict(config)
    named = str(given.pop("optimizer", "")).lower()
    kind = _BY_NAME.get(named)
    if kind is None:
        raise UsageError(
            "no such optimizer", expected=", ".join(_BY_NAME), got=repr(config)[:100],
            remedy=closest(named, _BY_NAME) or None,
        )  # fmt: skip
    groups = given.pop("groups", ())
    _GROUPS.check("training", "groups of an optimizer", groups)
    if isinstance(given.get("betas"), list):
        given["betas"] = tuple(given["betas"])
    try:
        optimizer = kind(**given)
        for group in groups:
            optimizer.add_group(**group)
    except TypeError as error:
        raise UsageError(f"optimizer {kind.name!r}: {error}", got=repr(config)[:100]) from error
    return optimizer

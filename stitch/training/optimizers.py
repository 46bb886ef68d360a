"""Optimizers with PyTorch's formulas, as graphs that update donated parameters and states."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Protocol, TypeAlias, final

from stitch.argument_kinds import MAPPING, NUMBER, WORDS, ArgumentKind, instance_of, several, takes
from stitch.errors import UsageError, unknown
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType
from stitch.training.schedules import Schedule, schedule_from_config

Builder: TypeAlias = ComputationGraphBuilder
#: A parameter's states by name, the scalars of `write_rates`, and the results of `write`.
States: TypeAlias = Mapping[str, Any]
Rates: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[Any, dict[str, Any]]
#: What `schedule` may be.
Schedules: TypeAlias = Schedule | str | dict[str, Any] | None
_NUMBERS = several("numbers", NUMBER)
_FLAGS = {"amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"}
BETAS = ArgumentKind("two numbers", lambda value: _NUMBERS.accepts(value) and len(value) == 2)


class Stepping(Protocol):
    """A training that an optimizer drives."""

    @property
    def is_closed(self) -> bool: ...

    def update(self) -> object: ...

    def zero_grad(self) -> None: ...


class Optimizer(ABC):
    """Hyperparameters of an update, and the handle that a training loop steps with.

    `lr` may be set at any time; `schedule` computes the rate of each step from it. `add_group`
    gives parameters settings of their own. An optimizer belongs to one model; `step` raises
    `UsageError` before the model's first call and after training has stopped.
    """

    name: ClassVar[str]
    #: Optimizer states of each parameter, by PyTorch's names; those that are scalars.
    states: tuple[str, ...] = ()
    scalar_states: ClassVar[tuple[str, ...]] = ()
    #: Whether the formula needs the step count.
    counts_steps: bool = False
    #: Whether weight decay is decoupled: applied to the parameter, not to the gradient.
    shrinks: bool = False
    lr: float
    weight_decay: float
    maximize: bool

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check and store the constructor arguments of the class, from its local variables."""
        self.schedule: Schedule = schedule_from_config(settings["schedule"])
        for word in inspect.signature(type(self)).parameters:
            if word != "schedule":
                setattr(self, word, self._checked(word, settings[word]))
        #: Parameter groups: an optimizer of the same kind with other settings, and its parameters.
        self._groups: list[tuple[Optimizer, tuple[str, ...]]] = []
        self._stepping: weakref.ref[Stepping] | None = None
        self._watchers: list[Callable[[bool], object]] = []
        #: Number of changes of settings that are constants of the update program.
        self.changes = 0

    def _checked(self, word: str, value: Any) -> Any:
        """Return a setting: a flag, shares in [0, 1), or a finite number of at least 0."""
        kind = type(self).__name__
        if word in _FLAGS:
            return bool(value)
        if word == "betas":
            BETAS.check(kind, word, value)
            return tuple([self._checked(f"betas[{i}]", beta) for i, beta in enumerate(value)])
        NUMBER.check(kind, word, value)
        if word.startswith("betas"):
            if not 0 <= value < 1:
                raise UsageError(f"{word} of {kind} must be in [0, 1)", got=str(value))
        elif not 0 <= value < float("inf"):
            raise UsageError(f"{word} of {kind} must be finite and at least 0", got=str(value))
        return float(value)

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        """Write the scalars that all parameters share, from the learning rate and the step count
        (from 1)."""
        return (rate,)

    @abstractmethod
    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        """Write one step of a float32 parameter's value: return the new value and states.

        Weight decay is in the gradient, unless the optimizer `shrinks` parameters.
        """

    def start_of(self, state: str) -> float:
        """Return the value of a state before the first step."""
        return 0.0

    def start_of_slot(self, parameter: str, state: str) -> float:
        """Return the initial value of the slot `parameter.state` of an update."""
        group = self.groups[self.group_of(parameter)]
        return group.start_of(state) if parameter and state in group.states else 0.0

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments of this optimizer, without groups.

        Flags that are not set are left out.
        """
        words = inspect.signature(type(self)).parameters
        values = {word: getattr(self, word) for word in words} | {
            "schedule": self.schedule.config()
        }
        return {
            word: list(value) if isinstance(value, tuple) else value
            for word, value in values.items()
            if value or words[word].kind is not inspect.Parameter.KEYWORD_ONLY
        }

    def config(self) -> dict[str, Any]:
        """Return the configuration that `optimizer_from_config` accepts."""
        groups = [{"parameters": list(names), **o.settings()} for o, names in self._groups]
        more = {"groups": groups} if groups else {}
        return {"optimizer": self.name, **self.settings(), **more}

    def add_group(self, parameters: Iterable[str], **settings: Any) -> None:
        """Give parameters settings of their own; other settings are those of this optimizer.

        Raises `UsageError` for an unknown setting, and for a parameter that is in another group.
        """
        kind = type(self).__name__
        WORDS.check(f"{kind}.add_group", "parameters", parameters)
        names = tuple(parameters)
        twice = sorted(
            {name for _, grouped in self._groups for name in grouped}.intersection(names)
        )
        if twice:
            raise UsageError(f"{kind}: parameters are in two groups", got=", ".join(twice))
        allowed = [*inspect.signature(type(self)).parameters]
        others = sorted(settings.keys() - set(allowed))
        if others:
            what = f"{kind} has no setting {', '.join(map(repr, others))}"
            raise unknown(what, others[0], allowed)
        self._groups.append((type(self)(**{**self.settings(), **settings}), names))

    def change_settings(self, number: int, **settings: Any) -> None:
        """Change the settings of a group.

        `lr` is an input of the update program; for other settings it is compiled again.
        """
        group = self.groups[number]
        changed = {word for word, value in settings.items() if getattr(group, word) != value}
        if changed <= {"lr"}:
            group.lr = settings.get("lr", group.lr)
            return
        anew = type(group)(**{**group.settings(), **settings})
        unchanged = ("_groups", "_stepping", "_watchers", "changes")
        # Remove attributes that only the old settings have, such as a state.
        for word in vars(group).keys() - vars(anew).keys():
            delattr(group, word)
        vars(group).update({w: value for w, value in vars(anew).items() if w not in unchanged})
        self.changes += 1

    @property
    def groups(self) -> tuple[Optimizer, ...]:
        """This optimizer, for parameters without a group, and the optimizers of the groups."""
        return (self, *(optimizer for optimizer, _ in self._groups))

    @property
    def grouped(self) -> tuple[str, ...]:
        """The parameters that are in groups."""
        return tuple(name for _, names in self._groups for name in names)

    def group_of(self, parameter: str) -> int:
        """Return the number of a parameter's group, 0 for none."""
        return next((i for i, (_, n) in enumerate(self._groups, 1) if parameter in n), 0)

    def for_shards(self, shards: Mapping[str, Sequence[str]]) -> Optimizer:
        """Return an optimizer of the same settings whose groups have shards of parameters.

        Args:
            shards: The names of the shards of each divided parameter.
        """
        of_shards = copy(self)
        of_shards._groups = [
            (group, tuple([shard for name in names for shard in shards.get(name, [name])]))
            for group, names in self._groups
        ]
        return of_shards

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, from 0, for parameters without a group."""
        return self.schedule.rate(self.lr, step)

    def rates(self, step: int) -> tuple[float, ...]:
        """Return the learning rate of each group in step `step`, from 0."""
        return tuple([group.rate(step) for group in self.groups])

    def check_free(self) -> None:
        """Raise `UsageError` while another training uses this optimizer."""
        if self.bound_to is not None and not self.bound_to.is_closed:
            raise UsageError(
                "this optimizer already trains another model", got=repr(self),
                remedy="use one optimizer per model, or close the other training first: "
                "model.instance.close()",
            )  # fmt: skip

    def bind(self, stepping: Stepping | None) -> None:
        """Set the training that `step` drives, which is referenced weakly; None unbinds it."""
        if stepping is not None:
            self._stepping = weakref.ref(stepping)
        for watcher in self._watchers:
            watcher(stepping is not None)
        if stepping is None:
            self._stepping = None

    def watch(self, watcher: Callable[[bool], object]) -> None:
        """Call a function when a training was bound (True), and before it is unbound (False)."""
        self._watchers.append(watcher)

    @property
    def bound_to(self) -> Stepping | None:
        """The training that `step` drives."""
        return None if self._stepping is None else self._stepping()

    def step(self) -> None:
        """Update the parameters with the current gradients; raise `TaskError` for a non-finite
        loss."""
        bound = self.bound_to
        if bound is None:
            raise UsageError(
                "step() was called, but no training uses this optimizer",
                remedy="compile with optimizer=..., and call the compiled model first",
            )
        bound.update()

    def zero_grad(self) -> None:
        """Drop the gradients; the next `backward` starts new sums. No effect before the model's
        first call."""
        bound = self.bound_to
        if bound is not None:
            bound.zero_grad()

    def __repr__(self) -> str:
        settings = {key: value for key, value in self.config().items() if key != "optimizer"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


# --------------------------------------------------------------------------------------------------
# The Adam family

_WIDE = DataType.FLOAT64.dtype.type
#: RAdam uses the adaptive term above this length of the approximated moving average.
_SHORTEST = 5.0
#: Base of NAdam's momentum schedule.
_RISE = 0.96


class AdamLike(Optimizer):
    """Settings and moving averages of the Adam family."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    betas: tuple[float, float]
    eps: float

    def _count(self, b: Builder, step: Any) -> tuple[Any, list[Any]]:
        """Return the step count and the bias corrections `1 - beta ** step`, in float64.

        In float32 the corrections of the first steps would lose three digits.
        """
        count = b.cast(step, DataType.FLOAT64)
        return count, [1.0 - b.op("Pow", b.constant(_WIDE(beta)), count) for beta in self.betas]

    def _averages(self, gradient: Any, states: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return both moving averages, as interpolations whose last operation reads what it
        overwrites."""
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

    @takes()
    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, amsgrad: bool = False, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        if amsgrad:
            self.states = (*AdamLike.states, "max_exp_avg_sq")

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        _, corrections = self._count(b, step)
        size = b.cast(b.cast(rate, DataType.FLOAT64) / corrections[0], DataType.FLOAT32)
        return rate, size, b.cast(b.op("Sqrt", corrections[1]), DataType.FLOAT32)

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        rate, size, root = rates
        average, square = self._averages(gradient, states)
        after = {"exp_avg": average, "exp_avg_sq": square}
        if "max_exp_avg_sq" in self.states:
            square = after["max_exp_avg_sq"] = b.op("Max", states["max_exp_avg_sq"], square)
        # Epsilon after the bias correction, as in PyTorch.
        change = average * size / (b.op("Sqrt", square) / root + self.eps)
        return self._stepped(value, change, rate), after


@final
class AdamW(Adam):
    """`torch.optim.AdamW`: weight decay shrinks the parameter itself, by lr wd."""

    name, shrinks = "adamw", True

    @takes()
    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, amsgrad: bool = False, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, schedule=schedule
        )


@final
class NAdam(AdamLike):
    """`torch.optim.NAdam`: Nesterov momentum with a rising coefficient."""

    name = "nadam"
    momentum_decay: float
    states = (*AdamLike.states, "mu_product")
    scalar_states: ClassVar[tuple[str, ...]] = ("mu_product",)

    @takes()
    def __init__(
        self, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum_decay: float = 4e-3, *,
        decoupled_weight_decay: bool = False, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        self.shrinks = bool(decoupled_weight_decay)

    def start_of(self, state: str) -> float:
        return 1.0 if state == "mu_product" else 0.0

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        count, corrections = self._count(b, step)
        root = b.cast(b.op("Sqrt", corrections[1]), DataType.FLOAT32)
        return (
            b.cast(rate, DataType.FLOAT64),
            rate,
            root,
            self._mu(b, count),
            self._mu(b, count + 1),
        )

    def _mu(self, b: Builder, count: Any) -> Any:
        power = b.op("Pow", b.constant(_WIDE(_RISE)), count * self.momentum_decay)
        return (1.0 - power * 0.5) * self.betas[0]

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        wide, rate, root, mu, mu_next = rates
        average, square = self._averages(gradient, states)
        product = states["mu_product"] * b.cast(mu, DataType.FLOAT32)
        wide_product = b.cast(product, DataType.FLOAT64)
        own = b.cast(wide * (1.0 - mu) / (1.0 - wide_product), DataType.FLOAT32)
        momentum_rate = b.cast(wide * mu_next / (1.0 - wide_product * mu_next), DataType.FLOAT32)
        below = b.op("Sqrt", square) / root + self.eps
        stepped = self._stepped(value, (gradient * own + average * momentum_rate) / below, rate)
        return stepped, {"exp_avg": average, "exp_avg_sq": square, "mu_product": product}


@final
class RAdam(AdamLike):
    """`torch.optim.RAdam`: the adaptive term is used once its variance is bounded."""

    name = "radam"

    @takes()
    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, decoupled_weight_decay: bool = False, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        self.shrinks = bool(decoupled_weight_decay)

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        count, corrections = self._count(b, step)
        longest = 2.0 / (1.0 - self.betas[1]) - 1.0
        length = longest - count * (1.0 - corrections[1]) * 2.0 / corrections[1]
        adapts = b.op("Greater", length, _SHORTEST)
        # Clamp: the unused branch would take the root of a negative number below 4.
        safe = b.op("Max", length, _SHORTEST)
        part = (safe - 4.0) * (safe - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * safe)
        size = b.cast(rate, DataType.FLOAT64) / corrections[0]
        adaptive = size * b.op("Sqrt", part) * b.op("Sqrt", corrections[1])
        plain = b.cast(size, DataType.FLOAT32)
        return rate, plain, b.cast(adaptive, DataType.FLOAT32), adapts

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        rate, plain, adaptive, adapts = rates
        average, square = self._averages(gradient, states)
        below = b.op("Sqrt", square) + self.eps
        change = average * b.op("Where", adapts, adaptive / below, plain)
        after = {"exp_avg": average, "exp_avg_sq": square}
        return self._stepped(value, change, rate), after


# --------------------------------------------------------------------------------------------------
# SGD


@final
class SGD(Optimizer):
    """`torch.optim.SGD`.

    With g + wd p as gradient: v = momentum v + (1 - dampening) g, v = g in the first step; p - lr
    v, with Nesterov p - lr (g + momentum v).
    """

    name = "sgd"
    momentum: float
    dampening: float
    nesterov: bool

    @takes()
    def __init__(
        self, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, dampening: float = 0.0, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        if nesterov and (not momentum or dampening):
            raise UsageError("nesterov=True of SGD requires momentum > 0 and dampening = 0",
                             got=f"momentum={momentum}, dampening={dampening}")  # fmt: skip
        self.states = ("momentum_buffer",) if momentum else ()
        self.counts_steps = bool(momentum and dampening)

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        if not self.counts_steps:
            return rate, None
        first = b.op("Equal", step, 1)
        return rate, b.op("Where", first, b.constant(1.0), b.constant(1.0 - self.dampening))

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        rate, share = rates
        if not self.momentum:
            return value - gradient * rate, {}
        before = states["momentum_buffer"]
        # momentum v + g, written so that the last operation reads what it overwrites.
        added = gradient if share is None else gradient * share
        after = before + (added - before * (1.0 - self.momentum))
        step = gradient + after * self.momentum if self.nesterov else after
        return value - step * rate, {"momentum_buffer": after}


# --------------------------------------------------------------------------------------------------
# RMSprop and Adagrad


@final
class RMSprop(Optimizer):
    """`torch.optim.RMSprop`: divides by the root of the average square, or variance if
    `centered`."""

    name = "rmsprop"
    alpha: float
    eps: float
    momentum: float
    centered: bool

    @takes()
    def __init__(
        self, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        more = [("momentum_buffer", momentum), ("grad_avg", centered)]
        self.states = ("square_avg", *(name for name, is_used in more if is_used))

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        (rate,) = rates
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
        return value - change * rate, after


@final
class Adagrad(Optimizer):
    """`torch.optim.Adagrad`: divides by the root of the sum of all squares; the rate decays."""

    name = "adagrad"
    lr_decay: float
    initial_accumulator_value: float
    eps: float
    states = ("sum",)

    @takes()
    def __init__(
        self, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
        schedule: Schedules = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        self.counts_steps = bool(lr_decay)

    def start_of(self, state: str) -> float:
        return self.initial_accumulator_value

    def write_rates(self, b: Builder, rate: Any, step: Any) -> Rates:
        if not self.counts_steps:
            return (rate,)
        before = b.cast(step - 1, DataType.FLOAT64)
        fallen = b.cast(rate, DataType.FLOAT64) / (before * self.lr_decay + 1.0)
        return (b.cast(fallen, DataType.FLOAT32),)

    def write(self, b: Builder, value: Any, gradient: Any, states: States, rates: Rates) -> Step:
        (rate,) = rates
        total = states["sum"] + gradient * gradient
        return value - gradient * rate / (b.op("Sqrt", total) + self.eps), {"sum": total}


# --------------------------------------------------------------------------------------------------
# Optimizers by name


OPTIMIZERS: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
_BY_NAME: dict[str, type[Optimizer]] = {kind.name: kind for kind in OPTIMIZERS}


#: What `optimizer_from_config` accepts.
OPTIMIZER_KIND = instance_of(
    f"an optimizer of stitch ({', '.join(kind.__name__ for kind in OPTIMIZERS)}), its name, or a "
    "mapping",
    Optimizer, str, Mapping,
)  # fmt: skip
_GROUPS = several("mappings", MAPPING)


def optimizer_from_config(config: Optimizer | str | dict[str, Any]) -> Optimizer:
    """Return an optimizer by name or configuration; raise `UsageError`."""
    if isinstance(config, Optimizer):
        return config
    OPTIMIZER_KIND.check("training", "optimizer", config)
    settings: dict[str, Any] = {"optimizer": config} if isinstance(config, str) else dict(config)
    named = str(settings.pop("optimizer", "")).lower()
    kind = _BY_NAME.get(named)
    if kind is None:
        raise unknown("unknown optimizer", named, _BY_NAME, got=repr(config)[:100])
    groups = settings.pop("groups", ())
    _GROUPS.check("training", "groups of an optimizer", groups)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    try:
        optimizer = kind(**settings)
        for group in groups:
            optimizer.add_group(**group)
    except TypeError as error:
        raise UsageError(f"optimizer {kind.name!r}: {error}", got=repr(config)[:100]) from error
    return optimizer

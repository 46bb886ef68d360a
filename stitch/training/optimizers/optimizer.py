"""`Optimizer`: settings of an update, in groups of parameters, and what the loop steps with.

Learning rates and the number of steps are inputs: schedules need no other program.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

from stitch.argument_kinds import NUMBER, WORDS, ArgumentKind, several
from stitch.errors import UsageError, closest
from stitch.graph import ComputationGraphBuilder
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

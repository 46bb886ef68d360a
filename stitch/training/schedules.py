"""Learning rate schedules.

The rate is an input of the update program, so a schedule needs no recompilation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from stitch.argument_kinds import MAPPING, NUMBER, TEXT, WHOLE, check_fields, either, instance_of
from stitch.errors import UsageError


class Schedule(ABC):
    """The learning rate as a function of the step."""

    name: ClassVar[str]

    @abstractmethod
    def rate(self, base: float, step: int) -> float:
        """Return the rate of step `step` (from 0) for the optimizer's rate `base`."""

    def config(self) -> dict[str, Any]:
        """Return the configuration that `schedule_from_config` accepts."""
        return {"schedule": self.name, **asdict(self)}  # type: ignore[call-overload]  # subclasses are dataclasses


@dataclass(frozen=True, slots=True)
class ConstantLR(Schedule):
    """The optimizer's own rate in each step.

    >>> ConstantLR().rate(0.5, 1000)
    0.5
    """

    name: ClassVar[str] = "constant"

    def rate(self, base: float, step: int) -> float:
        return base


@dataclass(frozen=True, slots=True)
class StepLR(Schedule):
    """Multiply by `gamma` every `step_size` steps (`torch.optim.lr_scheduler.StepLR`).

    >>> [StepLR(2).rate(1.0, step) for step in range(5)]
    [1.0, 1.0, 0.1, 0.1, 0.010000000000000002]
    """

    step_size: int
    gamma: float = 0.1
    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check_fields(self, step_size=WHOLE, gamma=NUMBER)
        if self.step_size < 1:
            raise UsageError("step_size of StepLR must be at least 1", got=str(self.step_size))

    def rate(self, base: float, step: int) -> float:
        return base * self.gamma ** (step // self.step_size)


@dataclass(frozen=True, slots=True)
class CosineAnnealingLR(Schedule):
    """Half a cosine from the rate down to `eta_min` at step `T_max`, constant afterwards.

    >>> CosineAnnealingLR(10).rate(1.0, 0), round(CosineAnnealingLR(10).rate(1.0, 5), 6)
    (1.0, 0.5)
    """

    T_max: int
    eta_min: float = 0.0
    name: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        check_fields(self, T_max=WHOLE, eta_min=NUMBER)
        if self.T_max < 1:
            raise UsageError("T_max of CosineAnnealingLR must be at least 1", got=str(self.T_max))

    def rate(self, base: float, step: int) -> float:
        share = min(step, self.T_max) / self.T_max
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, slots=True)
class WarmupLR(Schedule):
    """Rise linearly over `warmup_steps` steps, then start another schedule.

    >>> [WarmupLR(4).rate(1.0, step) for step in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """

    warmup_steps: int
    then: Schedule = ConstantLR()
    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        check_fields(self, warmup_steps=WHOLE, then=instance_of("a schedule", Schedule))
        if self.warmup_steps < 1:
            raise UsageError("warmup_steps of WarmupLR must be at least 1",
                             got=str(self.warmup_steps))  # fmt: skip

    def rate(self, base: float, step: int) -> float:
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        return self.then.rate(base, step - self.warmup_steps)

    def config(self) -> dict[str, Any]:
        return {"schedule": self.name, "warmup_steps": self.warmup_steps,
                "then": self.then.config()}  # fmt: skip


_BY_NAME: dict[str, type[Schedule]] = {
    kind.name: kind for kind in (ConstantLR, StepLR, CosineAnnealingLR, WarmupLR)
}


def schedule_from_config(config: Schedule | str | dict[str, Any] | None) -> Schedule:
    """Return a schedule by name or configuration; raise `UsageError`.

    >>> schedule_from_config({"schedule": "warmup", "warmup_steps": 2, "then": "constant"})
    WarmupLR(warmup_steps=2, then=ConstantLR())
    """
    if config is None:
        return ConstantLR()
    if isinstance(config, Schedule):
        return config
    either(instance_of("a schedule", Schedule), TEXT, MAPPING).check("training", "schedule", config)
    settings: dict[str, Any] = {"schedule": config} if isinstance(config, str) else dict(config)
    kind = _BY_NAME.get(str(settings.pop("schedule", "")))
    if kind is None:
        raise UsageError("unknown schedule", expected=", ".join(_BY_NAME), got=repr(config)[:100])
    if "then" in settings:
        settings["then"] = schedule_from_config(settings["then"])
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"schedule {kind.name!r}: {error}", got=repr(config)[:100]) from error

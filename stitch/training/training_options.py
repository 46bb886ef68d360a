"""`TrainingOptions`: how a model is trained, apart from its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any

from stitch.argument_kinds import (
    NUMBER,
    TEXT,
    WHOLE,
    ArgumentKind,
    check_fields,
    member_of,
    optional,
)
from stitch.compiler import Recomputation
from stitch.errors import UsageError
from stitch.graph import JsonObject
from stitch.program import DataType, Space
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer

_TYPE = member_of(DataType, "a DataType or its word")
_SPACE = member_of(Space, "a Space or its word")
_SPACES = ArgumentKind(
    f"a mapping of names to each {_SPACE.text}",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(n, str) and _SPACE.accepts(s) for n, s in value.items())
    ),
)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a model is trained, apart from its loss and its optimizer.

    `recompute`: what backward computes again (`none`, `cheap`, `all`; `every 8`: rounds of scans,
    from the states before every 8th). `accumulation_steps`: micro-batches whose gradients one
    update takes; a mean loss counts each by its share.
    `clip_grad_norm`: the most that the norm of all gradients may be. `precision`: the type that
    programs compute in; other than float32, weights have float32 masters. `spaces`: where tensors
    between the programs lie, by name, if not in DRAM. Types and spaces may be given by their words.
    Raises `UsageError`.

    >>> TrainingOptions(precision="bfloat16", spaces={"saved.relu": "l1"}).spaces["saved.relu"]
    <Space.L1: 'l1'>
    """

    recompute: str = "none"
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    precision: DataType = DataType.FLOAT32
    spaces: Mapping[str, Space] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_fields(
            self, recompute=TEXT, accumulation_steps=WHOLE, clip_grad_norm=optional(NUMBER),
            precision=_TYPE, spaces=_SPACES,
        )  # fmt: skip
        object.__setattr__(self, "precision", DataType(self.precision))
        spaces = MappingProxyType({name: Space(space) for name, space in self.spaces.items()})
        object.__setattr__(self, "spaces", spaces)
        Recomputation.parse(self.recompute)
        if self.accumulation_steps < 1:
            raise UsageError("an update takes at least one micro-batch",
                             got=f"accumulation_steps={self.accumulation_steps}")  # fmt: skip
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise UsageError("gradients are clipped to a norm above 0",
                             got=f"clip_grad_norm={self.clip_grad_norm}")  # fmt: skip
        if not self.precision.is_floating or self.precision.is_block or self.precision.is_narrow:
            raise UsageError("programs compute in a floating type", got=self.precision.value)


#: The words of the options, as a file has them.
OPTION_WORDS = tuple(field.name for field in fields(TrainingOptions))


def training_config(loss: Loss, optimizer: Optimizer, options: TrainingOptions) -> dict[str, Any]:
    """How a model is trained, as plain data; `options_from_record` reads the options back."""
    return {
        "loss": loss.config(),
        "optimizer": optimizer.config(),
        "recompute": options.recompute,
        "accumulation_steps": options.accumulation_steps,
        "clip_grad_norm": options.clip_grad_norm,
        "precision": options.precision.value,
        "spaces": {name: space.value for name, space in options.spaces.items()},
    }


def options_from_record(record: JsonObject) -> TrainingOptions | None:
    """The options in what `training_config` gave; None where a defect was noted."""
    given: dict[str, Any] = {}

    def option(word: str, value: Any) -> TrainingOptions:
        return TrainingOptions(**{word: value})

    for word in OPTION_WORDS:
        # One at a time, so that what is wrong is said of its own key.
        if record.made(word, partial(option, word)) is not None:
            given[word] = record.get(word)
    return TrainingOptions(**given) if len(given) == len(OPTION_WORDS) else None

"""Loss, optimizer, schedule and metrics of a training in YAML, as plain data that was tried.

Comes in: fields. Goes out: what `loss_from_config` and its kin take, or None where a defect was
noted. What a loss or an optimizer can be told is read off its class: a new one needs nothing here.
Must not know: models, data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from stitch.errors import UsageError, closest
from stitch.forms import Fields, Node
from stitch.training import (
    LOSSES,
    SGD,
    Adam,
    AdamW,
    ConstantLR,
    CosineAnnealingLR,
    StepLR,
    WarmupLR,
    loss_from_config,
    optimizer_from_config,
    schedule_from_config,
)

_LOSSES: dict[str, Callable[..., Any]] = {kind.name: kind for kind in LOSSES}
_OPTIMIZERS: dict[str, Callable[..., Any]] = {kind.name: kind for kind in (SGD, Adam, AdamW)}
_SCHEDULES: dict[str, Callable[..., Any]] = {
    kind.name: kind for kind in (ConstantLR, StepLR, CosineAnnealingLR, WarmupLR)
}
#: Losses whose predictions are one number for each class, or the logit of one.
CLASSES = ("sparse_categorical_crossentropy", "categorical_crossentropy", "bce_with_logits")
METRICS = ("accuracy", "loss")


def loss_of(top: Fields) -> dict[str, Any] | None:
    """The loss; None where there is none, or a defect was noted."""
    word = None if isinstance(_data(top, "loss"), Mapping) else top.text("loss")
    stem, _, last = (word or "").rpartition("_")
    if stem in _LOSSES and last in ("mean", "sum"):
        return {"loss": stem, "reduction": last}
    return _chosen(top, "loss", "loss", _LOSSES, loss_from_config)


def optimizer_of(top: Fields) -> dict[str, Any] | None:
    """The optimizer, without its schedule; None as above."""
    return _chosen(top, "optimizer", "optimizer", _OPTIMIZERS, optimizer_from_config)


def schedule_of(top: Fields) -> dict[str, Any] | None:
    """The schedule; a cosine may lack `T_max`. None as above."""
    return _chosen(top, "schedule", "schedule", _SCHEDULES, lambda c: completed_schedule(c, 1))


def completed_schedule(config: Mapping[str, Any] | None, steps: int) -> Any:
    """The schedule of a training of so many steps: `T_max` where it was left out.

    >>> completed_schedule({"schedule": "warmup", "warmup_steps": 2, "then": "cosine"}, 12)
    WarmupLR(warmup_steps=2, then=CosineAnnealingLR(T_max=10, eta_min=0.0))
    """
    if config is None:
        return ConstantLR()
    given = {"schedule": config} if isinstance(config, str) else dict(config)
    if given.get("schedule") == "cosine":
        given.setdefault("T_max", max(1, steps))
    if "then" in given:
        warm = given.get("warmup_steps", 0)
        given["then"] = completed_schedule(given["then"], steps - warm)
    return schedule_from_config(given)


def metrics_of(top: Fields, loss: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The metrics, in order; those that the loss (None: it is defective) cannot have are noted."""
    node = top.get("metrics")
    if node is None:
        return METRICS if loss is not None and loss["loss"] in CLASSES else ("loss",)
    items = node.data if isinstance(node.data, tuple) else (node,)
    found = []
    for item in items:
        if item.raw not in METRICS:
            near = closest(item.raw, METRICS)
            detail = f"there is no metric {item.raw[:40]!r}; allowed: {', '.join(METRICS)}"
            top.log.note("bad_value", item.line, detail + (f"; {near}" if near else ""))
        elif item.raw == "accuracy" and loss is not None and loss["loss"] not in CLASSES:
            detail = f"the loss {loss['loss']} has no classes, so there is no accuracy"
            top.log.note("bad_value", item.line, detail)
        elif item.raw not in found:
            found.append(item.raw)
    return tuple(found)


def _data(top: Fields, key: str) -> object:
    node = top.get(key)
    return None if node is None else node.data


def _chosen(
    top: Fields, key: str, word: str, kinds: Mapping[str, Callable[..., Any]],
    make: Callable[[dict[str, Any]], object],
) -> dict[str, Any] | None:  # fmt: skip
    """A name, or a mapping with a name and settings; made once, to try it."""
    node = top.get(key)
    if node is None:
        return None
    fields = _Settings(node, word, top)
    name = fields.name or ""
    if name not in kinds:
        near = closest(name, kinds)
        wanted = f"one of {', '.join(kinds)}" + (f" ({near})" if near else "")
        detail = f"there is no {word} {name[:40]!r}: it must be {wanted}"
        top.log.note("bad_value", fields.line, detail)
        return None
    before = len(top.log.problems)
    made: dict[str, Any] = {word: name}
    allowed = [p for p in inspect.signature(kinds[name]).parameters if p != "schedule"]
    for setting, item in fields.settings(("name", *allowed)):
        if setting == "then":
            found = schedule_of(Fields(Node(item.line, {"schedule": item}), "then", top.log))
            if found is not None:
                made["then"] = found
        else:
            value = _value(item)
            if value is None:
                detail = f"{word} {name}: {setting} must be a number, true, false, a word or a list"
                top.log.note("bad_value", item.line, f"{detail} of numbers, not {item.describe()}")
            made[setting] = value
    if len(top.log.problems) > before:
        return None
    try:
        make(made)
    except (UsageError, TypeError, ValueError) as error:
        told = str(error) if isinstance(error, UsageError) else f"{word} {name}: {error}"
        top.log.note("bad_value", fields.line, told)
        return None
    return made


class _Settings:
    """A choice: a word alone, or a mapping with `name`."""

    def __init__(self, node: Node, word: str, top: Fields) -> None:
        self.fields: Fields | None = None
        self.line = node.line
        self.name: str | None = node.raw
        if isinstance(node.data, Mapping):
            self.fields = Fields(node, f"the {word}", top.log)
            self.name = self.fields.text("name")
            self.line = self.fields.line_of("name")

    def settings(self, allowed: tuple[str, ...]) -> list[tuple[str, Node]]:
        """The settings that have a meaning; the others are noted."""
        if self.fields is None:
            return []
        self.fields.only(allowed)
        return [(k, n) for k, n in self.fields.items() if k in allowed and k != "name"]


def _value(node: Node) -> Any:
    """A number, a flag, a word, or a list of numbers; None for anything else."""
    if isinstance(node.data, tuple):
        numbers = [item.data for item in node.data]
        return numbers if numbers and all(_is_number(n) for n in numbers) else None
    if isinstance(node.data, Mapping):
        return None
    if isinstance(node.data, int | float) and not isinstance(node.data, bool):
        return node.data if _is_number(node.data) else None
    return node.data


def _is_number(data: object) -> bool:
    plain = isinstance(data, int | float) and not isinstance(data, bool)
    return plain and math.isfinite(float(data))  # type: ignore[arg-type]  # plain says so

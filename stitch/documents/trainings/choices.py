"""Loss, optimizer, schedule and metrics of a training in YAML, as plain data that was tried.

Comes in: what stands at their keys. Goes out: what `loss_from_config` and its kin take, or None
where a defect was noted. What a loss or an optimizer can be told is read off its class: a new one
needs nothing here. Must not know: models, data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from stitch.errors import UsageError
from stitch.forms import Form, FormValues, Kind, Node, Place, Row, Tagged, Word, is_word
from stitch.training import (
    LOSSES,
    OPTIMIZERS,
    ConstantLR,
    CosineAnnealingLR,
    StepLR,
    WarmupLR,
    loss_from_config,
    optimizer_from_config,
    schedule_from_config,
)

#: Losses whose predictions are one number for each class, or the logit of one.
CLASSES = ("sparse_categorical_crossentropy", "categorical_crossentropy", "bce_with_logits")
METRICS = ("accuracy", "loss")


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


def metrics_of(fields: FormValues) -> tuple[str, ...]:
    """The metrics of a training, each once; one that its loss cannot have is noted.

    Without any, all that the loss can have.
    """
    metrics, loss = fields.values["metrics"], fields.values["loss"]
    has_classes = loss is not None and loss["loss"] in CLASSES
    if metrics is None:
        return METRICS if has_classes else ("loss",)
    if "accuracy" in metrics and loss is not None and not has_classes:
        node = fields.place.nodes["metrics"]
        items = node.data if isinstance(node.data, tuple) else (node,)
        line = next(item.line for item in items if item.raw == "accuracy")
        detail = f"the loss {loss['loss']} has no classes, so there is no accuracy"
        fields.place.reading.log.note("bad_value", line, detail)
    return tuple(dict.fromkeys(metrics))


class _Setting(Kind[Any]):
    """What a loss, an optimizer or a schedule is told."""

    wanted = "a number, true, false, a word or a list of numbers"

    def value(self, node: Node, place: Place) -> Any:
        if isinstance(node.data, tuple):
            numbers = [item.data for item in node.data]
            return numbers if numbers and all(map(_is_number, numbers)) else None
        is_plain = isinstance(node.data, bool | str) or _is_number(node.data)
        return node.data if is_plain else None


def _is_number(data: object) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)


@cache
def _forms(
    word: str, kinds: tuple[Any, ...], attempt: Callable[[dict[str, Any]], object]
) -> dict[str, Form[dict[str, Any]]]:
    """A form for each kind of `word`: what its class takes; made once, to try it."""

    def config(name: str, **settings: Any) -> dict[str, Any]:
        return {word: name, **{k: value for k, value in settings.items() if value is not None}}

    def check(config: dict[str, Any], place: Place) -> None:
        try:
            attempt(config)
        except (UsageError, TypeError, ValueError) as error:
            is_told = isinstance(error, UsageError)
            told = str(error) if is_told else f"{word} {config[word]}: {error}"
            place.reading.log.note("refused", place.at("name").line, told)

    def rows(kind: Callable[..., Any]) -> list[Row]:
        settings = [p for p in inspect.signature(kind).parameters if p != "schedule"]
        return [Row(p, SCHEDULE if p == "then" else _Setting()) for p in settings]

    return {
        kind.name: Form(
            f"the {word}", config, Row("name", Word(), needed=True), *rows(kind), word="name",
            check=check,
        )
        for kind in kinds
    }  # fmt: skip


def _tagged(
    word: str, article: str, kinds: tuple[Any, ...], attempt: Callable[[dict[str, Any]], object]
) -> Tagged[dict[str, Any]]:
    wanted = f"the name of {article} {word}, or a mapping"
    return Tagged(wanted, "name", lambda: _forms(word, kinds, attempt))


_NAMED_LOSS = _tagged("loss", "a", tuple(LOSSES), loss_from_config)


class _Loss(Kind[dict[str, Any]]):
    """The name of a loss, perhaps with its reduction (`mse_sum`), or a mapping."""

    wanted = _NAMED_LOSS.wanted

    def value(self, node: Node, place: Place) -> dict[str, Any] | None:
        stem, _, last = node.raw.rpartition("_")
        names = [kind.name for kind in LOSSES]
        if is_word(node) and stem in names and last in ("mean", "sum"):
            return {"loss": stem, "reduction": last}
        return _NAMED_LOSS.read(node, place)


LOSS = _Loss()
OPTIMIZER = _tagged("optimizer", "an", OPTIMIZERS, optimizer_from_config)
# A cosine may lack `T_max`.
SCHEDULE = _tagged(
    "schedule", "a", (ConstantLR, StepLR, CosineAnnealingLR, WarmupLR),
    partial(completed_schedule, steps=1),
)  # fmt: skip

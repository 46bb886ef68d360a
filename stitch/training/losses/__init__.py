"""Losses: graphs (prediction, label) → a scalar, and what labels must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.argument_kinds import instance_of
from stitch.errors import UsageError, closest
from stitch.training.losses.loss import REDUCTIONS, Loss
from stitch.training.losses.of_classes import (
    CategoricalCrossEntropyLoss,
    CrossEntropyLoss,
    NLLLoss,
)
from stitch.training.losses.of_differences import (
    BCELoss,
    BCEWithLogitsLoss,
    HuberLoss,
    IdentityLoss,
    L1Loss,
    MSELoss,
    SmoothL1Loss,
)

__all__ = [
    "LOSSES", "LOSS_KIND", "REDUCTIONS", "BCELoss", "BCEWithLogitsLoss",
    "CategoricalCrossEntropyLoss", "CrossEntropyLoss", "HuberLoss", "IdentityLoss", "L1Loss",
    "Loss", "MSELoss", "NLLLoss", "SmoothL1Loss", "loss_from_config",
]  # fmt: skip

LOSSES: tuple[type[Loss], ...] = (
    MSELoss, CrossEntropyLoss, CategoricalCrossEntropyLoss, BCEWithLogitsLoss, IdentityLoss,
    L1Loss, SmoothL1Loss, HuberLoss, BCELoss, NLLLoss,
)  # fmt: skip
_BY_NAME: dict[str, type[Loss]] = {kind.name: kind for kind in LOSSES}
#: PyTorch's word is for class numbers, where ours that look like it are not.
_ALSO_CALLED = dict.fromkeys(("cross_entropy", "crossentropy"), CrossEntropyLoss.name)


#: What stands for a loss: `loss_from_config` takes it.
LOSS_KIND = instance_of("a loss of stitch.losses, its name, or a mapping", Loss, str, Mapping)


def loss_from_config(config: Loss | str | dict[str, Any]) -> Loss:
    """A loss by name (`mse`, `mse_sum` ...) or by what `Loss.config` gave; raises `UsageError`."""
    if isinstance(config, Loss):
        return config
    LOSS_KIND.check("training", "loss", config)
    if isinstance(config, str):
        name, _, last = config.rpartition("_")
        config = {"loss": config}
        if last in REDUCTIONS and name in _BY_NAME:
            config = {"loss": name, "reduction": last}
    given = dict(config)
    named = str(given.pop("loss", ""))
    kind = _BY_NAME.get(named)
    if kind is None:
        raise UsageError(
            "no such loss",
            expected=", ".join(_BY_NAME) + ", each also with _mean or _sum",
            got=repr(named),
            remedy=closest(_ALSO_CALLED.get(named, named), _BY_NAME) or None,
        )
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"loss {named!r}: {error}", got=repr(config)[:100]) from error

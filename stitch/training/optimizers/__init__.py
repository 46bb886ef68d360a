"""Optimizers: the formulas of PyTorch's, written as graphs over donated parameters and states.

A family of formulas is a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.argument_kinds import MAPPING, instance_of, several
from stitch.errors import UsageError, closest
from stitch.training.optimizers.adam import Adam, AdamW, NAdam, RAdam
from stitch.training.optimizers.optimizer import BETAS, Optimizer, Stepping
from stitch.training.optimizers.sgd import SGD
from stitch.training.optimizers.squares import Adagrad, RMSprop

__all__ = [
    "BETAS", "OPTIMIZERS", "OPTIMIZER_KIND", "SGD", "Adagrad", "Adam", "AdamW", "NAdam",
    "Optimizer", "RAdam", "RMSprop", "Stepping", "optimizer_from_config",
]  # fmt: skip

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

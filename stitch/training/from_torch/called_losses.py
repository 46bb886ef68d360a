"""Losses of torch.nn: known by the functions that they call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stitch.argument_kinds import ArgumentKind
from stitch.errors import UsageError
from stitch.training.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CategoricalCrossEntropyLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    loss_from_config,
)

#: By the name of the function in torch.nn.functional.
_CALLED: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropyLoss, "nll_loss": NLLLoss, "mse_loss": MSELoss,
    "l1_loss": L1Loss, "smooth_l1_loss": SmoothL1Loss, "huber_loss": HuberLoss,
    "binary_cross_entropy": BCELoss, "binary_cross_entropy_with_logits": BCEWithLogitsLoss,
}  # fmt: skip
_PRED, _TARGET = "input", "target"

GIVEN_LOSS = ArgumentKind(
    "a loss of stitch.losses or torch.nn, its name, a mapping, or a function that calls one",
    lambda value: (
        isinstance(value, Loss | str | Mapping) or (callable(value) and not isinstance(value, type))
    ),
)


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss with the prediction and the labels that it was called on."""

    loss: Loss
    pred: Any
    label: Any


def is_loss_call(function: Any) -> bool:
    """Whether a function of torch's is a loss, one that we have or not."""
    name = str(getattr(function, "__name__", ""))
    return name in _CALLED or name.endswith("_loss") or name == "kl_div"


class _Probe:
    """What stands for a prediction or for labels: torch's functions tell what they are asked."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return loss_of_call(function, arguments, named or {})


def loss_of(given: Any) -> Loss:
    """Anything that `GIVEN_LOSS` accepts as a loss; raises `UsageError` for one that we lack.

    A loss of torch's is asked by calling it: which function of torch's it calls, and how.
    """
    if isinstance(given, Loss | str | Mapping):
        return loss_from_config(given)  # type: ignore[arg-type]  # a mapping is a dict there
    try:
        call = given(_Probe(), _Probe())
    except UsageError:
        raise
    except Exception as error:
        raise _unknown(_named(given)) from error
    if not isinstance(call, LossCall) or not isinstance(call.pred, _Probe):
        raise _unknown(_named(given))
    return call.loss


def loss_of_call(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> LossCall:
    """The loss that a call of a function of torch.nn.functional asks for.

    Floating labels of a cross-entropy are probabilities. Raises `UsageError` for a function that
    is no loss we have, and for settings that we lack.
    """
    name = getattr(function, "__name__", str(function))
    kind = _CALLED.get(name)
    if kind is None:
        raise _unknown(name)
    signature = _signature_of(function)
    bound = signature.bind(*arguments, **named)
    given = {
        word: value for word, value in bound.arguments.items()
        if value is not signature.parameters[word].default
    }  # fmt: skip
    pred, label = given.pop(_PRED, None), given.pop(_TARGET, None)
    if kind is CrossEntropyLoss:
        if _is_floating(label):
            kind = CategoricalCrossEntropyLoss
            given.pop("ignore_index", None)
        else:
            given.setdefault("ignore_index", bound.signature.parameters["ignore_index"].default)
    elif kind is NLLLoss:
        given.setdefault("ignore_index", bound.signature.parameters["ignore_index"].default)
    known = _signature_of(kind).parameters
    lacking = sorted(given.keys() - known.keys())
    if lacking:
        raise UsageError(
            f"the loss {name} has no {', '.join(lacking)} here",
            expected=", ".join(known), got=", ".join(f"{w}={given[w]!r}"[:60] for w in lacking),
        )  # fmt: skip
    settings = {word: _plain(value) for word, value in given.items()}
    return LossCall(kind(**settings), pred, label)


@lru_cache(maxsize=64)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Asked in each step."""
    return inspect.signature(function)


def _is_floating(label: Any) -> bool:
    asked = getattr(label, "is_floating_point", None)
    if asked is not None:
        return bool(asked())
    dtype = getattr(label, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind == "f"


def _plain(value: Any) -> Any:
    """A tensor of torch's as an array, without loading torch to ask."""
    return value.detach().cpu().float().numpy() if hasattr(value, "detach") else value


def _named(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def _unknown(name: str) -> UsageError:
    return UsageError(
        f"{name} is no loss that can be compiled",
        expected=f"one of torch.nn.functional's {', '.join(_CALLED)}, its module, or a function "
        "that gives what it gives",
        remedy="write another loss into the module, and compile with "
        "loss=stitch.losses.IdentityLoss()",
    )

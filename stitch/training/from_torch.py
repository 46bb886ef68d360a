"""PyTorch's losses and optimizers, read and driven without importing torch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from stitch.argument_kinds import ArgumentKind
from stitch.errors import StitchError, UsageError
from stitch.program import Array
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
from stitch.training.optimizers import OPTIMIZERS, SGD, Optimizer

# --------------------------------------------------------------------------------------------------
# Losses

#: Losses by the name of the function in torch.nn.functional.
_CALLED: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropyLoss, "nll_loss": NLLLoss, "mse_loss": MSELoss,
    "l1_loss": L1Loss, "smooth_l1_loss": SmoothL1Loss, "huber_loss": HuberLoss,
    "binary_cross_entropy": BCELoss, "binary_cross_entropy_with_logits": BCEWithLogitsLoss,
}  # fmt: skip
_PRED, _TARGET = "input", "target"

ANY_LOSS = ArgumentKind(
    "a loss of stitch.losses or torch.nn, its name, a mapping, or a function that calls one",
    lambda value: (
        isinstance(value, Loss | str | Mapping) or (callable(value) and not isinstance(value, type))
    ),
)


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss with the prediction and the labels of a call."""

    loss: Loss
    pred: Any
    label: Any


def is_loss_call(function: Any) -> bool:
    """Return whether a torch function is a loss, supported or not."""
    name = str(getattr(function, "__name__", ""))
    return name in _CALLED or name.endswith("_loss") or name == "kl_div"


class _Probe:
    """A stand-in for prediction and labels that records which torch loss is called on it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return loss_of_call(function, arguments, named or {})


def loss_of(loss: Any) -> Loss:
    """Return the loss for anything that `ANY_LOSS` accepts; raise `UsageError` for others.

    A torch loss is called on stand-ins, which record the function of torch and its settings.
    """
    if isinstance(loss, Loss | str | Mapping):
        return loss_from_config(loss)  # type: ignore[arg-type]  # a mapping is a dict there
    try:
        call = loss(_Probe(), _Probe())
    except UsageError:
        raise
    except Exception as error:
        raise _unknown(_named(loss)) from error
    if not isinstance(call, LossCall) or not isinstance(call.pred, _Probe):
        raise _unknown(_named(loss))
    return call.loss


def loss_of_call(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> LossCall:
    """Return the loss that a call of a function of `torch.nn.functional` computes.

    A cross-entropy with floating labels takes probabilities. Raises `UsageError` for a function or
    a setting that is not supported.
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
    supported = _signature_of(kind).parameters
    lacking = sorted(given.keys() - supported.keys())
    if lacking:
        raise UsageError(
            f"{name} does not support {', '.join(lacking)}",
            expected=", ".join(supported), got=", ".join(f"{w}={given[w]!r}"[:60] for w in lacking),
        )  # fmt: skip
    settings = {word: _plain(value) for word, value in given.items()}
    return LossCall(kind(**settings), pred, label)


@lru_cache(maxsize=64)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Cached: called in each step."""
    return inspect.signature(function)


def _is_floating(label: Any) -> bool:
    asked = getattr(label, "is_floating_point", None)
    if asked is not None:
        return bool(asked())
    dtype = getattr(label, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind == "f"


def _plain(value: Any) -> Any:
    """Return a torch tensor as an array, without importing torch."""
    return value.detach().cpu().float().numpy() if hasattr(value, "detach") else value


def _named(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _unknown(name: str) -> UsageError:
    return UsageError(
        f"{name} is not a supported loss",
        expected=f"one of torch.nn.functional's {', '.join(_CALLED)}, its module, or a function "
        "that returns its result",
        remedy="compute another loss inside the module, and compile with "
        "loss=stitch.losses.IdentityLoss()",
    )


class Replacement:
    """A replacement for a method of a torch object that keeps its owner weakly."""

    #: Learning rate schedulers of torch check this before they wrap `step`.
    _wrapped_by_lr_sched = True

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        method = self.method()
        assert method is not None, "methods are restored when the owner is collected"
        return method(*arguments, **named)


def replace_methods(
    theirs: Any, methods: Mapping[str, Callable[..., Any]], during: Any,
    then: Sequence[Callable[[], object]] = (),
) -> weakref.finalize[Any, Any]:  # fmt: skip
    """Replace methods of a torch object until `during` is collected.

    Calling the returned finalizer restores them earlier; the functions in `then` are called
    afterwards.
    """
    before = {}
    for name, method in methods.items():
        before[name] = vars(theirs).get(name)
        setattr(theirs, name, Replacement(method))
    end = weakref.finalize(during, _restore, theirs, before, then)
    end.atexit = False
    return end


def owner_of(theirs: Any, name: str) -> Any:
    """Return the object that has replaced a method, None if it is not replaced."""
    now = vars(theirs).get(name)
    method = now.method() if isinstance(now, Replacement) else None
    return getattr(method, "__self__", None)


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, or does nothing once its object is gone."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = weak()
        return None if alive is None else alive(*arguments)

    return call


def _restore(theirs: Any, before: dict[str, Any], then: Sequence[Callable[[], object]]) -> None:
    for name, value in before.items():
        if value is None:
            vars(theirs).pop(name, None)
        else:
            setattr(theirs, name, value)
    for call in then:
        call()


# --------------------------------------------------------------------------------------------------
# Optimizers

_PACKAGE = "torch.optim."
_BASE = ("torch.optim.optimizer", "Optimizer")
_BY_NAME = {kind.__name__: kind for kind in OPTIMIZERS}
#: The step count in each entry of torch's state, except for the kinds that have none.
_STEP = "step"
_UNCOUNTED = (SGD,)


def is_torch_optimizer(value: object) -> bool:
    """Return whether a value is a torch optimizer, without importing torch."""
    return _BASE in {(base.__module__, base.__name__) for base in type(value).__mro__}


ANY_OPTIMIZER = ArgumentKind(
    f"an optimizer ({', '.join(_BY_NAME)} of stitch or torch.optim), its name, or a mapping",
    lambda value: isinstance(value, Optimizer | str | Mapping) or is_torch_optimizer(value),
)


class TorchOptimizer:
    """A torch optimizer and the native optimizer with the same settings.

    Raises `UsageError` for a kind, setting or parameter that is not supported, and for an optimizer
    that trains another model.
    """

    def __init__(self, theirs: Any, names: Mapping[int, Sequence[str]]) -> None:
        """`names`: the names of each parameter, by the identity of the torch object."""
        self.theirs = theirs
        kind = _BY_NAME.get(type(theirs).__name__)
        # A class of another module may have the name of one of torch's.
        if kind is None or not type(theirs).__module__.startswith(_PACKAGE):
            raise UsageError(
                f"optimizer {type(theirs).__name__} is not supported",
                expected=", ".join(_BY_NAME),
                got=f"{type(theirs).__module__}.{type(theirs).__name__}",
                remedy="step with torch: torch.compile(model, backend='stitch') without "
                "options['optimizer']",
            )
        self._kind: type[Optimizer] = kind
        self._names = dict(names)
        _check_free(theirs)
        groups = theirs.param_groups
        self.native = self._kind(**self._settings(groups[0]))
        for group in groups[1:]:
            self.native.add_group(self._parameters(group), **self._settings(group))
        self.parameters = tuple(name for group in groups for name in self._parameters(group))
        #: The identities of each group's parameters, in order.
        self._members = [list(map(id, group["params"])) for group in groups]
        #: Number of steps before the training's first.
        self._before = 0
        self._trained = [p.requires_grad for group in groups for p in group["params"]]
        self._end: weakref.finalize[Any, Any] | None = None
        self.native.watch(self._watch)

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if group.get("differentiable"):
            raise UsageError("differentiable=True is not supported",
                             got=f"{self._kind.__name__}(differentiable=True)")  # fmt: skip
        return {
            word: _plain_value(group[word]) for word in _settings_of(self._kind) if word in group
        }

    def _parameters(self, group: Mapping[str, Any]) -> list[str]:
        foreign = [p for p in group["params"] if id(p) not in self._names]
        if foreign:
            known = [names[0] for names in self._names.values()]
            raise UsageError(
                "a parameter group has tensors that are not parameters of the compiled module",
                expected=", ".join(known[:12]),
                got=", ".join(f"a tensor of shape {list(p.shape)}" for p in foreign[:4]),
                remedy=f"torch.optim.{self._kind.__name__}(module.parameters(), ...)",
            )
        return [name for p in group["params"] for name in self._names[id(p)]]

    def initial_state(self) -> dict[str, Array]:
        """Return the state of the torch optimizer, by slot names."""
        values: dict[str, Array] = {}
        counts = set()
        for parameter, state in self.theirs.state.items():
            # Skip frozen parameters: Adagrad has state for them too.
            names = self._names.get(id(parameter), ())
            for word, value in state.items() if names else ():
                if word == _STEP:
                    counts.add(int(value))
                elif value is not None:
                    for name in names:
                        values[f"{name}.{word}"] = value.detach().cpu().float().numpy().copy()
        if len(counts) > 1:
            raise UsageError("the parameters of this optimizer have different step counts",
                             expected="one step count", got=str(sorted(counts)))  # fmt: skip
        if not counts:
            return values
        (self._before,) = counts
        return values | {_STEP: np.array(self._before, np.int64)}

    @property
    def counts(self) -> bool:
        """Whether each entry of the torch state has a step count."""
        return self._kind not in _UNCOUNTED

    def set_previous_steps(self, steps: int) -> None:
        """Set the number of steps that the training had taken before."""
        self._before = -steps if steps < 0 else 0

    def _watch(self, begins: bool) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        if not begins:
            # A training that has failed, or whose device is closed, has no state to give.
            with suppress(StitchError):
                self._write_state(self.theirs)
            return
        _check_free(self.theirs)
        hooks = (
            self.theirs.register_state_dict_pre_hook(weak_method(self._write_state)),
            self.theirs.register_load_state_dict_post_hook(weak_method(self._read_state)),
            self.theirs.register_step_post_hook(weak_method(self._after_own_step)),
        )
        methods: dict[str, Callable[..., Any]] = {
            "step": self.step, "zero_grad": self.zero_grad, "__getstate__": self._copied_state,
        }  # fmt: skip
        ends = [hook.remove for hook in hooks]
        self._end = replace_methods(self.theirs, methods, self.native.bound_to, ends)

    def check_free(self) -> None:
        """Raise `UsageError` while a training uses this optimizer."""
        self.native.check_free()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Replaces `step` of the torch object; reads its current settings."""
        loss = None if closure is None else closure()
        self._step()
        self.theirs._opt_called = True
        return loss

    def _step(self) -> None:
        trained = [p.requires_grad for group in self.theirs.param_groups for p in group["params"]]
        self.update_settings()
        if trained != self._trained:
            changed = [a != b for a, b in zip(trained, self._trained, strict=True)].index(True)
            raise UsageError(
                "requires_grad of a parameter was changed after the model was compiled",
                where=self.parameters[changed], expected=str(self._trained[changed]),
                got=str(trained[changed]), remedy="restore it, or compile the model again",
            )  # fmt: skip
        self.native.step()

    def _after_own_step(self, *_: object) -> None:
        """Step on the device if torch's own `step` ran first: its closure started the training."""
        self._step()

    def update_settings(self) -> None:
        """Copy the current settings of the torch groups."""
        groups = self.theirs.param_groups
        if len(groups) != len(self.native.groups):
            raise UsageError(
                "a parameter group was added after the model was compiled",
                expected=f"{len(self.native.groups)} groups", got=str(len(groups)),
                remedy="compile the model again",
            )  # fmt: skip
        for number, group in enumerate(groups):
            if list(map(id, group["params"])) != self._members[number]:
                raise UsageError(
                    f"the parameters of group {number} were changed after the model was compiled",
                    expected=f"the same {len(self._members[number])} in the same order",
                    got=f"{len(group['params'])}, or another order",
                    remedy="compile the model again",
                )
            self.native.change_settings(number, **self._settings(group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces `zero_grad` of the torch object: drop the gradients on the device."""
        self.native.zero_grad()

    def _write_state(self, theirs: Any) -> None:
        """Copy the optimizer state from the device into the torch object."""
        instance: Any = self.native.bound_to
        if instance is None or not instance.steps:
            return
        values = instance.optimizer_state()
        for group, native in zip(theirs.param_groups, self.native.groups, strict=False):
            for parameter in group["params"]:
                (name, *_) = self._names[id(parameter)] or (None,)
                if name is None:
                    continue
                words = [word for word in native.states if f"{name}.{word}" in values]
                tensors = {word: values[f"{name}.{word}"] for word in words}
                if self.counts:
                    tensors[_STEP] = np.float32(self._before + instance.steps)
                state = {w: parameter.detach().new_tensor(a) for w, a in tensors.items()}
                theirs.state[parameter] = state

    def _copied_state(self) -> Any:
        """Replaces `__getstate__`, so that copies and pickles have the state of the device."""
        self._write_state(self.theirs)
        kind: Any = type(self.theirs)
        return kind.__getstate__(self.theirs)

    def _read_state(self, theirs: Any) -> None:
        """Copy the state that the torch object has loaded to the device."""
        instance: Any = self.native.bound_to
        if instance is not None:
            # What torch's state lacks begins anew.
            state = {
                name: np.full_like(now, self.native.start_of_slot(*_parts_of(name)))
                for name, now in instance.optimizer_state().items()
            }
            self._before = 0
            instance.set_optimizer_state(state | self.initial_state())
            self._before -= instance.steps


def _check_free(theirs: Any) -> None:
    """Raise `UsageError` while another training uses the torch object."""
    owner = owner_of(theirs, "step")
    if owner is not None:
        owner.check_free()


def _parts_of(name: str) -> tuple[str, str]:
    """Return the parameter and the state of an optimizer slot."""
    parameter, _, state = name.rpartition(".")
    return parameter, state


@cache
def _settings_of(kind: type[Optimizer]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def parameter_names(module: Any, wanted: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Return the names of a module's parameters, by the identity of the torch object.

    Of the names of a tied parameter, those in `wanted` are returned. Raises `UsageError` for a
    module that is not torch's.
    """
    if not hasattr(module, "named_parameters"):
        raise UsageError(
            "an optimizer of torch.optim needs a torch module",
            got=type(module).__name__, remedy="optimizer=stitch.Adam(lr=...)",
        )  # fmt: skip
    takes = inspect.signature(module.named_parameters).parameters
    every = {"remove_duplicate": False} if "remove_duplicate" in takes else {}
    have, names = set(wanted), dict[int, tuple[str, ...]]()
    for name, parameter in module.named_parameters(**every):
        others = names.get(id(parameter), ())
        names[id(parameter)] = (*others, name) if name in have else others
    return names


def _plain_value(value: Any) -> Any:
    """Return a setting that torch stores as a tensor, or a sequence of them, as numbers."""
    if isinstance(value, tuple | list):
        return tuple(_plain_value(item) for item in value)
    return value.item() if hasattr(value, "item") else value

"""PyTorch's losses and optimizers, as they are: read, called and stepped without loading torch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from stitch.argument_kinds import ArgumentKind
from stitch.errors import UsageError, closest
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


class Replacement:
    """A method of torch's object that is another's for now, and keeps nobody alive."""

    #: Schedulers ask: this one tells by itself that it was called.
    _wrapped_by_lr_sched = True

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        method = self.method()
        assert method is not None, "it is taken back when its owner ends"
        return method(*arguments, **named)


def replace_methods(
    theirs: Any, methods: Mapping[str, Callable[..., Any]], during: Any,
    then: Sequence[Callable[[], object]] = (),
) -> weakref.finalize[Any, Any]:  # fmt: skip
    """Put bound methods in the place of those of these names, while `during` lives.

    What is given back ends it when it is called; then `then` is called too.
    """
    before = {}
    for name, method in methods.items():
        before[name] = vars(theirs).get(name)
        setattr(theirs, name, Replacement(method))
    end = weakref.finalize(during, _restore, theirs, before, then)
    end.atexit = False
    return end


def owner_of(theirs: Any, name: str) -> Any:
    """Who has replaced a method of an object; None where nobody has."""
    now = vars(theirs).get(name)
    method = now.method() if isinstance(now, Replacement) else None
    return getattr(method, "__self__", None)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a bound method that does not keep its object alive; None where that is gone."""
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
#: What every entry of torch's state counts by itself, but for the kinds that count nothing.
_STEP = "step"
_UNCOUNTED = (SGD,)


def is_torch_optimizer(value: object) -> bool:
    """Whether this is an optimizer of torch's, without loading torch to ask."""
    return _BASE in {(base.__module__, base.__name__) for base in type(value).__mro__}


GIVEN_OPTIMIZER = ArgumentKind(
    f"an optimizer ({', '.join(_BY_NAME)} of stitch or torch.optim), its name, or a mapping",
    lambda value: isinstance(value, Optimizer | str | Mapping) or is_torch_optimizer(value),
)


class TorchOptimizer:
    """An optimizer of torch's and the one that stands for it here.

    Raises `UsageError` for a kind, a setting, or a parameter that we lack, and for one that trains
    another model.
    """

    def __init__(self, theirs: Any, names: Mapping[int, Sequence[str]]) -> None:
        """`names`: what parameters are called, by the identity of torch's object."""
        self.theirs = theirs
        kind = _BY_NAME.get(type(theirs).__name__)
        # Another's class of the same name steps by rules of its own.
        if kind is None or not type(theirs).__module__.startswith(_PACKAGE):
            raise UsageError(
                f"there is no optimizer {type(theirs).__name__} here",
                expected=", ".join(_BY_NAME),
                got=f"{type(theirs).__module__}.{type(theirs).__name__}",
                remedy=closest(type(theirs).__name__, _BY_NAME)
                or "step with torch: torch.compile(model, backend='stitch') without "
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
        #: Which objects each group had, in its order: what is stepped is chosen by these.
        self._members = [list(map(id, group["params"])) for group in groups]
        #: Steps that were taken before the training's first.
        self._before = 0
        #: Which parameters are trained, as the programs have them.
        self._trained = [p.requires_grad for group in groups for p in group["params"]]
        self._end: weakref.finalize[Any, Any] | None = None
        self.native.watch(self._watch)

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group, as the class here takes them."""
        if group.get("differentiable"):
            raise UsageError("an update on the device is not differentiable",
                             got=f"{self._kind.__name__}(differentiable=True)")  # fmt: skip
        return {
            word: _plain_value(group[word]) for word in _settings_of(self._kind) if word in group
        }

    def _parameters(self, group: Mapping[str, Any]) -> list[str]:
        strangers = [p for p in group["params"] if id(p) not in self._names]
        if strangers:
            known = [names[0] for names in self._names.values()]
            raise UsageError(
                "a parameter group holds what is no parameter of the compiled module",
                expected=", ".join(known[:12]),
                got=", ".join(f"a tensor of shape {list(p.shape)}" for p in strangers[:4]),
                remedy=f"torch.optim.{self._kind.__name__}(module.parameters(), ...)",
            )
        return [name for p in group["params"] for name in self._names[id(p)]]

    def started(self) -> dict[str, Array]:
        """The state that torch's object has already, by the names of its slots."""
        values: dict[str, Array] = {}
        counts = set()
        for parameter, state in self.theirs.state.items():
            # Frozen parameters take no steps, though Adagrad counts theirs from its beginning.
            names = self._names.get(id(parameter), ())
            for word, value in state.items() if names else ():
                if word == _STEP:
                    counts.add(int(value))
                elif value is not None:
                    for name in names:
                        values[f"{name}.{word}"] = value.detach().cpu().float().numpy().copy()
        if len(counts) > 1:
            raise UsageError("the parameters of this optimizer have taken steps of their own",
                             expected="one number of steps", got=str(sorted(counts)))  # fmt: skip
        if not counts:
            return values
        (self._before,) = counts
        return values | {_STEP: np.array(self._before, np.int64)}

    @property
    def counts(self) -> bool:
        """Whether every entry of torch's state counts its steps by itself."""
        return self._kind not in _UNCOUNTED

    def goes_on_from(self, steps: int) -> None:
        """The training that it steps has taken so many steps before."""
        self._before = -steps if steps < 0 else 0

    # -- while a training goes by it ---------------------------------------------------------------

    def _watch(self, begins: bool) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        if not begins:
            return
        _check_free(self.theirs)
        hooks = (
            self.theirs.register_state_dict_pre_hook(weakly(self._write_state)),
            self.theirs.register_load_state_dict_post_hook(weakly(self._read_state)),
            self.theirs.register_step_post_hook(weakly(self._after_own_step)),
        )
        methods: dict[str, Callable[..., Any]] = {
            "step": self.step, "zero_grad": self.zero_grad, "__getstate__": self._copied_state,
        }  # fmt: skip
        ends = [hook.remove for hook in hooks]
        self._end = replace_methods(self.theirs, methods, self.native.bound_to, ends)

    def check_free(self) -> None:
        """Raise `UsageError` while a training goes by it."""
        self.native.check_free()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step` of torch's object: with its groups as they are now."""
        loss = None if closure is None else closure()
        self._step()
        self.theirs._opt_called = True
        return loss

    def _step(self) -> None:
        trained = [p.requires_grad for group in self.theirs.param_groups for p in group["params"]]
        self.follow()
        if trained != self._trained:
            raise UsageError(
                "requires_grad of a parameter was changed after the model was compiled",
                remedy="put it back, or compile the model again",
            )
        self.native.step()

    def _after_own_step(self, *_: object) -> None:
        """A closure began the training in the middle of the object's own step, which found no
        gradients: they are on the device."""
        self._step()

    def follow(self) -> None:
        """The settings are those that torch's groups have now."""
        groups = self.theirs.param_groups
        if len(groups) != len(self.native.groups):
            raise UsageError(
                "a parameter group came after the model was compiled",
                expected=f"{len(self.native.groups)} groups", got=str(len(groups)),
                remedy="compile the model again",
            )  # fmt: skip
        for number, group in enumerate(groups):
            if list(map(id, group["params"])) != self._members[number]:
                raise UsageError(
                    "a parameter group has other parameters than when the model was compiled",
                    expected=f"the {len(self._members[number])} that group {number} had",
                    got=f"{len(group['params'])}, not the same in the same order",
                    remedy="compile the model again",
                )
            self.native.restate(number, **self._settings(group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`zero_grad` of torch's object: gradients on the device are dropped."""
        self.native.zero_grad()

    def _write_state(self, theirs: Any) -> None:
        """Before torch's object gives its state: what the device has."""
        instance: Any = self.native.bound_to
        if instance is None or not instance.steps:
            return
        held = instance.optimizer_state()
        for group, native in zip(theirs.param_groups, self.native.groups, strict=False):
            for parameter in group["params"]:
                (name, *_) = self._names[id(parameter)] or (None,)
                if name is None:
                    continue
                words = [word for word in native.states if f"{name}.{word}" in held]
                tensors = {word: held[f"{name}.{word}"] for word in words}
                if self.counts:
                    tensors[_STEP] = np.float32(self._before + instance.steps)
                state = {w: parameter.detach().new_tensor(a) for w, a in tensors.items()}
                theirs.state[parameter] = state

    def _copied_state(self) -> Any:
        """What copies and pickles of torch's object hold: the state that the device has."""
        self._write_state(self.theirs)
        kind: Any = type(self.theirs)
        return kind.__getstate__(self.theirs)

    def _read_state(self, theirs: Any) -> None:
        """After torch's object was given a state: the device takes it."""
        instance: Any = self.native.bound_to
        if instance is not None:
            instance.set_optimizer_state(self.started())
            self._before -= instance.steps


def _check_free(theirs: Any) -> None:
    """Raise `UsageError` while another training goes by torch's object."""
    owner = owner_of(theirs, "step")
    if owner is not None:
        owner.check_free()


@cache
def _settings_of(kind: type[Optimizer]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def parameter_names(module: Any, wanted: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """What the parameters of a torch module are called, by the identity of torch's object: of the
    names of one that is tied those that are `wanted`. Raises `UsageError` for another module."""
    if not hasattr(module, "named_parameters"):
        raise UsageError(
            "an optimizer of torch.optim steps the parameters of a torch module",
            got=type(module).__name__, remedy="optimizer=stitch.Adam(lr=...)",
        )  # fmt: skip
    takes = inspect.signature(module.named_parameters).parameters
    every = {"remove_duplicate": False} if "remove_duplicate" in takes else {}
    have, names = set(wanted), dict[int, tuple[str, ...]]()
    for name, parameter in module.named_parameters(**every):
        known = names.get(id(parameter), ())
        names[id(parameter)] = (*known, name) if name in have else known
    return names


def _plain_value(value: Any) -> Any:
    """A setting that torch holds as a tensor, or several of them."""
    if isinstance(value, tuple | list):
        return tuple(_plain_value(item) for item in value)
    return value.item() if hasattr(value, "item") else value

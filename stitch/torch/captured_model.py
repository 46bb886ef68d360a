"""`CapturedModel`: a torch module that is compiled when enough of it is known.

From then on it is the `CompiledModel`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from stitch.api import check_options
from stitch.api import compile as compile_module
from stitch.argument_kinds import PATH, WRITABLE, either, takes
from stitch.errors import UsageError
from stitch.frontend import Explanation, explain, from_fx, graph_counts
from stitch.model import CompiledModel
from stitch.program import Array
from stitch.torch.shared_module import SharedModule, set_tensor_of, share, tensor_of, torch
from stitch.training import (
    ANY_LOSS,
    ANY_OPTIMIZER,
    LossTensor,
    PendingValue,
    TrainingInstance,
    check_algorithm,
    is_loss_call,
    is_torch_optimizer,
    loss_of_call,
    weak_method,
)

__all__ = [
    "AwaitedPrediction", "CapturedModel", "Explanation", "compile", "explain", "from_fx",
    "graph_counts",
]  # fmt: skip


def compile(
    module: Any, example: Sequence[Any] | Mapping[str, Any] | None = None, *,
    algorithm: str = "none", optimizer: Any = None, loss: Any = None,
    backend: str | Callable[..., Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Compile a torch module: at once where an example is given (and, with an optimizer, a loss),
    else at its first call; `options` as for `stitch.compile`. With a `backend` it is
    `torch.compile(module, backend=...)`, which takes its own options. Raises what these raise."""
    if backend is not None:
        own = {"algorithm": algorithm, "optimizer": optimizer, "loss": loss}
        named = {name: value for name, value in own.items() if value not in (None, "none")}
        if example is not None or named:
            raise UsageError(
                "with backend= this is torch.compile, which captures a module at its first call",
                got=", ".join((["example"] if example is not None else []) + [*named]),
                remedy="options=dict(algorithm=..., optimizer=...) for the backend 'stitch', or "
                "leave backend= out",
            )
        return torch.compile(module, backend=backend, **options)
    ready = example is not None and (optimizer is None or loss is not None)
    if not ready:
        captured = CapturedModel(
            module, algorithm=algorithm, optimizer=optimizer, loss=loss, **options
        )
        captured.example = example
        return captured
    return compile_module(
        module, example or (), algorithm=algorithm, optimizer=optimizer, loss=loss, **options
    )


class CapturedModel:
    """A module on its way to a compiled model.

    Called, it gives what the model gives: a tensor, or, with an optimizer, a `TensorFuture`. While
    no loss is known that is an `AwaitedPrediction`: the first loss function that judges one says
    how the model is trained. Batches after the first have its shapes.
    """

    def __init__(
        self, module: Any, *, algorithm: str = "none", optimizer: Any = None, loss: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        check_algorithm(algorithm)
        if optimizer is not None:
            ANY_OPTIMIZER.check("compile", "optimizer", optimizer)
        if loss is not None:
            ANY_LOSS.check("compile", "loss", loss)
            if optimizer is None:
                raise UsageError("a loss is for training, which needs an optimizer",
                                 remedy="compile(optimizer=..., loss=...)")  # fmt: skip
        check_options(optimizer=optimizer, loss=loss, **options)
        self.module = module
        #: A module that is in its evaluation mode from the beginning is trained in that.
        self._trains_in = bool(getattr(module, "training", True))
        self.example: Sequence[Any] | Mapping[str, Any] | None = None
        self._algorithm, self._optimizer, self._loss = algorithm, optimizer, loss
        self._options = options
        self._model: CompiledModel | None = None
        if is_torch_optimizer(optimizer):
            hook = optimizer.register_step_pre_hook(weak_method(self._begin_own_step))
            weakref.finalize(self, hook.remove).atexit = False

    def train(self, mode: bool = True) -> CapturedModel:
        """Set the module's mode, as torch's modules do it: training, or evaluation."""
        self.module.train(mode)
        return self

    def eval(self) -> CapturedModel:
        """Set the module's evaluation mode: calls predict, and train nothing."""
        return self.train(False)

    def _evaluated(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What the module gives in its evaluation mode: before the first step, and of a batch of
        another size, torch's own."""
        training = None if self._model is None else self._model.training
        instance = None if training is None else training.instance
        if instance is None or not instance.takes_sizes_of(batch, named):
            with torch.no_grad():
                return self.module(*batch, **named)
        plain = {name: _plain(value) for name, value in named.items()}
        return PendingValue(instance.predict(*map(_plain, batch), **plain), instance.capture_call)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        if self._optimizer is not None and self._trains_in and not self.module.training:
            return self._evaluated(batch, named)
        if self._model is None:
            if self._optimizer is not None and self._loss is None:
                return AwaitedPrediction(self, batch, named)
            self._capture(batch, named)
        return self.model(*map(_plain, batch), **{n: _plain(v) for n, v in named.items()})

    def _capture(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if batch and named:
            raise UsageError("the first batch comes by position or by name, not both")
        model = compile_module(
            self.module, self.example or named or batch, algorithm=self._algorithm,
            optimizer=self._optimizer, loss=self._loss, **self._options,
        )  # fmt: skip
        if model.training is not None:
            model = replace(
                model, training=replace(model.training, watchers=(partial(share, self.module),))
            )
        self._model = model

    @property
    def _shared(self) -> SharedModule | None:
        """What shares the module's tensors with the training, once that has begun."""
        training = None if self._model is None else self._model.training
        instance = None if training is None else training.instance
        sharer = None if instance is None else instance.sharer
        return sharer if isinstance(sharer, SharedModule) else None

    def _begin_own_step(self, _: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Torch's object begins a step of its own. Where its closure makes the first call, what it
        finds after that is none of its gradients: the training steps when it has done."""
        theirs, *given = arguments
        closure = given[0] if given else named.get("closure")
        if closure is None or self._shared is not None:
            return None

        def first_call() -> Any:
            loss = closure()
            shared = self._shared
            if shared is not None:
                shared.hides_gradients = True
            return loss

        return (theirs,), {"closure": first_call}

    def compute_loss(self, awaited: AwaitedPrediction, loss: Any, label: Any) -> LossTensor:
        """The loss of a first prediction: from now on it is known how the model is trained.

        What fails leaves it unknown.
        """
        is_first = self._model is None
        try:
            if is_first:
                self._loss = loss
                self._capture(awaited.batch, awaited.named)
            if awaited.future is None:
                awaited.future = self(*awaited.batch, **awaited.named)
            judged: LossTensor = awaited.future.loss_with(loss, label)
            # A training ends with its model, whoever still has its first prediction.
            awaited.captured = None
        except BaseException:
            if is_first:
                self._forget(awaited)
            raise
        return judged

    def _forget(self, awaited: AwaitedPrediction) -> None:
        training = None if self._model is None else self._model.training
        if training is not None and training.instance is not None:
            training.instance.close()
        self._model = self._loss = awaited.future = None

    def __repr__(self) -> str:
        what = "not compiled yet" if self._model is None else repr(self._model)
        return f"<CapturedModel of {type(self.module).__name__}: {what}>"

    # -- what it has become ------------------------------------------------------------------------

    @property
    def is_captured(self) -> bool:
        """Whether the module was compiled."""
        return self._model is not None

    @property
    def is_over(self) -> bool:
        """Whether it was in training, and that was closed: the module has what it learned."""
        training = None if self._model is None else self._model.training
        return training is not None and training.is_over

    @property
    def model(self) -> CompiledModel:
        """The compiled model; raises `UsageError` before there is one."""
        if self._model is None:
            needs = "call it" if self._loss or not self._optimizer else "call it, and its loss"
            raise UsageError(
                "the module is not compiled yet: that needs a batch",
                where=type(self.module).__name__,
                remedy=f"{needs} first, or stitch.torch.compile(module, example, ...)",
            )
        return self._model

    @property
    def instance(self) -> TrainingInstance:
        """The training that is on; raises `UsageError` before."""
        return self.model.instance

    @property
    def search_result(self) -> Any:
        """What the algorithm found."""
        return self.model.search_result

    def as_json(self, *, weights: bool = True) -> str:
        """As of the compiled model; raises `UsageError` before there is one."""
        return self.model.as_json(weights=weights)

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """As of the compiled model; raises `UsageError` before there is one."""
        self.model.dump(file, weights=weights)

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """As of the compiled model; before there is one, and after a training, those of the
        module."""
        if self._model is not None and not self.is_over:
            return self._model.get_tensor(name, index)
        return tensor_of(self.module, name, index)

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """As of the compiled model; before there is one, and after a training, those of the
        module."""
        if self._model is not None and not self.is_over:
            self._model.set_tensor(name, array, index)
        else:
            set_tensor_of(self.module, name, array, index)

    def check_loadable(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` for other values of parameters that are constants of the programs."""
        training = None if self._model is None else self._model.training
        instance = None if training is None else training.instance
        if instance is None:
            return
        tensors = dict(self.module.named_parameters(remove_duplicate=False))
        tensors |= dict(self.module.named_buffers(remove_duplicate=False))
        for name in tensors.keys() & state.keys() & instance.constants.keys():
            tensor, loaded = tensors[name], torch.as_tensor(state[name])
            if loaded.shape == tensor.shape and not torch.equal(loaded, tensor):
                raise UsageError(
                    f"{name} is frozen: the programs of this training have it as a constant",
                    remedy="load it before compile, and compile again",
                )

    def take_over(self, state: Mapping[str, Any]) -> None:
        """What was loaded into the module is the training's, if one is on, even where that lost a
        tensor in an update that was interrupted."""
        training = None if self._model is None else self._model.training
        instance = None if training is None else training.instance
        if instance is not None:
            for name in instance.kept_names:
                if name in state:
                    instance.set_tensor(name, tensor_of(self.module, name))


class AwaitedPrediction:
    """What a model predicts whose loss is not known yet: a loss function that judges it says so."""

    __slots__ = ("_read", "batch", "captured", "future", "named")

    def __init__(
        self, captured: CapturedModel, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        #: None once it was judged: what has been predicted keeps no model alive.
        self.captured: CapturedModel | None = captured
        # They stay writable, and are looked at later.
        self.batch = tuple(map(_copied, batch))
        self.named = {name: _copied(value) for name, value in named.items()}
        #: The prediction, once it was judged.
        self.future: Any = None
        self._read: Any = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if not is_loss_call(function):
            if getattr(function, "__name__", "") not in _READ_BEFORE:
                raise _no_value_yet()
            told = [part.predicted if isinstance(part, cls) else part for part in arguments]
            return function(*told, **(named or {}))
        call = loss_of_call(function, arguments, named or {})
        if not isinstance(call.pred, cls):
            raise UsageError("a loss takes the prediction first, then the labels",
                             got=f"{function.__name__}({type(call.pred).__name__})")  # fmt: skip
        return call.pred.loss_with(call.loss, call.label)

    def loss_with(self, loss: Any, label: Any) -> LossTensor:
        """Its loss, by which the model is trained from now on."""
        if self.captured is None:
            judged: LossTensor = self.future.loss_with(loss, label)
            return judged
        return self.captured.compute_loss(self, loss, label)

    @property
    def predicted(self) -> Any:
        """What it holds, to read: before its loss is known torch's own module says so, without
        gradients, on a copy that keeps statistics and random numbers as they are."""
        if self.future is not None:
            return self.future
        assert self.captured is not None, "it was not judged"
        if self._read is None:
            module = deepcopy(self.captured.module)
            with torch.no_grad(), torch.random.fork_rng():
                self._read = module(*self.batch, **self.named)
        return self._read

    def wait(self) -> AwaitedPrediction:
        """Run what is queued until it is there; before its loss is known nothing is queued."""
        if self.future is not None:
            self.future.wait()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.predicted if name in _READ_BEFORE else self._there(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.predicted[index]

    def __len__(self) -> int:
        return len(self.predicted)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.predicted, dtype)

    def _there(self) -> Any:
        if self.future is None:
            raise _no_value_yet()
        return self.future

    def __repr__(self) -> str:
        return f"<AwaitedPrediction {self.future!r}>" if self.future is not None else (
            "<AwaitedPrediction: its loss is not known yet>")  # fmt: skip


#: What a prediction may be asked before its loss is known: nothing goes back from these.
_READ_BEFORE = frozenset({
    "argmax", "argmin", "argsort", "cpu", "data", "detach", "dim", "dtype", "item", "max", "min",
    "ndim", "numel", "numpy", "shape", "size", "tolist", "topk",
})  # fmt: skip


def _no_value_yet() -> UsageError:
    return UsageError(
        "this prediction has no value yet: the model is compiled when its loss is known",
        remedy="loss_fn(pred, y) first, or compile(..., loss=loss_fn)",
    )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _plain(value: Any) -> Any:
    """What a batch holds, without a gradient: NumPy asks torch for arrays."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value

"""`CapturedModel`: a torch module that is compiled at its first call, or with its first loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import IO, Any

import numpy as np

from stitch.api import check_options
from stitch.api import compile as compile_module
from stitch.argument_kinds import PATH, WRITABLE, either, takes
from stitch.errors import TaskError, UsageError
from stitch.frontend import (
    Explanation,
    array_on,
    explain,
    from_fx,
    graph_counts,
    pytree,
    tensor_on,
)
from stitch.mesh import CompiledStages, specification_of
from stitch.model import CompiledModel
from stitch.program import Array
from stitch.torch.divided_instance import DividedInstance, Passes
from stitch.torch.shared_module import SharedModule, set_tensor_of, share_module, tensor_of, torch
from stitch.training import (
    ALGORITHMS,
    ANY_LOSS,
    ANY_OPTIMIZER,
    PARALLEL_ALGORITHMS,
    LossTensor,
    PendingValue,
    Prediction,
    TrainingInstance,
    check_algorithm,
    is_torch_optimizer,
    keeps_examples,
    loss_of,
    refusing_backward,
    view_text,
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
    """Compile a torch module: now, if an example (and, with an optimizer, a loss) is given, else at
    its first call. Raises what `stitch.compile` raises.

    Args:
        module: The torch module.
        example: Arguments of a call, as for `stitch.compile`.
        algorithm: `none`, `greedy` or `search`.
        optimizer: An optimizer; the model can be trained then.
        loss: The loss function; by default that of the first `loss_fn(pred, y)`.
        backend: If given, return `torch.compile(module, backend=backend, **options)`.
        options: Other options of `stitch.compile`, or of `torch.compile`.
    """
    if backend is not None:
        check_torch_arguments(
            example=example, algorithm=algorithm, optimizer=optimizer, loss=loss, **options
        )
        return torch.compile(module, backend=backend, **options)
    ready = example is not None and (optimizer is None or loss is not None)
    if not ready:
        captured = capture(module, algorithm=algorithm, optimizer=optimizer, loss=loss, **options)
        captured.example = example
        return captured
    return compile_module(
        module, example or (), algorithm=algorithm, optimizer=optimizer, loss=loss, **options
    )


def check_torch_arguments(**arguments: Any) -> None:
    """Raise `UsageError` if arguments of torch.compile come with some of `stitch.compile`."""
    own = ("example", "algorithm", "optimizer", "loss", "devices", "parallel")
    named = [n for n in own if arguments.get(n) is not None and str(arguments[n]) != "none"]
    if named:
        raise UsageError(
            "with backend= this is torch.compile, which does not take these arguments",
            got=", ".join(named),
            remedy="pass options=dict(algorithm=..., optimizer=...) for the backend 'stitch', "
            "or no backend=",
        )


def capture(module: Any, **options: Any) -> CapturedModel:
    """Return the model of a module that is compiled at its first call."""
    is_divided = any(options.get(word) is not None for word in ("devices", "parallel"))
    return (DividedModule if is_divided else CapturedModel)(module, **options)


class CapturedModel:
    """A module that is compiled at its first call, or with its first loss.

    A call returns a tensor or, with an optimizer, a `TensorFuture`. Before the loss is known it
    returns an `AwaitedPrediction`; the first loss function called with one becomes the loss.
    """

    _algorithms: Sequence[str] = ALGORITHMS

    def __init__(
        self, module: Any, *, algorithm: str = "none", optimizer: Any = None, loss: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        check_algorithm(algorithm, self._algorithms)
        if optimizer is not None:
            ANY_OPTIMIZER.check("compile", "optimizer", optimizer)
        if loss is not None:
            ANY_LOSS.check("compile", "loss", loss)
            if optimizer is None:
                raise UsageError("a loss was given without an optimizer",
                                 remedy="compile(optimizer=..., loss=...)")  # fmt: skip
        check_options(optimizer=optimizer, loss=loss, algorithm=algorithm, **options)
        if options.get("dynamic_shapes") is not None:
            raise UsageError(
                "dynamic_shapes= needs example inputs, and no optimizer",
                where=type(module).__name__,
                remedy="stitch.compile(module, example_inputs, dynamic_shapes=...); a training "
                "compiles programs for each size of a batch by itself",
            )
        self.module = module
        #: A module that is never in training mode is trained in evaluation mode.
        self._trains_in = bool(getattr(module, "training", True))
        #: What later calls have in common with the first one: the module's parts with their modes,
        #: and whether arguments have names.
        self._parts = list[tuple[Any, bool]]()
        self._is_named = False
        #: The shapes of predictions, by those of the arguments.
        self.shapes = dict[str, tuple[int, ...]]()
        self.example: Sequence[Any] | Mapping[str, Any] | None = None
        self._algorithm, self._optimizer, self._loss = algorithm, optimizer, loss
        self._options = options
        self._model: CompiledModel | None = None
        if is_torch_optimizer(optimizer):
            hook = optimizer.register_step_pre_hook(weak_method(self._begin_own_step))
            weakref.finalize(self, hook.remove).atexit = False

    def train(self, mode: bool = True) -> CapturedModel:
        """Set the module's training or evaluation mode, as torch does."""
        self.module.train(mode)
        return self

    def eval(self) -> CapturedModel:
        """Set the module's evaluation mode: calls only predict."""
        return self.train(False)

    @property
    def _instance(self) -> TrainingInstance | DividedInstance | None:
        """The training, if it has begun."""
        training = None if self._model is None else self._model.training
        return None if training is None else training.instance

    def _predict(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the module in evaluation mode; torch runs it before the first step, and for a batch
        of another size."""
        instance = self._instance
        if not isinstance(instance, TrainingInstance) or not instance.takes_sizes_of(batch, named):
            with torch.no_grad():
                return _called(self.module, batch, named)
        plain = {name: _plain(value) for name, value in named.items()}
        return PendingValue(instance.predict(*map(_plain, batch), **plain))

    def __call__(self, *batch: Any, **named: Any) -> Any:
        if self._optimizer is not None and self._trains_in and not self.module.training:
            return self._predict(batch, named)
        if self.is_over:
            raise TaskError(
                "this training is closed; the module has its weights",
                remedy="compile the module again: module.compile(...) starts from them",
            )
        batch, named = self._as_first(batch, named)
        if self._model is None:
            if self._optimizer is not None and self._loss is None:
                return AwaitedPrediction(self, batch, named)
            self._capture(batch, named)
        return self.model(*map(_plain, batch), **{n: _plain(v) for n, v in named.items()})

    def _as_first(
        self, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call that trains, by name if the first one has names; raise
        `UsageError` for what the training would not follow."""
        self._trains_in |= bool(getattr(self.module, "training", True))
        if self._optimizer is None:
            return batch, named
        _refuse_gradients(*batch, *named.values())
        if self.is_captured:
            if (parts := self._parts_now()) != self._parts:
                changed = next(
                    (now for now, then in zip(parts, self._parts, strict=False) if now != then),
                    (self.module, self.module.training),
                )
                raise UsageError(
                    "a part of the module was replaced, or has another mode, since it was compiled",
                    where=type(changed[0]).__name__, got=f"training={changed[1]}",
                    remedy="set the modes of all parts before the first call and keep them; for "
                    "other parts compile the module again",
                )  # fmt: skip
            if batch and not named and self._is_named:
                named = signature(self.module.forward).bind(*batch).arguments
                batch = ()
        return batch, named

    def _keep_first(self, named: Mapping[str, Any]) -> None:
        self._is_named = bool(named)
        self._parts = self._parts_now()

    def _parts_now(self) -> list[tuple[Any, bool]]:
        """The parts of the module, and their modes."""
        return [(part, part.training) for part in self.module.modules()]

    def _capture(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if batch and named:
            raise UsageError(
                "the first call has arguments by position and by name",
                expected="all by position, or all by name",
            )
        model = compile_module(
            self.module, self.example or named or batch, algorithm=self._algorithm,
            optimizer=self._optimizer, loss=self._loss, **self._options,
        )  # fmt: skip
        if model.training is not None:
            model = replace(
                model,
                training=replace(model.training, watchers=(partial(share_module, self.module),)),
            )
            self._keep_first(self.example if isinstance(self.example, Mapping) else named)
        self._model = model

    @property
    def _shared(self) -> SharedModule | None:
        """The tensors that module and training share, if it has begun."""
        sharer = None if self._instance is None else self._instance.sharer
        return sharer if isinstance(sharer, SharedModule) else None

    def _begin_own_step(self, _: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The hook before a step of the torch optimizer. If its closure makes the first call, hide
        the gradients from torch's step: the training steps after it."""
        theirs, *others = arguments
        closure = others[0] if others else named.get("closure")
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
        """The loss of a prediction that was made before the loss was known; the first one sets the
        model's loss, unless it fails."""
        is_first = self._model is None
        try:
            if is_first:
                self._loss = loss
                self._capture(awaited.batch, awaited.named)
            if awaited.future is None:
                awaited.future = self(*awaited.batch, **awaited.named)
            result: LossTensor = awaited.future.loss_with(loss, label)
            # A prediction must not keep the training alive.
            awaited.captured = None
        except BaseException:
            if is_first:
                if self._instance is not None:
                    self._instance.close()
                self._model = self._loss = awaited.future = None
            raise
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a compiled module cannot be copied or pickled", where=type(self.module).__name__,
            remedy="copy its module, model.module, which has the weights of the last step",
        )  # fmt: skip

    def __repr__(self) -> str:
        state = repr(self.model) if self.is_captured else "not compiled yet"
        return f"<{type(self).__name__} of {type(self.module).__name__}: {state}>"

    # -- the compiled model ------------------------------------------------------------------------

    @property
    def is_captured(self) -> bool:
        """Whether the module is compiled."""
        return self._model is not None

    @property
    def is_over(self) -> bool:
        """Whether a training was closed: the module has its weights."""
        training = None if self._model is None else self._model.training
        return training is not None and training.is_over

    @property
    def model(self) -> CompiledModel:
        """The compiled model; raises `UsageError` before the module is compiled."""
        if self._model is None:
            needs = "call it" if self._loss or not self._optimizer else "call it and its loss"
            raise UsageError(
                "the module is not compiled yet: its first call compiles it",
                where=type(self.module).__name__,
                remedy=f"{needs} first, or use stitch.torch.compile(module, example, ...)",
            )
        return self._model

    @property
    def instance(self) -> TrainingInstance:
        """The running training; raises `UsageError` if there is none."""
        return self.model.instance

    @property
    def search_result(self) -> Any:
        """The result of the placement algorithm."""
        return self.model.search_result

    def as_json(self, *, weights: bool = True) -> str:
        """As `CompiledModel.as_json`; raises `UsageError` before the module is compiled."""
        return self.model.as_json(weights=weights)

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """As `CompiledModel.dump`; raises `UsageError` before the module is compiled."""
        self.model.dump(file, weights=weights)

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """As `CompiledModel.get_tensor`; before the module is compiled, and after a training, read
        the module."""
        if self._model is not None and not self.is_over:
            return self._model.get_tensor(name, index)
        return tensor_of(self.module, name, index)

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """As `CompiledModel.set_tensor`; before the module is compiled, and after a training, write
        to the module."""
        if self._model is not None and not self.is_over:
            self._model.set_tensor(name, array, index)
        else:
            set_tensor_of(self.module, name, array, index)

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Give loaded values to the training; also tensors that an interrupted update has lost."""
        instance = self._instance
        if isinstance(instance, TrainingInstance):
            for name in instance.kept_names:
                if name in state:
                    instance.set_tensor(name, tensor_of(self.module, name))


class DividedModule(CapturedModel):
    """A module whose loop trains it on several devices.

    Each batch is divided into the micro-batches of a step. In evaluation mode torch runs the
    module, which has the weights of the last step.
    """

    _algorithms = ("none", *PARALLEL_ALGORITHMS)

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        if self._optimizer is None:
            raise UsageError("several devices train a module", where=type(module).__name__,
                             remedy="compile(optimizer=..., devices=...)")  # fmt: skip
        if options.get("parallel") is None and self._algorithm == "none":
            raise UsageError(
                "compile with devices= takes parallel=, or an algorithm that divides a training",
                expected=f"algorithm={' or '.join(map(repr, PARALLEL_ALGORITHMS))}",
                got="algorithm='none'", remedy="algorithm='search'",
            )  # fmt: skip
        self._compiled: CompiledStages | None = None
        self._running: DividedInstance | None = None
        #: The length of all batches.
        self._length = 0

    @property
    def _instance(self) -> DividedInstance | None:
        return None if self._running is None or self._running.is_closed else self._running

    @property
    def is_over(self) -> bool:
        return self._running is not None and self._running.is_closed

    @property
    def is_captured(self) -> bool:
        return self._compiled is not None

    @property
    def model(self) -> Any:
        """The `CompiledStages`; raises `UsageError` before the module is compiled."""
        return super().model if self._compiled is None else self._compiled

    @property
    def instance(self) -> Any:
        """The running training; raises `UsageError` if there is none."""
        if self._instance is None:
            raise UsageError("no training is running", remedy="call the model and its loss first")
        return self._instance

    def _capture(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """With several devices nothing is compiled before the loss of the first batch."""

    def __call__(self, *batch: Any, **named: Any) -> Any:
        if self._trains_in and not self.module.training:
            return self._predict(batch, named)
        if self.is_over:
            return super().__call__(*batch, **named)
        return DividedPrediction(self, *self._as_first(batch, named))

    def compute_loss(self, awaited: AwaitedPrediction, loss: Any, label: Any) -> LossTensor:
        """The loss of a prediction, whose passes run when it is read or by `backward()`."""
        assert isinstance(awaited, DividedPrediction), "a call made it"
        awaited.check_steps()
        _refuse_gradients(label)
        known = loss if self._loss is None else loss_of(self._loss)
        if loss.config() != known.config():
            raise UsageError(
                "the model was compiled with another loss",
                expected=repr(known), got=repr(loss),
                remedy="compile the module again, after model.instance.close()",
            )  # fmt: skip
        # A copy, because the caller may overwrite it before the passes run.
        running, label = self._instance, _copied(label)
        if running is None:
            return self._begin(awaited, loss, label)
        result, awaited.passes = running.compute_loss(self._micro_batches(awaited, loss, label))
        return result

    def _begin(self, awaited: DividedPrediction, loss: Any, label: Any) -> LossTensor:
        """Compile the module for the micro-batches of this batch, and start its training."""
        options = dict(self._options)
        if options.get("parallel") is None:
            options.setdefault("accumulation_steps", self._count)
        pairs = self._micro_batches(awaited, loss, label)
        is_split = len(pairs) > 1 and loss.view
        if is_split and not (
            awaited.shape[:1] == (self._length,) and keeps_examples(awaited.shape, loss.view)
        ):
            raise _no_examples_first(awaited, loss)
        compiled = compile_module(
            self.module, pairs[0][0], algorithm=self._algorithm, optimizer=self._optimizer,
            loss=loss, **options,
        )  # fmt: skip
        part = compiled.model.evaluation.output_type(0).shape
        if is_split and [size * len(pairs) for size in part[:1]] != list(awaited.shape[:1]):
            raise _no_examples_first(awaited, loss)
        running = DividedInstance(compiled)
        try:
            share_module(self.module, running)
            result, awaited.passes = running.compute_loss(pairs)
        except BaseException:
            running.close()
            raise
        self._compiled, self._running, self._loss = compiled, running, loss
        self._keep_first(awaited.named)
        return result

    @property
    def steps(self) -> int:
        """The optimizer steps so far."""
        return 0 if self._running is None else self._running.steps

    @property
    def _count(self) -> int:
        """The micro-batches of a step: by default as many as devices."""
        parallel, devices = self._options.get("parallel"), self._options.get("devices")
        if parallel is not None:
            return int(parallel.get("micro_batches", 1))
        steps: int = self._options.get("accumulation_steps", 1)
        if steps > 1 or self._algorithm == "tensor":
            return steps
        assert devices is not None, "checked when the module was captured"
        return len(specification_of(devices).devices)

    def _micro_batches(
        self, awaited: AwaitedPrediction, loss: Any, label: Any
    ) -> list[tuple[Any, Any]]:
        """Divide a batch along its first axis; raise `UsageError` if that is impossible."""
        if awaited.batch and awaited.named:
            raise UsageError("the call has arguments by position and by name",
                             expected="all by position, or all by name")  # fmt: skip
        count = self._count
        parts = {"the labels": label, **awaited.named}
        parts |= {f"argument {i}": value for i, value in enumerate(awaited.batch)}
        arrays = {name: _array(value) for name, value in parts.items()}
        lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        # One number is the label of each micro-batch: `IdentityLoss` ignores it. For a view of the
        # prediction, an example may have several labels.
        is_one = not arrays["the labels"].ndim and loss.reduction == "mean"
        if is_one or (loss.view and len(lengths) > 1 and not lengths["the labels"] % count):
            del lengths["the labels"]
        length = next(iter(lengths.values()), 0)
        differ = len({*lengths.values()}) > 1
        if differ or not length or length % count:
            raise UsageError(
                f"a batch is divided along its first axis into {count} micro-batches",
                expected="as many examples in all arguments as in the labels" if differ
                else f"a multiple of {count} examples in all arguments and labels",
                got=", ".join(f"{name}: {size}" for name, size in lengths.items()),
                remedy="let the batch be the first axis of all of them: a module that returns "
                "[batch, classes, ...] has labels [batch, ...]" if differ
                else "DataLoader(drop_last=True), or accumulation_steps=N (with parallel=: "
                "micro_batches) that divides it",
            )  # fmt: skip
        if self._running is not None and length != self._length:
            raise UsageError(
                "a training on several devices takes batches of one size",
                expected=f"{self._length} examples", got=str(length),
                remedy="DataLoader(drop_last=True)",
            )  # fmt: skip
        self._length = length
        _check_mean(loss, arrays["the labels"], count)
        pieces = {
            name: np.split(array, count) if array.ndim else [array] * count
            for name, array in arrays.items()
        }
        return [
            (
                {name: pieces[name][k] for name in awaited.named} if awaited.named
                else tuple([pieces[f"argument {i}"][k] for i in range(len(awaited.batch))]),
                pieces["the labels"][k],
            )
            for k in range(count)
        ]  # fmt: skip

    def as_json(self, *, weights: bool = True) -> str:
        """Raise `UsageError`: torch saves the module and the optimizer."""
        raise UsageError(
            "a training on several devices is not written as JSON",
            where=type(self.module).__name__,
            remedy="torch.save((module.state_dict(), optimizer.state_dict()), path): both have the "
            "values of the last step",
        )

    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """Raise `UsageError`, as `as_json`."""
        self.as_json(weights=weights)

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """Return a tensor of the module, which has the values of the last step."""
        return tensor_of(self.module, name, index)

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor of the module; the next step reads it."""
        set_tensor_of(self.module, name, array, index)


def _no_examples_first(awaited: AwaitedPrediction, loss: Any) -> UsageError:
    return UsageError(
        "the first axis of the reshaped prediction is not that of the examples, along which a "
        "batch is divided",
        where=view_text(loss.view), got=f"a prediction of shape {list(awaited.shape)}",
        remedy="keep the examples on the first axis: pred.flatten(0, 1), pred[:, -1]",
    )  # fmt: skip


def _check_mean(loss: Any, label: Array, count: int) -> None:
    """Raise `UsageError` if the mean of a batch is not that of its micro-batches' means."""
    ignored = getattr(loss, "ignore_index", None)
    is_weighted = getattr(loss, "weight", None) is not None or (label == ignored).any()
    if count > 1 and loss.reduction == "mean" and is_weighted:
        raise UsageError(
            "the mean of a batch whose examples have different weights is not that of its "
            "micro-batches", got=f"{loss!r}, {count} micro-batches",
            remedy="reduction='sum', or parallel={'stages': 2, 'micro_batches': 1}",
        )  # fmt: skip


class AwaitedPrediction(Prediction):
    """A prediction of a model whose loss is not known yet: calling a loss function sets it."""

    __slots__ = ("_read", "batch", "captured", "future", "named")

    def __init__(
        self, captured: CapturedModel, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        #: None after the loss: a prediction must not keep the model alive.
        self.captured: CapturedModel | None = captured
        # Copies, because the caller may overwrite the batch before the loss.
        self.batch = tuple(map(_copied, batch))
        self.named = {name: _copied(value) for name, value in named.items()}
        #: The prediction, after the loss.
        self.future: Any = None
        self._read: Any = None

    def loss_with(self, loss: Any, label: Any) -> LossTensor:
        """The loss of this prediction, which becomes the model's loss."""
        if self.captured is None:
            result: LossTensor = self.future.loss_with(loss, label)
            return result
        return self.captured.compute_loss(self, loss, label)

    def elements(self) -> Any:
        """The prediction. Before the loss, a copy of the torch module computes it; statistics and
        random numbers of the original do not change."""
        if self.future is not None:
            return self.future.elements()
        assert self.captured is not None, "there was no loss yet"
        if self._read is None:
            module = self._module(self.captured.module)
            with torch.no_grad(), torch.random.fork_rng():
                self._read = _called(module, self.batch, self.named)
        # Its gradients are not the training's: backward() of what is computed from it is refused.
        return pytree.tree_map(
            lambda each: refusing_backward(each.detach()) if torch.is_tensor(each) else each,
            self._read,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        if self.future is not None:
            found: tuple[int, ...] = self.future.shape
            return found
        assert self.captured is not None, "there was no loss yet"
        # Reading it computes the prediction: once for each shape of the arguments.
        leaves, form = pytree.tree_flatten((self.batch, self.named))
        kinds = [getattr(leaf, "shape", leaf) for leaf in leaves]
        key = repr((kinds, form, self.captured.module.training))
        shapes = self.captured.shapes
        if key not in shapes:
            elements = self.elements()
            if not torch.is_tensor(elements):
                raise UsageError("the prediction of a model in training is one tensor",
                                 got=type(elements).__name__)  # fmt: skip
            shapes[key] = tuple(elements.shape)
        return shapes[key]

    def _module(self, module: Any) -> Any:
        """Return the copy of the module that computes the prediction."""
        return deepcopy(module)

    def numpy(self) -> Array:
        return np.asarray(_plain(self.elements()))

    def wait(self) -> AwaitedPrediction:
        """Wait for the prediction; before the loss nothing is queued."""
        if self.future is not None:
            self.future.wait()
        return self

    def __repr__(self) -> str:
        return f"<AwaitedPrediction {self.future!r}>" if self.future is not None else (
            "<AwaitedPrediction: its loss is not known yet>")  # fmt: skip


class DividedPrediction(AwaitedPrediction):
    """A prediction on several devices, which torch computes if it is read, with the weights that
    its passes used: loops read it after the step, too."""

    __slots__ = ("_modes", "_steps", "passes")

    def __init__(
        self, captured: DividedModule, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        super().__init__(captured, batch, named)
        self._steps = captured.steps
        self._modes = [part.training for part in captured.module.modules()]
        self.passes: Passes | None = None

    def check_steps(self) -> None:
        """Raise `UsageError` if the weights have changed since."""
        if self._is_late:
            raise UsageError(
                "this prediction was made before a step, which has changed the weights",
                remedy="compute its loss before optimizer.step()",
            )

    @property
    def _is_late(self) -> bool:
        captured = self.captured
        assert isinstance(captured, DividedModule), "it made this prediction"
        return captured.steps != self._steps

    def _module(self, module: Any) -> Any:
        values = {} if self.passes is None else self.passes.values
        if not values:
            self.check_steps()
        copied = super()._module(module)
        for part, mode in zip(copied.modules(), self._modes, strict=False):
            part.training = mode
        if self._is_late:
            for name, array in values.items():
                set_tensor_of(copied, name, array)
        return copied


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _plain(value: Any) -> Any:
    """An argument without gradients, and not of bfloat16, which NumPy would refuse."""
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.bfloat16 and value.device.type == "cpu":
            return array_on(value)
        return value.detach() if value.requires_grad else value
    return value


def _array(value: Any) -> Array:
    try:
        return array_on(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise UsageError("an argument or label is no array", got=f"{type(value).__name__}: {error}",
                         remedy="pass dense tensors of the CPU, or arrays") from error  # fmt: skip


def _refuse_gradients(*values: Any) -> None:
    """Raise `UsageError` if `backward()` would have to compute the gradient of a value."""
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in values):
        raise UsageError(
            "an argument or label has a gradient, which backward() would not compute",
            remedy="pass x.detach(), or make what computes it a part of the module",
        )


def _called(module: Any, batch: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Call a torch module, also with arrays."""
    return module(*pytree.tree_map(_tensor, batch), **pytree.tree_map(_tensor, dict(named)))


def _tensor(value: Any) -> Any:
    return tensor_on(value) if isinstance(value, np.ndarray) else value

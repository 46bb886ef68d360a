"""Share the tensors of a torch module with a training while it runs.

When the training ends, the module has its values in its own memory. Changes of the module that the
training cannot follow raise an error before the next program runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError, closest
from stitch.frontend import (
    OverwrittenTensor,
    RelocatedParameters,
    SharedStorage,
    array_on,
    untraced_tensor_on,
)
from stitch.program import Array, DataType, Layout, Space
from stitch.runtime import Tensor, comparison_of, share
from stitch.torch.divided_instance import DividedInstance
from stitch.training import TrainingInstance, part_of, with_part

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "stitch.torch needs the package torch", remedy="pip install 'stitch-runtime[torch]'"
    ) from error

__all__ = ["SharedModule", "set_tensor_of", "share_module", "tensor_of", "torch"]

# Tensors of torch modules -------------------------------------------------------------------------


def tensor_of(module: Any, name: str, index: Any = ...) -> Array:
    """Return a copy of a parameter, buffer or gradient (`fc.weight.grad`) of a module, or of a
    part; raises `UsageError` for unknown names."""
    tensor = _lookup(module, name).detach()
    array = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return np.array(part_of(name, array, index))


def set_tensor_of(module: Any, name: str, array: Any, index: Any = ...) -> None:
    """Overwrite a parameter, buffer or gradient of a module, or a part; raises `UsageError`."""
    tensor = _lookup(module, name)
    whole = with_part(name, tensor_of(module, name), array, index)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(whole))


def _lookup(module: Any, name: str) -> Any:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    stem = name.removesuffix(".grad")
    if name not in tensors and stem in tensors and stem != name:
        if tensors[stem].grad is None:
            raise UsageError(f"parameter {stem!r} has no gradient now",
                             remedy="read it between backward() and zero_grad()")  # fmt: skip
        return tensors[stem].grad
    if name not in tensors:
        raise UsageError(f"the module has no tensor {name!r}",
                         remedy=closest(name, tensors) or None)  # fmt: skip
    return tensors[name]


#: The owner of each parameter in training, by the id of torch's object.
_owners: dict[int, SharedModule] = {}


def share_module(
    module: Any, instance: TrainingInstance | DividedInstance
) -> SharedModule | None:  # fmt: skip
    """Share a module's tensors with a new training; None if its device does not compute."""
    device = instance.device
    return SharedModule(module, instance) if device is None or device.computes else None


@dataclass(slots=True)
class _ModuleTensor:
    """A tensor of the module at `slots[key]`, with its data, and where and how that lies."""

    name: str
    slots: dict[str, Any]
    key: str
    tensor: Any
    data: Any
    place: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor of the training that has memory of its own: `known` is the last common value of
    torch's array and the training, `differs` compares both."""

    theirs: Array
    known: Array
    differs: Callable[[], object]

    @staticmethod
    def of(theirs: Array, known: Array | None = None) -> _Copy:
        common = np.array(theirs, order="C") if known is None else np.asarray(known, order="C")
        return _Copy(theirs, common, comparison_of(theirs, common))


class SharedModule:
    """The tensors that a module shares with a training; raises `UsageError` if another training
    shares one of them, or if they do not match the training.

    Programs overwrite torch's memory, or torch uses the device's. Of tensors in another layout or
    type, of those that programs allocate anew, and of constants, both have copies, which are
    compared.
    """

    def __init__(self, module: Any, instance: TrainingInstance | DividedInstance) -> None:
        self._instance, self._relocated = weakref.ref(instance), RelocatedParameters()
        device = instance.device
        self._storage = None if device is None else SharedStorage(device)
        self._overwritten = dict[str, OverwrittenTensor]()
        self._copies, self._constants = dict[str, _Copy](), dict[str, _Copy]()
        #: The torch tensors on gradients that were read.
        self._gradients = dict[str, Any]()
        trained = {*instance.parameter_names}
        tensors = list(_tensors_of(module))
        self._parameters = {id(e.tensor): (e.name, e.tensor) for e in tensors if e.name in trained}
        self._named = {e.name: e for e in tensors if e.name in trained.union(instance.buffer_names)}
        #: Whether each parameter is trained.
        self._trained = [
            (e.name, e.tensor, e.tensor.requires_grad) for e in tensors
            if isinstance(e.tensor, torch.nn.Parameter)
        ]  # fmt: skip
        # The programs do not use the others.
        self._tensors = [
            e for e in tensors
            if e.name in self._named or e.name in instance.constants
            or id(e.tensor) in self._parameters
        ]  # fmt: skip
        taken = [name for number, (name, _) in self._parameters.items() if number in _owners]
        if taken:
            raise UsageError(
                "another training has the tensors of this module", got=", ".join(taken[:4]),
                remedy="close it first: model.instance.close(), or train a copy of the module",
            )  # fmt: skip
        wrong = [
            f"{name} is {list(e.data.shape)}, expected {list(instance.desc_of(name).shape)}"
            for name, e in self._named.items() if e.data.shape != instance.desc_of(name).shape
        ]  # fmt: skip
        if wrong:
            raise UsageError("the tensors do not match the model: " + "; ".join(wrong[:8]))
        #: Whether gradients are hidden from torch's own step.
        self.hides_gradients = False
        #: Ends the sharing if the training is freed without being closed.
        self._finalizer = weakref.finalize(instance, self._finalize)
        self._finalizer.atexit = False
        self._kinds: dict[int, Any] = {n: type(p) for n, (_, p) in self._parameters.items()}
        for number, (_, parameter) in self._parameters.items():
            _owners[number] = self
            parameter.__class__ = _shared_class(self._kinds[number])
        try:
            for entry in self._tensors:
                if entry.name in self._named:
                    array_on(entry.data)[...] = instance.current(entry.name)
                self._connect(entry, instance)
        except BaseException:
            self.end()
            raise
        instance.sharer = self

    def _connect(
        self, entry: _ModuleTensor, instance: TrainingInstance | DividedInstance
    ) -> None:  # fmt: skip
        """Make a tensor of the module and the training share memory, or keep copies; the training
        has torch's values then."""
        name, tensor = entry.name, entry.tensor
        if name in self._named:
            desc = instance.desc_of(name)
            storage, is_changed = self._storage, name in instance.changed_buffers
            if storage is not None and _is_shareable(desc.layout, tensor) and not is_changed:
                assert isinstance(instance, TrainingInstance), "it has a storage"
                instance.hold(name, None)
                shared = OverwrittenTensor(storage, tensor, desc)
                instance.hold(name, shared.value)
                shared.invalidate()
                if not shared.is_at(tensor):
                    self._relocated.relocate(tensor, shared.tensor)
                self._overwritten[name] = shared
            else:
                self._copies[name] = _Copy.of(array_on(tensor))
                instance.write(name, self._copies[name].theirs)
        elif name in instance.constants:
            self._constants[name] = _Copy.of(array_on(tensor), instance.constants[name])
        for other in self._tensors:
            if other.tensor is tensor:
                other.data, other.place = tensor.data, _place_of(tensor)

    # -- called by the training --------------------------------------------------------------------

    def take_writes(self, *, runs: bool) -> None:
        """Pass what torch has written or moved to the training; with `runs`, raise `UsageError` if
        torch has changed a constant of the programs."""
        for entry in self._tensors:
            tensor = entry.slots.get(entry.key)
            if tensor is not entry.tensor or _place_of(tensor) != entry.place:
                self._take(entry, tensor)
        for name, copy in self._constants.items() if runs else ():
            if copy.differs():
                raise UsageError(
                    f"{name} was changed after the model was compiled: it is frozen, so it is a "
                    "constant of the programs of this training",
                    remedy="restore its value, or compile the model again",
                )
        # Another thread may read gradients meanwhile.
        for name, copy in [*self._copies.items()]:
            if copy.differs():
                self._training().write(name, copy.theirs)

    def _training(self) -> TrainingInstance | DividedInstance:
        instance = self._instance()
        assert instance is not None, "it is the caller"
        return instance

    def _take(self, entry: _ModuleTensor, tensor: Any) -> None:
        is_parameter = isinstance(entry.tensor, torch.nn.Parameter)
        is_other = tensor is not entry.tensor
        if not isinstance(tensor, torch.Tensor) or (is_parameter and is_other):
            raise UsageError(
                f"{entry.name} was replaced after the model was compiled: the optimizer and the "
                "programs still use the old tensor",
                remedy="write into it (parameter.data.copy_(...)), or compile the model again",
            )
        if tensor.shape != entry.data.shape or tensor.dtype != entry.data.dtype:
            raise UsageError(
                f"{entry.name} was given data of another type or shape after the model was "
                "compiled",
                expected=f"{entry.data.dtype}{list(entry.data.shape)}",
                got=f"{tensor.dtype}{list(tensor.shape)}", remedy="compile the model again",
            )  # fmt: skip
        shared = self._shares_memory(tensor)
        device = self._training().device
        if shared is not None and (device is None or not device.reads_in_place):
            raise UsageError(
                f"{entry.name} was given the memory of {shared} after the model was compiled: the "
                "programs have them apart",
                remedy="copy the values (parameter.data.copy_(...)), or compile the model again",
            )
        entry.tensor = tensor
        # A tied parameter has one entry that the programs know.
        name, _ = self._parameters.get(id(tensor), (entry.name, None))
        self._connect(self._named.get(name, entry), self._training())

    def _shares_memory(self, tensor: Any) -> str | None:
        """Return the name of another tensor in the storage of this one, if there is one."""
        if not isinstance(tensor, torch.Tensor):
            return None
        base = tensor.untyped_storage().data_ptr()
        for other in self._tensors:
            now = other.slots.get(other.key)
            if now is None or now is tensor or not now.numel():
                continue
            if now.untyped_storage().data_ptr() == base:
                return other.name
        return None

    def show(self, names: Iterable[str]) -> None:
        """Update copies after programs have changed tensors."""
        for name in names:
            copy = self._copies.get(name)
            if copy is not None:
                copy.theirs[...] = self._training().current(name)
                copy.known[...] = copy.theirs
            else:
                self._gradients.pop(name, None)

    def written(self, name: str, *, is_moved: bool) -> None:
        """Take over a tensor that was set by name."""
        if is_moved and name in self._overwritten:
            entry, instance = self._named[name], self._training()
            array_on(entry.tensor)[...] = instance.current(name)
            self._connect(entry, instance)
        elif is_moved or name in self._copies:
            self.show((name,))

    def check_step(self) -> None:
        """Raise `UsageError` if a parameter has a gradient of torch's own backward pass, was frozen
        or released, or has hooks."""
        self.hides_gradients = False
        for name, parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                raise UsageError(
                    f"requires_grad of {name} was changed after the model was compiled",
                    remedy="restore it, or compile the model again",
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{name} has a hook for its gradient, which the compiled model does not call",
                    remedy="remove it, or train with torch.compile(module, backend='stitch')",
                )
        for name, parameter in self._parameters.values():
            if _own_gradient(parameter) is not None:
                raise UsageError(
                    f"torch's own backward pass has set the gradient of {name}: the step of the "
                    "compiled model would ignore it",
                    remedy="call optimizer.zero_grad() after that pass, or use torch.autograd.grad",
                )

    def gradients_dropped(self) -> None:
        """Remove all gradients."""
        self._clear_gradients()
        for _, parameter in self._parameters.values():
            if _own_gradient(parameter) is not None:
                _set_own_gradient(parameter, None)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Hide the training's gradients from torch."""
        before = self.hides_gradients
        self.hides_gradients = True
        try:
            yield
        finally:
            self.hides_gradients = before

    def end(self) -> None:
        """Copy the training's values to the module's own memory. After an interrupt, call it again;
        otherwise the finalizer continues."""
        self._restore()
        self._finalizer.detach()

    def _finalize(self) -> None:
        # Called once only, so try again after an interrupt.
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Each step may be repeated."""
        self._relocated.restore()
        self._clear_gradients()
        for number, (_, parameter) in self._parameters.items():
            if _owners.get(number) is self:
                parameter.__class__ = self._kinds[number]
                del _owners[number]

    # -- gradients ---------------------------------------------------------------------------------

    def gradient(self, parameter: Any) -> Any:
        """The training's gradient of a parameter; None if there is none now."""
        own, instance = _own_gradient(parameter), self._instance()
        if self.hides_gradients or own is not None or instance is None or instance.is_closed:
            return own
        name = f"{self._parameters[id(parameter)][0]}.grad"
        if name not in self._gradients:
            value = instance.gradient(name.removesuffix(".grad"))
            if value is None:
                return None
            if isinstance(value, Tensor) and _is_shareable(value.layout, parameter):
                with value.device.lock:
                    array = share(value)
            else:
                array = np.asarray(value).astype(array_on(parameter).dtype)
                self._copies[name] = _Copy.of(array)
            self._gradients[name] = untraced_tensor_on(array, parameter.dtype)
        return self._gradients[name]

    def _clear_gradients(self, *names: str) -> None:
        for name in names or [*self._gradients]:
            self._gradients.pop(name, None)
            self._copies.pop(name, None)

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """`parameter.grad = gradient`: overwrite the training's gradient if it has one; None
        removes it."""
        name, _ = self._parameters[id(parameter)]
        current, instance = self.gradient(parameter), self._instance()
        if instance is None or instance.is_closed or _own_gradient(parameter) is not None:
            _set_own_gradient(parameter, gradient)
        elif gradient is None:
            instance.drop_gradient(name)
            self._clear_gradients(f"{name}.grad")
        elif gradient is not current and not instance.set_gradient(name, array_on(gradient)):
            _set_own_gradient(parameter, gradient)


def _tensors_of(module: Any) -> Iterator[_ModuleTensor]:
    """The tensors of a module and its parts, under all of their names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for slots in (vars(part).get("_parameters", {}), vars(part).get("_buffers", {})):
            for key, tensor in slots.items():
                if isinstance(tensor, torch.Tensor):
                    name = f"{prefix}.{key}" if prefix else key
                    yield _ModuleTensor(name, slots, key, tensor, tensor.data, _place_of(tensor))


def _place_of(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor lies, and how: `.data` may be set to other strides at the same address."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_shareable(layout: Layout, tensor: Any) -> bool:
    """Whether torch and programs can use the same memory. Plans must be able to evict from L1."""
    is_plain = layout.data_type is DataType.FLOAT32 and tensor.dtype is torch.float32
    return bool(
        is_plain and layout.is_dense and layout.space is not Space.L1 and tensor.numel()
    )  # fmt: skip


@cache
def _shared_class(kind: Any) -> Any:
    """A subclass of a parameter's class whose `grad` is the training's; copies have the class
    `kind`."""

    def copied(parameter: Any, memo: dict[int, Any]) -> Any:
        duplicate = kind.__deepcopy__(parameter, memo)
        if type(duplicate) is shared:
            duplicate.__class__ = kind
        return duplicate

    grad = property(
        lambda parameter: _owners[id(parameter)].gradient(parameter),
        lambda parameter, gradient: _owners[id(parameter)].set_gradient(parameter, gradient),
        lambda parameter: _owners[id(parameter)].set_gradient(parameter, None),
    )
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    shared = type(kind)(kind.__name__, (kind,), {"grad": grad, "__deepcopy__": copied, **named})
    return shared


def _own_gradient(parameter: Any) -> Any:
    """The gradient that torch has of a parameter."""
    return torch.Tensor.grad.__get__(parameter)


def _set_own_gradient(parameter: Any, gradient: Any) -> None:
    torch.Tensor.grad.__set__(parameter, gradient)

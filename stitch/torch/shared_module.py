"""Share the tensors of a torch module with a training while it runs.

When the training ends, the module has its values in its own memory. Changes of the module that the
training cannot follow raise an error before the next program runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError, closest
from stitch.frontend import RelocatedParameters, array_on, tensor_on, untraced_tensor_on
from stitch.program import Array
from stitch.runtime import comparison_of
from stitch.training import TrainingInstance, part_of, with_part

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "stitch.torch needs the package torch", remedy="pip install 'stitch-runtime[torch]'"
    ) from error

__all__ = ["SharedModule", "set_tensor_of", "share", "tensor_of", "torch"]

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


def share(module: Any, instance: TrainingInstance) -> SharedModule | None:
    """Share a module's tensors with a new training; None if its device does not compute."""
    return SharedModule(module, instance) if instance.device.computes else None


@dataclass(slots=True)
class _ModuleTensor:
    """A tensor of the module at `slots[key]`, with its data and address."""

    name: str
    slots: dict[str, Any]
    key: str
    tensor: Any
    data: Any
    address: int
    #: If it is a constant of the programs: their value, and whether the tensor differs now.
    constant: Array | None = None
    differs: Callable[[], object] | None = None

    def update(self, tensor: Any) -> None:
        """Record the object and address of the tensor."""
        self.tensor, self.data, self.address = tensor, tensor.data, tensor.data_ptr()
        if self.constant is not None:
            self.constant = np.asarray(self.constant, order="C")
            self.differs = comparison_of(array_on(tensor), self.constant)


class SharedModule:
    """The tensors that a module shares with a training; raises `UsageError` if another training
    shares one of them."""

    def __init__(self, module: Any, instance: TrainingInstance) -> None:
        self._instance = weakref.ref(instance)
        self._relocated = RelocatedParameters()
        self._tensors, self._parameters = list[_ModuleTensor](), dict[int, tuple[str, Any]]()
        #: For each gradient, the training's array and the torch tensor on it.
        self._gradients: dict[str, tuple[Array, Any]] = {}
        trained = {parameter.name for parameter in instance.programs.parameters}
        arrays: dict[str, Array] = {}
        for entry in _tensors_of(module):
            if entry.name in trained:
                self._parameters[id(entry.tensor)] = entry.name, entry.tensor
            if entry.name in trained or entry.name in instance.programs.buffers:
                arrays[entry.name] = array_on(entry.data)
            elif entry.name in instance.constants:
                entry.constant = instance.constants[entry.name]
                entry.update(entry.tensor)
            self._tensors.append(entry)
        # The programs do not use the others.
        self._tensors = [
            entry for entry in self._tensors
            if entry.name in arrays or entry.differs is not None
            or id(entry.tensor) in self._parameters
        ]  # fmt: skip
        taken = [name for number, (name, _) in self._parameters.items() if number in _owners]
        if taken:
            raise UsageError(
                "another training has the tensors of this module", got=", ".join(taken[:4]),
                remedy="close it first: model.instance.close(), or train a copy of the module",
            )  # fmt: skip
        #: Whether gradients are hidden from torch's own step.
        self.hides_gradients = False
        #: Ends the sharing if the training is freed without being closed.
        self._finalizer = weakref.finalize(instance, self._finalize)
        self._finalizer.atexit = False
        self._kinds: dict[int, Any] = {n: type(p) for n, (_, p) in self._parameters.items()}
        for number, (_, parameter) in self._parameters.items():
            _owners[number] = self
            parameter.__class__ = _shared_class(self._kinds[number])
        self._dtypes = {name: array.dtype for name, array in arrays.items()}
        try:
            shared = instance.share(self, arrays)
        except BaseException:
            self.end()
            raise
        for name, array in shared.items():
            if array is not arrays[name]:
                self.moved(name, array)

    # -- called by the training --------------------------------------------------------------------

    def take_writes(self) -> None:
        """Copy tensors that torch has moved to the training's memory."""
        for entry in self._tensors:
            tensor = entry.slots.get(entry.key)
            if tensor is not entry.tensor or tensor.data_ptr() != entry.address:
                self._take(entry, tensor)

    def check_constants(self) -> None:
        """Raise `UsageError` if torch has changed a constant of the programs."""
        for entry in self._tensors:
            if entry.differs is not None and entry.differs():
                raise UsageError(
                    f"{entry.name} was changed after the model was compiled: it is frozen, so it "
                    "is a constant of the programs of this training",
                    remedy="restore its value, or compile the model again",
                )

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
        if entry.constant is not None:
            entry.update(tensor)
            return
        aliases = [other for other in self._tensors if other.tensor is entry.tensor]
        with torch.no_grad():
            entry.data.copy_(tensor.data)
            entry.tensor.data = entry.data
        for other in aliases:
            other.slots[other.key] = entry.tensor

    def check_step(self) -> None:
        """Raise `UsageError` if a parameter has a gradient of torch's own backward pass."""
        self.hides_gradients = False
        for name, parameter in self._parameters.values():
            if _own_gradient(parameter) is not None:
                raise UsageError(
                    f"torch's own backward pass has set the gradient of {name}: the step of the "
                    "compiled model would ignore it",
                    remedy="call optimizer.zero_grad() after that pass, or use torch.autograd.grad",
                )

    def moved(self, name: str, array: Array) -> None:
        """Make a tensor share the memory of an array, and its values."""
        tensor = next(entry.tensor for entry in self._tensors if entry.name == name)
        self._relocated.relocate(tensor, tensor_on(array, tensor.dtype))
        for entry in self._tensors:
            if entry.tensor is tensor:
                entry.update(tensor)

    def gradients_dropped(self) -> None:
        """Remove all gradients."""
        self._gradients.clear()
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
        self._gradients.clear()
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
        name, _ = self._parameters[id(parameter)]
        array = instance.gradient(name, self._dtypes[name])
        if array is None:
            return None
        entry = self._gradients.get(name)
        if entry is None or entry[0] is not array:
            entry = self._gradients[name] = array, untraced_tensor_on(array, parameter.dtype)
        return entry[1]

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """`parameter.grad = gradient`: overwrite the training's gradient if it has one; None
        removes it."""
        name, _ = self._parameters[id(parameter)]
        current, instance = self.gradient(parameter), self._instance()
        if instance is None or instance.is_closed or _own_gradient(parameter) is not None:
            _set_own_gradient(parameter, gradient)
        elif gradient is None:
            self._gradients.pop(name, None)
            instance.drop_gradient(name)
        elif gradient is not current and not instance.set_gradient(name, array_on(gradient)):
            _set_own_gradient(parameter, gradient)


def _tensors_of(module: Any) -> Iterator[_ModuleTensor]:
    """The tensors of a module and its parts, under all of their names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for slots in (vars(part).get("_parameters", {}), vars(part).get("_buffers", {})):
            for key, tensor in slots.items():
                if isinstance(tensor, torch.Tensor):
                    name = f"{prefix}.{key}" if prefix else key
                    yield _ModuleTensor(name, slots, key, tensor, tensor.data, tensor.data_ptr())


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

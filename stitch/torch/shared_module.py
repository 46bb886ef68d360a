"""A module of torch's whose tensors are those of a training, for as long as that is on.

When the training ends, however it does, the module has its values, in its own bytes. What cannot be
followed is refused before the next program runs.
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
from stitch.frontend import ParameterHomes, array_on, tensor_on
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

# --------------------------------------------------------------------------------------------------
# Tensors of torch modules


def tensor_of(module: Any, name: str, index: Any = ...) -> Array:
    """A parameter or buffer of a module, or a part of it, as an array of its own.

    `fc.weight.grad` is a gradient. Raises `UsageError` for what it has not.
    """
    tensor = _found(module, name).detach()
    array = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return np.array(part_of(name, array, index))


def set_tensor_of(module: Any, name: str, array: Any, index: Any = ...) -> None:
    """Overwrite a parameter or buffer of a module, or a part of it; raises `UsageError`."""
    tensor = _found(module, name)
    whole = with_part(name, tensor_of(module, name), array, index)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(whole))


def _found(module: Any, name: str) -> Any:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    stem = name.removesuffix(".grad")
    if name not in tensors and stem in tensors and stem != name:
        if tensors[stem].grad is None:
            raise UsageError(f"tensor {name!r} is not there just now",
                             remedy="gradients live from backward to zero_grad")  # fmt: skip
        return tensors[stem].grad
    if name not in tensors:
        raise UsageError(f"the module has no tensor {name!r}",
                         remedy=closest(name, tensors) or None)  # fmt: skip
    return tensors[name]


#: Who has a parameter that is in training, by the identity of torch's object.
_sharers: dict[int, SharedModule] = {}


def share(module: Any, instance: TrainingInstance) -> SharedModule | None:
    """A module's tensors are those of a training that begins; None where that computes nothing."""
    return SharedModule(module, instance) if instance.device.computes else None


@dataclass(slots=True)
class _Held:
    """A tensor of the module: where it is found, which object it is, and its bytes (`data`)."""

    name: str
    slots: dict[str, Any]
    key: str
    tensor: Any
    data: Any
    address: int
    #: What the programs have of it, if it is a constant of theirs, and whether it differs now.
    constant: Array | None = None
    differs: Callable[[], object] | None = None

    def put(self, tensor: Any) -> None:
        """It is this object now, and lies where that does."""
        self.tensor, self.data, self.address = tensor, tensor.data, tensor.data_ptr()
        if self.constant is not None:
            self.constant = np.asarray(self.constant, order="C")
            self.differs = comparison_of(array_on(tensor), self.constant)


class SharedModule:
    """The tensors of a module, while a training has them too; raises `UsageError` where another
    training has them already."""

    def __init__(self, module: Any, instance: TrainingInstance) -> None:
        self._instance = weakref.ref(instance)
        self._homes = ParameterHomes()
        self._held, self._parameters = list[_Held](), dict[int, tuple[str, Any]]()
        #: Gradients as torch has them, and what they are views of.
        self._gradients: dict[str, tuple[Array, Any]] = {}
        trained = {parameter.name for parameter in instance.programs.parameters}
        arrays: dict[str, Array] = {}
        for held in _tensors_of(module):
            if held.name in trained:
                self._parameters[id(held.tensor)] = held.name, held.tensor
            if held.name in trained or held.name in instance.programs.buffers:
                arrays[held.name] = array_on(held.data)
            elif held.name in instance.constants:
                held.constant = instance.constants[held.name]
                held.put(held.tensor)
            self._held.append(held)
        # The rest is no business of the programs.
        known = self._parameters
        self._held = [
            held for held in self._held
            if held.name in arrays or held.differs is not None or id(held.tensor) in known
        ]  # fmt: skip
        taken = [name for number, (name, _) in self._parameters.items() if number in _sharers]
        if taken:
            raise UsageError(
                "another training has the tensors of this module", got=", ".join(taken[:4]),
                remedy="close it first: model.instance.close(), or train a copy of the module",
            )  # fmt: skip
        #: Whether torch's own step is looking for gradients: it is to find none.
        self.hides_gradients = False
        #: Ends it where nobody closes the training.
        self._finalizer = weakref.finalize(instance, self._give_back)
        self._finalizer.atexit = False
        self._kinds: dict[int, Any] = {n: type(p) for n, (_, p) in self._parameters.items()}
        for number, (_, parameter) in self._parameters.items():
            _sharers[number] = self
            parameter.__class__ = _followed(self._kinds[number])
        self._dtypes = {name: array.dtype for name, array in arrays.items()}
        try:
            given = instance.share(self, arrays)
        except BaseException:
            self.end()
            raise
        for name, array in given.items():
            if array is not arrays[name]:
                self.moved(name, array)

    # -- what a training tells of ------------------------------------------------------------------

    def take_writes(self) -> None:
        """What torch has put elsewhere is brought to where the training has it."""
        for held in self._held:
            tensor = held.slots.get(held.key)
            if tensor is not held.tensor or tensor.data_ptr() != held.address:
                self._take(held, tensor)

    def check_constants(self) -> None:
        """Raise `UsageError` where torch has changed what the programs have as a constant."""
        for held in self._held:
            if held.differs is not None:
                _check_constant(held)

    def _take(self, held: _Held, tensor: Any) -> None:
        """A tensor of the module is another object, or lies elsewhere, than the training knew."""
        is_parameter = isinstance(held.tensor, torch.nn.Parameter)
        is_other = tensor is not held.tensor
        if not isinstance(tensor, torch.Tensor) or (is_parameter and is_other):
            raise UsageError(
                f"{held.name} was replaced after the model was compiled: the optimizer and the "
                "programs have the tensor of then",
                remedy="write into it (parameter.data.copy_(...)), or compile the model again",
            )
        if tensor.shape != held.data.shape or tensor.dtype != held.data.dtype:
            raise UsageError(
                f"{held.name} was given other data after the model was compiled",
                expected=f"{held.data.dtype}{list(held.data.shape)}",
                got=f"{tensor.dtype}{list(tensor.shape)}", remedy="compile the model again",
            )  # fmt: skip
        if held.constant is not None:
            held.put(tensor)
            return
        others = [h for h in self._held if h.tensor is held.tensor]
        with torch.no_grad():
            held.data.copy_(tensor.data)
            held.tensor.data = held.data
        for other in others:
            other.slots[other.key] = held.tensor

    def check_step(self) -> None:
        """Raise `UsageError` where gradients are torch's own, which the update would miss."""
        self.hides_gradients = False
        for name, parameter in self._parameters.values():
            if _own_gradient(parameter) is not None:
                raise UsageError(
                    f"torch itself went backward to {name}: the compiled model's step would miss "
                    "that gradient",
                    remedy="optimizer.zero_grad() after it, or torch.autograd.grad instead",
                )

    def moved(self, name: str, array: Array) -> None:
        """A tensor's elements are in this array from now on."""
        tensor = next(held.tensor for held in self._held if held.name == name)
        self._homes.move(tensor, tensor_on(array, tensor.dtype))
        for held in self._held:
            if held.tensor is tensor:
                held.put(tensor)

    def gradients_dropped(self) -> None:
        """There are no gradients any more."""
        self._gradients.clear()
        for _, parameter in self._parameters.values():
            if _own_gradient(parameter) is not None:
                _set_own_gradient(parameter, None)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Within it the parameters have no gradients of the training."""
        before = self.hides_gradients
        self.hides_gradients = True
        try:
            yield
        finally:
            self.hides_gradients = before

    def end(self) -> None:
        """The module has the training's values, in its own bytes; what was interrupted goes on
        when it is called again, or when the training is gone."""
        self._bring_back()
        self._finalizer.detach()

    def _give_back(self) -> None:
        """The training is gone, and nobody calls this again."""
        try:
            self._bring_back()
        except BaseException:
            self._bring_back()
            raise

    def _bring_back(self) -> None:
        """Each step of it may be done twice."""
        self._homes.bring_back()
        self._gradients.clear()
        for number, (_, parameter) in self._parameters.items():
            if _sharers.get(number) is self:
                parameter.__class__ = self._kinds[number]
                del _sharers[number]

    # -- gradients ---------------------------------------------------------------------------------

    def gradient(self, parameter: Any) -> Any:
        """The training's gradient of a parameter; None where there is none just now."""
        own, instance = _own_gradient(parameter), self._instance()
        if self.hides_gradients or own is not None or instance is None or instance.is_closed:
            return own
        name, _ = self._parameters[id(parameter)]
        array = instance.gradient(name, self._dtypes[name])
        if array is None:
            return None
        known = self._gradients.get(name)
        if known is None or known[0] is not array:
            # Somebody may ask in the middle of torch's tracing.
            with torch.utils._python_dispatch._disable_current_modes():
                known = self._gradients[name] = array, tensor_on(array, parameter.dtype)
        return known[1]

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """`parameter.grad = gradient`: the training's, if it has one; None drops it."""
        name, _ = self._parameters[id(parameter)]
        there, instance = self.gradient(parameter), self._instance()
        if instance is None or instance.is_closed or _own_gradient(parameter) is not None:
            _set_own_gradient(parameter, gradient)
        elif gradient is None:
            self._gradients.pop(name, None)
            instance.drop_gradient(name)
        elif gradient is not there and not instance.set_gradient(name, array_on(gradient)):
            _set_own_gradient(parameter, gradient)


def _check_constant(held: _Held) -> None:
    """Raise `UsageError` where torch has changed what the programs have as a constant."""
    assert held.differs is not None
    if held.differs():
        raise UsageError(
            f"{held.name} was changed after the model was compiled: it is frozen, and the programs "
            "of this training have it as a constant",
            remedy="put it back, or compile the model again",
        )


def _tensors_of(module: Any) -> Iterator[_Held]:
    """The tensors of a module and its parts, under all of their names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for slots in (vars(part).get("_parameters", {}), vars(part).get("_buffers", {})):
            for key, tensor in slots.items():
                if isinstance(tensor, torch.Tensor):
                    name = f"{prefix}.{key}" if prefix else key
                    yield _Held(name, slots, key, tensor, tensor.data, tensor.data_ptr())


# -- parameters whose gradient is the training's ---------------------------------------------------


@cache
def _followed(kind: Any) -> Any:
    """The class of parameters of a kind while they are in training; a copy is of that kind."""

    def copied(parameter: Any, memo: dict[int, Any]) -> Any:
        made = kind.__deepcopy__(parameter, memo)
        if type(made) is followed:
            made.__class__ = kind
        return made

    grad = property(
        lambda parameter: _sharers[id(parameter)].gradient(parameter),
        lambda parameter, gradient: _sharers[id(parameter)].set_gradient(parameter, gradient),
        lambda parameter: _sharers[id(parameter)].set_gradient(parameter, None),
    )
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    methods = {"grad": grad, "__deepcopy__": copied, **named}
    followed = type(kind)(kind.__name__, (kind,), methods)
    return followed


def _own_gradient(parameter: Any) -> Any:
    """The gradient that torch itself has of a parameter."""
    return torch.Tensor.grad.__get__(parameter)


def _set_own_gradient(parameter: Any, gradient: Any) -> None:
    torch.Tensor.grad.__set__(parameter, gradient)

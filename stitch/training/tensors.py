"""Read and write the tensors of a training by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from stitch.argument_kinds import MAPPING, takes
from stitch.errors import TaskError, UsageError, closest, unknown
from stitch.program import Array, TensorDesc, ValueType
from stitch.report import counted
from stitch.runtime import Tensor
from stitch.training.graphs import KEPT_KINDS, MASTER, is_rate
from stitch.training.observing import capture_value
from stitch.training.programs import TrainingPrograms
from stitch.training.stitching import BoundStep, NamedCells

# --------------------------------------------------------------------------------------------------
# Parts of arrays


def part_of(name: str, array: Array, index: Any) -> Array:
    """Return the part of a tensor at an index; raise `UsageError` for an invalid index."""
    try:
        return np.asarray(array[_plain(index)])
    except (IndexError, TypeError, ValueError) as error:
        raise _refused(name, array, index, error) from error


def with_part(name: str, array: Array, part: Any, index: Any) -> Array:
    """Return a copy of the tensor with another part at an index; raise `UsageError`."""
    whole = array.copy()
    there = part_of(name, array, index)
    value = np.asarray(part)
    if value.shape != there.shape:
        raise UsageError(
            f"the part of tensor {name!r} at this index has another shape",
            expected=str(list(there.shape)), got=str(list(value.shape)),
        )  # fmt: skip
    if value.dtype.kind not in "biuf" and value.dtype != array.dtype:
        raise UsageError(f"the value for tensor {name!r} is not numeric", got=str(value.dtype))
    whole[_plain(index)] = value
    return whole


def _plain(index: Any) -> Any:
    """Return an index with torch tensors as arrays, without importing torch."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    return np.asarray(index) if hasattr(index, "detach") else index


def _refused(name: str, array: Array, index: Any, error: Exception) -> UsageError:
    return UsageError(
        f"invalid index into tensor {name!r}: {error}",
        expected=f"an index into shape {list(array.shape)}", got=repr(index)[:100],
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Tensors by name


class Sharer(Protocol):
    """An object outside of a training that shares its tensors: a torch module."""

    def take_writes(self, *, runs: bool) -> None:
        """Pass on writes from outside; called before tensors are read and before programs run.
        With `runs`, raise `UsageError` if constants of the programs have changed."""

    def check_step(self) -> None:
        """Raise `UsageError` if an update would ignore a change; called before an update."""

    def show(self, names: Iterable[str]) -> None:
        """Take over the tensors that programs have changed."""

    def written(self, name: str, *, is_moved: bool) -> None:
        """Take over a tensor that was set by name, possibly in new memory."""

    def gradients_dropped(self) -> None: ...

    def without_gradients(self) -> AbstractContextManager[None]:
        """Hide the training's gradients within the block: the module is captured again."""

    def end(self) -> None:
        """End sharing; the training's tensors still exist."""


#: Constants of SplitMix64.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
#: Counters and seed, in a state dict with the prefix `training.`.
COUNTS = ("steps", "forwards", "seed")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="TrainingTensors")


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorate a method that must not be re-entered from its thread.

    A signal handler, hook or finalizer that used the training would find an inconsistent state.
    """

    @wraps(method)
    def called(training: T, /, *arguments: P.args, **named: P.kwargs) -> R:
        if training.inside == get_ident():
            raise TaskError(
                "a signal handler, finalizer or hook used a training during a call of it in the "
                "same thread",
                remedy="set a flag there, and save or read after the call",
            )
        training.inside = get_ident()
        try:
            return method(training, *arguments, **named)
        finally:
            training.inside = None

    return called


def check_gradients(are_ready: bool, dropped: Iterable[str]) -> None:
    """Raise `UsageError` for an update without gradients, or without those of some parameters."""
    if not are_ready:
        raise UsageError("update() was called without gradients",
                         remedy="call loss.backward() first")  # fmt: skip
    if dropped:
        raise UsageError(
            "some parameters have no gradient, and the update needs all of them",
            got=", ".join(sorted(dropped)[:4]),
            remedy="drop all with optimizer.zero_grad(); to exclude a parameter, call "
            "requires_grad_(False) before compile",
        )


def random_key(seed: int, forwards: int, kind: ValueType) -> Array:
    """Return the random key of a forward pass: seed and pass number, mixed by SplitMix64."""
    z = (seed + forwards * _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    bits = (z ^ (z >> 31)) >> 2
    key: Array = np.full(kind.shape, bits % kind.data_type.limits[1], kind.data_type.dtype)
    return key


def check_state(state: Mapping[str, Any], descs: Mapping[str, TensorDesc]) -> None:
    """Raise `UsageError` unless a state dict has the counters and tensors of these descriptions."""
    expected = {*descs, *(f"training.{name}" for name in COUNTS)}
    problems = [f"{name} is missing" for name in sorted(expected - state.keys())]
    problems += [f"{name} is unknown" for name in sorted(state.keys() - expected)]
    for name, desc in descs.items():
        array = np.asarray(state.get(name, np.zeros(desc.shape, desc.layout.data_type.dtype)))
        if array.shape != desc.shape or array.dtype != desc.layout.data_type.dtype:
            problems.append(f"{name} is {array.dtype}{list(array.shape)}, expected {desc.text()}")
    if problems:
        raise UsageError(
            "this is the state of another training: " + "; ".join(problems[:8]),
            remedy="load what state_dict() of the same model and optimizer gave",
        )


def check_weights(weights: Iterable[str], names: Iterable[str]) -> None:
    """Raise `UsageError` if `start(weights=...)` names a tensor that is none of a training's."""
    known = {*names, *(f"training.{name}" for name in COUNTS)}
    for name in weights:
        if name not in known:
            raise unknown(
                f"weights= has {name!r}, which is no parameter or state of the training", name,
                sorted(known), remedy="leave it out",
            )  # fmt: skip


class TrainingTensors:
    """The tensors of a training by name.

    `steps` and `forwards` count optimizer steps and forward passes.
    """

    def __init__(
        self, programs: TrainingPrograms, cells: NamedCells, step: BoundStep, seed: int,
        constants: Mapping[str, Array],
    ) -> None:  # fmt: skip
        """`constants`: frozen values, which are constants of the programs, by the model's names."""
        self.programs, self.constants = programs, constants
        self.device = cells.device
        self.seed = seed
        self.steps = self.forwards = 0
        #: The programs for the current batch size.
        self._cells, self._step = cells, step
        #: Cells that forward overwrites, with their tensors before this step.
        self._before: list[tuple[int, Any]] = []
        #: Whether activations of the last forward pass exist.
        self._has_forward = False
        self._closed = False
        #: The thread that is executing an exclusive method.
        self.inside: int | None = None
        self.parameter_names = tuple([parameter.name for parameter in programs.parameters])
        self._gradient_names = tuple([parameter.gradient for parameter in programs.parameters])
        self.buffer_names, self.changed_buffers = programs.buffers, programs.changed_buffers
        self._gradient_cells: tuple[int, ...] = ()
        #: The object that shares tensors; parameters whose gradients it has dropped.
        self.sharer: Sharer | None = None
        self._dropped: set[str] = set()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this training is closed", remedy="start another instance")

    @property
    def is_closed(self) -> bool:
        """Whether training has stopped."""
        return self._closed or self.device.is_closed

    @exclusive
    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """Return the elements of a parameter, gradient, activation, buffer or optimizer state.

        Activations exist from forward to backward; one that is not an output of forward is
        recomputed from the same batch. `index` selects a part, as in NumPy. Raises `UsageError` for
        an unknown name, and for a tensor that does not exist at the moment.
        """
        self._check_open()
        self._take_writes()
        return part_of(name, self._elements(name), index)

    @exclusive
    def gradient(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, None if there is none."""
        self._check_open()
        return None if name in self._dropped else self._cells.get(f"{name}.grad")

    @exclusive
    def set_gradient(self, name: str, array: Array) -> bool:
        """Overwrite a parameter's gradient; return False if there is none."""
        self._check_open()
        if self._cells.get(f"{name}.grad") is None:
            return False
        self.write(f"{name}.grad", array)
        self._dropped.discard(name)
        return True

    @exclusive
    def drop_gradient(self, name: str) -> None:
        """Drop a parameter's gradient; the next backward starts a new sum."""
        self._check_open()
        gradient = f"{name}.grad"
        if self._cells.get(gradient) is None:
            return
        self.write(gradient, np.zeros(self.desc_of(gradient).shape, np.float32))
        self._dropped.add(name)
        if self._dropped == {*self.parameter_names}:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._cells.drop(self._gradient_cells)
        self._dropped.clear()
        if self.sharer is not None:
            self.sharer.gradients_dropped()

    def desc_of(self, name: str) -> TensorDesc:
        """Return the description of a parameter, gradient, buffer or state."""
        return self._cells.descs[self._cells.numbers[name]]

    def current(self, name: str) -> Array:
        """Return a tensor's elements; for a parameter with a float32 master, those of the
        master."""
        master = f"{name}.{MASTER}"
        return self._cells.elements(master if master in self._cells.numbers else name)

    def hold(self, name: str, tensor: Tensor | None) -> None:
        """Make programs read and overwrite this device tensor from now on."""
        self._cells.hold(self._cells.numbers[name], tensor)

    def write(self, name: str, array: Array) -> None:
        """Overwrite a tensor, and a parameter's master; raise as `NamedCells.put`."""
        cells, master = self._cells, f"{name}.{MASTER}"
        before = cells.value(cells.numbers[name]) if name in cells.numbers else None
        cells.put(name, array)
        if master in cells.numbers:
            cells.put(master, np.asarray(array).astype(np.float32))
        if self.sharer is not None:
            is_moved = cells.value(cells.numbers[name]) is not before
            self.sharer.written(name, is_moved=is_moved)

    def _take_writes(self, *, runs: bool = False) -> None:
        """Apply writes from outside, before programs run or tensors are read."""
        if self.sharer is not None:
            self.sharer.take_writes(runs=runs)

    def _show(self, names: Iterable[str]) -> None:
        """Update shared tensors after a call; run the queue first, so that later writes do not race
        it."""
        if self.sharer is not None:
            self.device.flush()
            self.sharer.show(names)

    def _elements(self, name: str) -> Array:
        tensor = self._cells.get(name)
        if tensor is not None:
            return tensor.numpy()
        if name in self.constants:
            return self.constants[name].copy()
        inside = {v.name for v in self._step.forward.agent.program.values}
        if name in inside and self._has_forward:
            return self._recompute(name)
        if name in inside or name in self._cells.numbers:
            raise UsageError(
                f"tensor {name!r} does not exist at this point",
                where=f"after {counted(self.forwards, 'forward pass', 'forward passes')} and "
                f"{counted(self.steps, 'step')}",
                remedy="read activations between forward and backward, gradients between backward "
                "and zero_grad",
            )
        names = (*self._cells.numbers, *self.constants, *inside)
        raise UsageError(f"training has no tensor {name!r}", remedy=closest(name, names) or None)

    def _recompute(self, name: str) -> Array:
        """Return an activation that is only in the scratch: run forward again and discard its
        results."""
        outputs = self._cells.tensors(self._step.forward.outputs)
        self.device.flush()
        self._cells.restore(self._before)
        array = capture_value(self.device, name, self._step.forward.again)
        self._cells.restore(outputs)
        if array is None:
            raise UsageError(f"{name!r} is not the result of an operation of the forward program")
        return array

    @exclusive
    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor, or the part at an index, and a parameter's float32 master.

        Raises `UsageError` for an unknown or frozen tensor, `LinkError` for another shape.
        """
        self._check_open()
        self._take_writes()
        if name in self.constants:
            raise UsageError(
                f"{name} is frozen: it is a constant of the training's programs",
                remedy="compile the model again with another value",
            )
        master = f"{name}.{MASTER}"
        has_master = master in self._cells.numbers
        if index is not ...:
            master_elements = self._elements(master) if has_master else None
            whole = with_part(name, self._elements(name), array, index)
            array = (
                whole
                if master_elements is None
                else with_part(master, master_elements, array, index)
            )
        self.write(name, array)

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The names of parameters, buffers and optimizer states."""
        slots = (*self.programs.forward.inputs, *self.programs.update.inputs)
        names = dict.fromkeys(slot.name for slot in slots if slot.kind in KEPT_KINDS)
        return tuple(name for name in names if not is_rate(name))

    @exclusive
    def parameters(self) -> dict[str, Array]:
        """Return the weights by name; float32 masters if programs have another precision."""
        self._check_open()
        self._take_writes()
        have = self._cells.numbers
        return {
            p.name: self._elements(p.beside(MASTER) if p.beside(MASTER) in have else p.name)
            for p in self.programs.parameters
        }

    @exclusive
    def state_dict(self) -> dict[str, Array]:
        """Return everything that the next step depends on, by name, for checkpoints.

        These are parameters, buffers, optimizer state, and counters and seed under `training.…`.
        """
        self._check_open()
        self._take_writes()
        tensors = {name: self._elements(name) for name in self.kept_names}
        counts = {f"training.{name}": np.asarray(getattr(self, name), np.int64) for name in COUNTS}
        return tensors | counts

    @property
    def _optimizer_names(self) -> tuple[str, ...]:
        weights = {slot.name for slot in self.programs.forward.inputs}
        return tuple(
            name for name in self.kept_names
            if name not in weights and not name.endswith(f".{MASTER}")
        )  # fmt: skip

    @exclusive
    def optimizer_state(self) -> dict[str, Array]:
        """Return the optimizer state by name: `fc.weight.exp_avg`, `step`."""
        self._check_open()
        return {name: self._elements(name) for name in self._optimizer_names}

    @exclusive
    @takes(state=MAPPING)
    def set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Overwrite the optimizer states in `state`; raise as `set_tensor`."""
        self._check_open()
        for name in self._optimizer_names:
            if name in state:
                self._cells.put(name, np.asarray(state[name]))

    @exclusive
    @takes(state=MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing changes unless all of it fits.

        Raises `UsageError` with what is missing, unknown, or of another shape or type.
        """
        cells = self._cells
        descs = {name: cells.descs[cells.numbers[name]] for name in self.kept_names}
        check_state(state, descs)
        for name in self.kept_names:
            self.write(name, np.asarray(state[name]))
        self.steps, self.forwards, self.seed = (int(state[f"training.{k}"]) for k in COUNTS)

    def _key(self, port: Any) -> Array:
        """Return the random key of this forward pass."""
        return random_key(self.seed, self.forwards, port.type)

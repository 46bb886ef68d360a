"""Reading and writing any tensor of a training: parameters, gradients, activations, states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from stitch.argument_kinds import MAPPING, takes
from stitch.errors import TaskError, UsageError, closest
from stitch.program import Array, DataType, Space
from stitch.report import counted
from stitch.runtime import comparison_of, lend, share
from stitch.training.graphs import KEPT_KINDS, MASTER, is_rate
from stitch.training.observing import captured
from stitch.training.programs import TrainingPrograms
from stitch.training.stitching import NamedCells, StitchedStep

# --------------------------------------------------------------------------------------------------
# Parts of arrays


def part_of(name: str, array: Array, index: Any) -> Array:
    """The part of a tensor at an index; raises `UsageError` where it has none."""
    try:
        return np.asarray(array[_plain(index)])
    except (IndexError, TypeError, ValueError) as error:
        raise _refused(name, array, index, error) from error


def with_part(name: str, array: Array, part: Any, index: Any) -> Array:
    """The tensor with another part at an index; raises `UsageError` where it does not fit."""
    whole = array.copy()
    there = part_of(name, array, index)
    given = np.asarray(part)
    if given.shape != there.shape:
        raise UsageError(
            f"tensor {name!r} has a part of another shape at this index",
            expected=str(list(there.shape)), got=str(list(given.shape)),
        )  # fmt: skip
    if given.dtype.kind not in "biuf" and given.dtype != array.dtype:
        raise UsageError(f"tensor {name!r} holds numbers", got=str(given.dtype))
    whole[_plain(index)] = given
    return whole


def _plain(index: Any) -> Any:
    """Tensors of torch's among the indices as arrays, without loading torch to ask."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    return np.asarray(index) if hasattr(index, "detach") else index


def _refused(name: str, array: Array, index: Any, error: Exception) -> UsageError:
    return UsageError(
        f"tensor {name!r} has no such part: {error}",
        expected=f"an index into shape {list(array.shape)}", got=repr(index)[:100],
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Tensors of a training that somebody outside of it reads and writes directly: a module of
# torch's.


class Sharer(Protocol):
    """Who has tensors of a training outside of it."""

    def take_writes(self) -> None:
        """Programs are about to read: what was written outside is the training's from now on."""

    def check_constants(self) -> None:
        """Programs are about to run; raises `UsageError` where constants of theirs have changed."""

    def check_step(self) -> None:
        """An update is about to run; raises `UsageError` where it would miss something."""

    def moved(self, name: str, array: Array) -> None:
        """A shared tensor's elements are in this array from now on."""

    def gradients_dropped(self) -> None:
        """There are no gradients any more."""

    def without_gradients(self) -> AbstractContextManager[None]:
        """Within it the outside sees no gradients of the training: it is read again."""

    def end(self) -> None:
        """The training is over; its tensors are still there."""


@dataclass(frozen=True, slots=True)
class _Mirrored:
    """The outside's array, what it held when it was last equal to the training's, and whether it
    holds something else now."""

    theirs: Array
    shown: Array
    differs: Callable[[], object]

    @staticmethod
    def of(theirs: Array) -> _Mirrored:
        """What is equal now."""
        shown = np.array(theirs, order="C")
        return _Mirrored(theirs, shown, comparison_of(theirs, shown))


class SharedTensors:
    """The tensors of one training that the outside has too; `moving`: those that programs leave in
    other places than they found them."""

    def __init__(self, cells: NamedCells, moving: Collection[str]) -> None:
        self._cells, self._moving = cells, moving
        self._mirrored: dict[str, _Mirrored] = {}
        #: Tensors on bytes that both have: who hears of others, and the array that it gave.
        self._shared: dict[str, tuple[Sharer, Array]] = {}
        #: Gradients that were asked for: the values that they are, and arrays on their bytes.
        self._gradients: dict[str, tuple[object, Array]] = {}

    def share(self, name: str, theirs: Array, sharer: Sharer) -> Array:
        """The array that has a tensor's elements from now on: `theirs`, with the values that the
        training has, or one on the device's bytes."""
        cells = self._cells
        # Before there is a handle more.
        is_alone = cells.is_alone(cells.numbers[name])
        device, tensor = cells.device, cells.get(name)
        assert tensor is not None, "what is kept is always there"
        layout = tensor.layout
        is_plain = layout.data_type is DataType.FLOAT32 and theirs.dtype == np.float32
        if is_plain and tensor.volume and layout.is_dense and name not in self._moving:
            if device.reads_in_place and theirs.flags.c_contiguous and theirs.flags.writeable:
                self._shared[name] = sharer, theirs
                return self._lend(name, theirs, cells.elements(name))
            # What lies in L1 has to leave it where programs want the room.
            if layout.space is not Space.L1 and is_alone:
                self._shared[name] = sharer, theirs
                with device.lock:
                    return share(tensor)
        theirs[...] = self.current(name)
        self._mirrored[name] = _Mirrored.of(theirs)
        return theirs

    def _lend(self, name: str, theirs: Array, held: Array) -> Array:
        cells, device = self._cells, self._cells.device
        if comparison_of(theirs, held)():
            np.copyto(theirs, held)
        with device.lock:
            # The bytes are there for as long as anything may run on them.
            lent = lend(device, theirs, f"tensor {name!r}", shared_by=cells)
        cells.hold(cells.numbers[name], lent)
        return theirs

    def gradient(self, name: str, dtype: np.dtype[Any]) -> Array | None:
        """A parameter's gradient as an array on bytes that both have, if it is there."""
        cells, gradient = self._cells, f"{name}.grad"
        number = cells.numbers[gradient]
        value, known = cells.values[number], self._gradients.get(gradient)
        if value is None or (known is not None and known[0] is value):
            return None if value is None or known is None else known[1]
        tensor = cells.tensor(number)
        assert tensor is not None, "it has just been there"
        layout = tensor.layout
        is_plain = layout.data_type is DataType.FLOAT32 and dtype == np.float32
        if is_plain and layout.is_dense and layout.space is not Space.L1 and tensor.volume:
            with cells.device.lock:
                array = share(tensor)
        else:
            array = tensor.numpy().astype(dtype)
            self._mirrored[gradient] = _Mirrored.of(array)
        self._gradients[gradient] = value, array
        return array

    def clear_gradient(self, name: str) -> None:
        """A gradient is zero: what backward adds to it is all of it."""
        number = self._cells.numbers[f"{name}.grad"]
        self.write(f"{name}.grad", np.zeros(self._cells.descs[number].shape, np.float32))

    def gradients_dropped(self) -> None:
        """There are no gradients any more."""
        for name in self._gradients:
            self._mirrored.pop(name, None)
        self._gradients.clear()

    def current(self, name: str) -> Array:
        """A tensor's elements; a parameter's in float32, where it has a master."""
        master = f"{name}.{MASTER}"
        return self._cells.elements(master if master in self._cells.numbers else name)

    def write(self, name: str, array: Array) -> None:
        """Overwrite a tensor, and a parameter's master; raises as `NamedCells.put`."""
        cells, master = self._cells, f"{name}.{MASTER}"
        before = cells.values[cells.numbers[name]] if name in cells.numbers else None
        cells.put(name, array)
        if master in cells.numbers:
            cells.put(master, np.asarray(array).astype(np.float32))
        shared = self._shared.get(name)
        if shared is not None and cells.values[cells.numbers[name]] is not before:
            sharer, theirs = shared
            sharer.moved(name, self.share(name, theirs, sharer))
        self.show((name,))

    def take_writes(self) -> None:
        """What was written outside to what is mirrored is the training's."""
        for name, each in self._mirrored.items():
            if each.differs():
                self.write(name, each.theirs)

    def show(self, names: Iterable[str] | None = None) -> None:
        """The outside has these of the tensors that are mirrored as they are now (None: all)."""
        for name in self._mirrored if names is None else names:
            each = self._mirrored.get(name)
            if each is not None:
                each.theirs[...] = self.current(name)
                each.shown[...] = each.theirs


#: What mixes seeds and numbers of forward passes into keys (SplitMix64).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
#: The state of a training that is no tensor; in a state dict after `training.`.
COUNTS = ("steps", "forwards", "seed")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="TrainingTensors")


def alone(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A call of a training that no other of its thread comes into: a signal handler or a finalizer
    would find counts and tensors of two moments."""

    @wraps(method)
    def called(training: T, /, *arguments: P.args, **named: P.kwargs) -> R:
        if training.inside == get_ident():
            raise TaskError(
                "this training is in the middle of a call of this thread: a signal handler, a "
                "finalizer or a hook cannot use it",
                remedy="note what has happened, and save or read when the call has returned",
            )
        training.inside = get_ident()
        try:
            return method(training, *arguments, **named)
        finally:
            training.inside = None

    return called


class TrainingTensors:
    """The tensors of a training by name, for as long as it is open.

    `steps` and `forwards` count optimizer steps and forward passes; with `seed` they are the state
    of a training that is no tensor.
    """

    def __init__(
        self, programs: TrainingPrograms, cells: NamedCells, step: StitchedStep, seed: int,
        constants: Mapping[str, Array],
    ) -> None:  # fmt: skip
        """`constants`: what the programs were compiled with, by the names that the model has."""
        self.programs, self._constants = programs, constants
        self.device = cells.device
        self.seed = seed
        self.steps = self.forwards = 0
        #: The programs for batches of the last one's size.
        self._cells, self._step = cells, step
        #: What a forward pass overwrites, as it was before this step: cells and their tensors.
        self._before: list[tuple[int, Any]] = []
        #: Whether the last forward pass can still be asked for what it computed.
        self._has_forward = False
        self._closed = False
        #: The thread that is in the middle of a call.
        self.inside: int | None = None
        # What each step asks for.
        self._parameter_names = tuple([parameter.name for parameter in programs.parameters])
        self._gradient_names = tuple([parameter.gradient for parameter in programs.parameters])
        self._changed_buffers = programs.changed_buffers
        #: The cells of the gradients, once all programs are loaded.
        self._gradient_cells: tuple[int, ...] = ()
        self._shared = SharedTensors(cells, self._changed_buffers)
        #: Who has its tensors too, if anybody does; parameters whose gradients it has dropped.
        self._sharer: Sharer | None = None
        self._dropped: set[str] = set()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this training has stopped", remedy="start another instance")

    @property
    def is_closed(self) -> bool:
        """Whether training has stopped."""
        return self._closed or self.device.is_closed

    @alone
    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """The elements of a parameter, gradient, activation, buffer or optimizer state; with an
        index, as NumPy takes it, a part of them.

        Activations: from forward to backward; one that no program hands out is made once more,
        from the same batch. Raises `UsageError` for unknown names and tensors that are gone.
        """
        self._check_open()
        self._take_writes()
        return part_of(name, self._elements(name), index)

    # -- what others have too ----------------------------------------------------------------------

    @alone
    def share(self, sharer: Sharer, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """From now on somebody has these tensors too, and is told what happens to them: the arrays
        that have their elements (see `SharedTensors.share`)."""
        self._check_open()
        descs, numbers = self._cells.descs, self._cells.numbers
        wrong = [
            f"{name} is {list(array.shape)}, expected {list(descs[numbers[name]].shape)}"
            for name, array in tensors.items()
            if array.shape != descs[numbers[name]].shape
        ]
        if wrong:
            raise UsageError("these are the tensors of another model: " + "; ".join(wrong[:8]))
        given = {name: self._shared.share(name, array, sharer) for name, array in tensors.items()}
        self._sharer = sharer
        return given

    @property
    def sharer(self) -> Sharer | None:
        """Who has these tensors too."""
        return self._sharer

    @property
    def constants(self) -> Mapping[str, Array]:
        """What the programs were compiled with, by the names that the model has."""
        return self._constants

    @alone
    def gradient(self, name: str, dtype: np.dtype[Any]) -> Array | None:
        """A parameter's gradient, if there is one just now, for its sharer: what is written to the
        array counts."""
        self._check_open()
        return None if name in self._dropped else self._shared.gradient(name, dtype)

    @alone
    def set_gradient(self, name: str, array: Array) -> bool:
        """A parameter's gradient is another one; False where there is none to replace."""
        self._check_open()
        if self._cells.get(f"{name}.grad") is None:
            return False
        self._shared.write(f"{name}.grad", array)
        self._dropped.discard(name)
        return True

    @alone
    def drop_gradient(self, name: str) -> None:
        """A parameter's gradient is gone; the next backward begins it anew."""
        self._check_open()
        if self._cells.get(f"{name}.grad") is None:
            return
        self._shared.clear_gradient(name)
        self._dropped.add(name)
        if self._dropped == {*self._parameter_names}:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        """There are no gradients any more."""
        self._cells.drop(self._gradient_cells)
        self._dropped.clear()
        if self._sharer is not None:
            self._shared.gradients_dropped()
            self._sharer.gradients_dropped()

    def _take_writes(self, *, runs: bool = False) -> None:
        """Before a program runs, and tensors are read: what was written outside counts."""
        if self._sharer is not None:
            if runs:
                self._sharer.check_constants()
            self._sharer.take_writes()
            self._shared.take_writes()

    def _show(self, names: Iterable[str] | None = None) -> None:
        """After a call that may have changed these tensors (None: any). What it has queued runs:
        writes from outside come after it."""
        if self._sharer is not None:
            self.device.flush()
            self._shared.show(names)

    def _elements(self, name: str) -> Array:
        tensor = self._cells.get(name)
        if tensor is not None:
            return tensor.numpy()
        if name in self._constants:
            return self._constants[name].copy()
        inside = {v.name for v in self._step.forward.agent.program.values}
        if name in inside and self._has_forward:
            return self._made_again(name)
        if name in inside or name in self._cells.numbers:
            raise UsageError(
                f"tensor {name!r} is not there just now",
                where=f"after {counted(self.forwards, 'forward pass', 'forward passes')} and "
                f"{counted(self.steps, 'step')}",
                remedy="activations live from forward to backward, gradients from backward to "
                "zero_grad",
            )
        known = (*self._cells.numbers, *self._constants, *inside)
        raise UsageError(f"training has no tensor {name!r}", remedy=closest(name, known) or None)

    def _made_again(self, name: str) -> Array:
        """An activation that lives in the scratch: forward runs again, its results are dropped."""
        kept = self._cells.tensors(self._step.forward.outputs)
        self.device.flush()
        self._cells.restore(self._before)
        array = captured(self.device, name, self._step.forward.again)
        self._cells.restore(kept)
        if array is None:
            raise UsageError(f"{name!r} is no result of an operation of the forward program")
        return array

    @alone
    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor's elements between programs, or those at an index; raises
        `UsageError`, `LinkError`.

        A parameter's float32 master is overwritten with it.
        """
        self._check_open()
        self._take_writes()
        if name in self._constants:
            raise UsageError(
                f"{name} is frozen: the programs of this training have it as a constant",
                remedy="compile the model again with another value",
            )
        master = f"{name}.{MASTER}"
        has_master = master in self._cells.numbers
        if index is not ...:
            kept = self._elements(master) if has_master else None
            whole = with_part(name, self._elements(name), array, index)
            array = whole if kept is None else with_part(master, kept, array, index)
        self._shared.write(name, array)

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Parameters, buffers, and what the optimizer keeps."""
        slots = (*self.programs.forward.inputs, *self.programs.update.inputs)
        names = dict.fromkeys(slot.name for slot in slots if slot.kind in KEPT_KINDS)
        return tuple(name for name in names if not is_rate(name))

    @alone
    def parameters(self) -> dict[str, Array]:
        """The weights by name: float32 masters where programs compute in another type."""
        self._check_open()
        self._take_writes()
        have = self._cells.numbers
        return {
            p.name: self._elements(p.beside(MASTER) if p.beside(MASTER) in have else p.name)
            for p in self.programs.parameters
        }

    @alone
    def state_dict(self) -> dict[str, Array]:
        """Everything that the next step depends on, by name: for checkpoints.

        Parameters, buffers, optimizer state, and under `training.…` the counts and the seed.
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

    @alone
    def optimizer_state(self) -> dict[str, Array]:
        """What the optimizer keeps, by name: `fc.weight.exp_avg`, `step`."""
        self._check_open()
        return {name: self._elements(name) for name in self._optimizer_names}

    @alone
    @takes(state=MAPPING)
    def set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Overwrite what the optimizer keeps with what is named; raises as `set_tensor`."""
        self._check_open()
        for name in self._optimizer_names:
            if name in state:
                self._cells.put(name, np.asarray(state[name]))

    @alone
    @takes(state=MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; nothing changes unless all of it fits.

        Raises `UsageError` listing what is missing, unknown, or of another shape or type.
        """
        wanted = {*self.kept_names, *(f"training.{name}" for name in COUNTS)}
        problems = [f"{name} is missing" for name in sorted(wanted - state.keys())]
        problems += [f"{name} is unknown" for name in sorted(state.keys() - wanted)]
        cells = self._cells
        for name in self.kept_names:
            desc = cells.descs[cells.numbers[name]]
            array = np.asarray(state.get(name, np.zeros(desc.shape, desc.layout.data_type.dtype)))
            if array.shape != desc.shape or array.dtype != desc.layout.data_type.dtype:
                problems.append(
                    f"{name} is {array.dtype}{list(array.shape)}, expected {desc.text()}"
                )
        if problems:
            raise UsageError(
                "this is the state of another training: " + "; ".join(problems[:8]),
                remedy="load what state_dict() of the same model and optimizer gave",
            )
        for name in self.kept_names:
            self._shared.write(name, np.asarray(state[name]))
        self.steps, self.forwards, self.seed = (int(state[f"training.{k}"]) for k in COUNTS)

    def _key(self, port: Any) -> Array:
        """The key of this forward pass: the seed and its number, mixed."""
        z = (self.seed + self.forwards * _GOLDEN) & _WORD
        z = ((z ^ (z >> 30)) * _FIRST) & _WORD
        z = ((z ^ (z >> 27)) * _SECOND) & _WORD
        bits = (z ^ (z >> 31)) >> 2
        limit = port.type.data_type.limits[1]
        key: Array = np.full(port.shape, bits % limit, port.dtype)
        return key

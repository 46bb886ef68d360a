"""A binary that was compiled or linked here: saved, loaded on devices, and called as a function.

A call runs on the device of its inputs; where these are arrays, on a device that all models of one
target and executor share, so that `b(a(x))` copies nothing between two models.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch.argument_kinds import PATH, takes
from stitch.errors import UsageError
from stitch.machine import Machine, load_machine
from stitch.program import Program, summary
from stitch.report import Device, open_device
from stitch.runtime import LoadedProgram, Tensor
from stitch.ttb import Binary, encode, save

#: Programs that a model's `repr` names.
MAX_SHOWN = 3
#: The executor of a model that names none, as of a device that is opened without.
DEFAULT_EXECUTOR = "numpy"


class SharedDevice:
    """An open device of the models of one target and executor; each of them refers to this.

    With the last of them the device is closed, unless tensors of it are still referred to.
    """

    __slots__ = ("__weakref__", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        weakref.finalize(self, device.close_unless_held).atexit = False


_shared_devices: dict[tuple[Machine, str], weakref.ref[SharedDevice]] = {}
_opening = threading.Lock()


def _reset_lock_in_child() -> None:
    """Replace the lock, which another thread of the parent may have held at the fork."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock_in_child)


def shared_device(target: str, executor: str | None) -> SharedDevice:
    """Return the shared device of a target and an executor; open it if there is none.

    A device that was closed, or that a fork has left in the parent process, is replaced.
    """
    machine, executor = load_machine(target), executor or DEFAULT_EXECUTOR
    with _opening:
        reference = _shared_devices.get((machine, executor))
        shared = None if reference is None else reference()
        if shared is None or shared.device.is_closed:
            shared = SharedDevice(open_device(machine, executor=executor))
            _shared_devices[machine, executor] = weakref.ref(shared)
        return shared


def _sharer_of(device: Device) -> SharedDevice | None:
    """Return what models refer to that share a device; None where it is no shared device."""
    with _opening:
        sharers = [reference() for reference in _shared_devices.values()]
    return next((one for one in sharers if one is not None and one.device is device), None)


class ModelSession:
    """The calls of one model: its program, loaded on the devices that the calls run on."""

    __slots__ = ("_loaded", "_shared")

    def __init__(self) -> None:
        #: The last one called comes first, each with what keeps its device open if that is shared.
        self._loaded: tuple[tuple[LoadedProgram, SharedDevice | None], ...] = ()
        self._shared: SharedDevice | None = None

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The model's program on each device that a call has run on, the last one first."""
        return tuple([loaded for loaded, _ in self._loaded])

    def call(
        self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the first program on the device of the first tensor among the arguments, else on the
        shared device of the model's target."""
        device = None
        for argument in (*arguments, *named.values()) if named else arguments:
            if type(argument) is Tensor:
                device = argument.device
                break
        shared = self._shared
        wanted = shared.device if device is None and shared is not None else device
        for loaded, _ in self._loaded[:1]:
            if loaded.device is wanted and not wanted.is_closed:
                return loaded(*arguments, **named)
        return self._load(model, device)(*arguments, **named)

    def _load(self, model: ModelOfBinary, device: Device | None) -> LoadedProgram:
        """Return the program on a device, or on the shared one where there is no other, or where
        the model was compiled for another executor than that of the device."""
        if device is not None:
            device.check_open()
        if device is None or device.executor != (model.executor or device.executor):
            if self._shared is None or self._shared.device.is_closed:
                self._shared = shared_device(model.target, model.executor)
            device = self._shared.device
        others = [one for one in self._loaded if not one[0].device.is_closed]
        last = next((one for one in others if one[0].device is device), None)
        if last is None:
            last = device.load(model), _sharer_of(device)
        self._loaded = (last, *(one for one in others if one is not last))
        return last[0]


class ModelOfBinary:
    """A model that has a file's form: it is saved, loaded on devices, and called."""

    __slots__ = ()

    binary: Binary
    #: How the machine is spelled that a call opens.
    target: str
    #: The executor of the device that a call opens, and for which loops were scheduled; None: the
    #: default one.
    executor: str | None
    session: ModelSession

    def __repr__(self) -> str:
        programs = [f"  {summary(program)}" for program in self.binary.programs[:MAX_SHOWN]]
        more = len(self.binary.programs) - MAX_SHOWN
        tail = [f"  and {more} more"] if more > 0 else []
        head = f"<{type(self).__name__} for {self.target}:"
        return "\n".join([head, *programs, *tail]) + ">"

    @property
    def program(self) -> Program:
        """The one program; raises `UsageError` for a training, which has several."""
        if len(self.binary.programs) != 1:
            raise UsageError(
                f"this model has {len(self.binary.programs)} programs",
                remedy="take one of model.binary.programs",
            )
        return self.binary.programs[0]

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file, whole or not at all."""
        save(self.binary, path)

    def encode(self) -> bytes:
        """The bytes that `save` would write."""
        return encode(self.binary)

    def text(self) -> str:
        """The programs as readable text."""
        return "".join(program.text() for program in self.binary.programs)

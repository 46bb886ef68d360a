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

from stitch.argument_kinds import PATH, arranged, takes
from stitch.errors import LinkError, UsageError, closest
from stitch.live_objects import LiveObjects
from stitch.machine import Machine, load_machine
from stitch.program import INITIAL_STATE, Program, ValueType, summary
from stitch.report import Device, open_device
from stitch.runtime import LoadedProgram, Tensor, capture
from stitch.ttb import Binary, encode, save, state_names

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
_sessions: LiveObjects[ModelSession] = LiveObjects()


def _reset_locks_in_child() -> None:
    """Replace the locks, which another thread of the parent may have held at the fork."""
    global _opening
    _opening = threading.Lock()
    for session in _sessions:
        session._lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_locks_in_child)


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

    # They end in the order of their names: the shared device, last, finds no state that is held.
    __slots__ = ("__weakref__", "_before", "_current", "_loaded", "_lock", "_shared")

    def __init__(self) -> None:
        #: Held by a call of a model that has a state, from its reading to its writing.
        self._lock = threading.RLock()
        _sessions.add(self)
        #: What the next call reads of the model's state, None: its initial values; and what the
        #: last call read, for where that call fails.
        self._current: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
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
        loaded = self._loaded_for(model, arguments, named)
        if not loaded.state_names:
            return loaded(*arguments, **named)
        types = [(p.name, p.type.text()) for p in loaded.ports if p.name not in loaded.state_names]
        inputs = arranged(f"model {loaded.name!r}", types, arguments, named)
        given = {name: value for (name, _), value in zip(types, inputs, strict=True)}
        with self._lock:
            state = self._state_on(loaded)
            given.update(state)
            results = loaded(*[given[port.name] for port in loaded.ports])
            made = results if isinstance(results, tuple) else (results,)
            left = dict(zip(loaded.output_names, made, strict=True))
            self._before = state
            self._current = {name: left.pop(name) for name in loaded.state_names}
        others = tuple(left.values())
        return others[0] if len(others) == 1 else others

    def state(self, model: ModelOfBinary) -> dict[str, Tensor]:
        """The model's state as it is, as tensors."""
        last = next((one for one, _ in self._loaded if not one.device.is_closed), None)
        loaded = self._load(model, None) if last is None else last
        if not loaded.state_names:
            return {}
        with self._lock:
            state = self._state_on(loaded)
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    state = {**state, name: loaded.device.tensor(value)}
            self._current = state
        return dict(state)

    def reset_state(self, model: ModelOfBinary, values: Mapping[str, Any]) -> None:
        """The next call begins with these values, and with the initial ones of the other states."""
        program = model.binary.programs[0]
        types = {s.name: program.values[s.value].type for s in program.inputs}
        known = state_names(model.binary, program)
        taken: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise UsageError(
                    f"{program.name!r} has no state {name!r}",
                    expected=", ".join(known) or "no state: the module writes no buffers",
                    remedy=closest(name, known) or None,
                )
            what = f"state {name!r} of {program.name!r}"
            wanted = types[name]
            if isinstance(value, Tensor):
                if _has_failed(value):
                    value.settle()  # Raises TaskError, which says why it is gone.
                given = ValueType(value.shape, value.layout.data_type)
                if given != wanted:
                    raise LinkError(f"{what} has another type",
                                    expected=wanted.text(), got=given.text())  # fmt: skip
                taken[name] = value
            else:
                taken[name] = capture(value, wanted.shape, wanted.data_type, False, what)
        with self._lock:
            self._before = self._current = taken

    def _state_on(self, loaded: LoadedProgram) -> dict[str, Any]:
        """The state that a call reads, on the device of its program."""
        current = self._current
        if current is not None and any(_has_failed(value) for value in current.values()):
            # A call that fails leaves what there was before it.
            current = self._before
            if current is not None and any(_has_failed(value) for value in current.values()):
                raise UsageError(
                    f"the state of {loaded.name!r} is lost: calls that were queued one on another "
                    "have failed",
                    remedy="begin anew with reset_state(); a result that is read before the next "
                    "call tells that it failed",
                )
        if current is None or current.keys() != {*loaded.state_names}:
            current = {**loaded.initial_state(), **(current or {})}
        for name, value in current.items():
            if isinstance(value, Tensor) and value.device is not loaded.device:
                current = {**current, name: value.numpy()}
        self._current = current
        return current

    def _loaded_for(
        self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> LoadedProgram:
        """Return the program on the device of the first tensor among the arguments, else on the
        shared one."""
        device = None
        for argument in (*arguments, *named.values()) if named else arguments:
            if type(argument) is Tensor:
                device = argument.device
                break
        shared = self._shared
        wanted = shared.device if device is None and shared is not None else device
        for loaded, _ in self._loaded[:1]:
            if loaded.device is wanted and not wanted.is_closed:
                return loaded
        return self._load(model, device)

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


def _has_failed(value: Any) -> bool:
    """Whether a value is a tensor that will never be there."""
    return isinstance(value, Tensor) and not value.is_allocated


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
        """The one program, beside that of its initial state; raises `UsageError` for a training,
        which has several."""
        first, *others = self.binary.programs
        if [p.name for p in others] not in ([], [f"{first.name}{INITIAL_STATE}"]):
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

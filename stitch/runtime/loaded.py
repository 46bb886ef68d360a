"""`LoadedProgram`: the agent that a program becomes when a device has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from stitch.argument_kinds import INDEX_OR_NAME, arranged, takes
from stitch.budget import Claim
from stitch.errors import UsageError
from stitch.program import (
    INITIAL_STATE,
    InputKind,
    Layout,
    Program,
    TensorDesc,
    ValueType,
    host_layout,
)
from stitch.runtime.backends import LocalBackend
from stitch.runtime.executors import (
    PreparedProgram,
    ProgramBytes,
    as_bytes,
    cached_attribute,
    least_microseconds,
)
from stitch.runtime.locks import Lock
from stitch.runtime.queue import Reclaimer, TaskQueue
from stitch.runtime.tensor import Tensor, handle_on, handles_on
from stitch.runtime.values import ArgumentRecord, ConstantRecord, InputPort, Status, ValueRecord
from stitch.tasks import Transformation, transformation_of

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY
ndarray = np.ndarray
#: Notes of finalizers that are left to lie while nothing runs.
MANY_NOTES = 256
#: The most inputs of a call of which it is tried whether it follows what it followed before.
MOST_TRIED = 8


class Home(Protocol):
    """A device, as the programs that it has loaded know it."""

    is_closed: bool
    tasks: TaskQueue
    deaths: Reclaimer
    queue_lock: Lock
    #: Whether this thread is inside already.
    holds_run_lock: Callable[[], bool]
    holds_queue_lock: Callable[[], bool]
    #: Whether tensors and constants leave DRAM where there is no room for all.
    spills: bool

    @property
    def backend(self) -> LocalBackend:
        """What prepares them."""

    def desc_key(self, desc: TensorDesc) -> int:
        """A small number for a descriptor."""

    def await_unloading(self, loaded: LoadedProgram) -> None:
        """Release the memory of a program once it is unreferenced."""

    def submit(self, agent: LoadedProgram, arguments: Sequence[Any],
               borrow: bool = False) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Queue one run."""

    def flush(self) -> None:
        """Run everything that is queued."""


class LoadedProgram:
    """A program on a device, called with arrays or tensors; gives one tensor or a tuple.

    Calls are asynchronous; reading a result runs the queue.
    """

    def __init__(
        self,
        device: Home,
        program: Program,
        verify: Callable[[], None],
        constants: Sequence[ConstantRecord],
        seconds: float = 0.0,
    ) -> None:
        self._home = device
        #: The `Device` that loaded it, which knows programs and is not known by them.
        self.device: Any = device
        self.program = program
        self.name = program.name
        #: The programs that it was linked of by the device.
        self.linked_from: tuple[Program, ...] = ()
        #: Checks the bytes of its constants, once.
        self.verify = verify
        self._prepared: PreparedProgram | None = None
        #: What it takes of the host's memory once it is prepared.
        self.host_claim: Claim | None = None
        #: They have their places for as long as this lives and nobody else needs the room.
        self.constants = constants
        self.ports = tuple(
            self._port(slot.name, program.values[slot.value].type, program.input_desc(i))
            for i, slot in enumerate(program.inputs)
        )
        #: The inputs that begin with values of its file, and are outputs as well; and that file.
        self.state_names: tuple[str, ...] = ()
        self.binary: Any = None
        self.output_names = tuple(slot.name for slot in program.outputs)
        self.transformation = transformation_of(program, seconds)
        self.output_descs = tuple(d.without_address() for d in self.transformation.outputs)
        #: What the values that it makes are described by, with the device's keys for that.
        self.outputs = tuple((d, device.desc_key(d)) for d in self.output_descs)
        self.takes = len(self.ports)
        #: Programs of parameters only can be evaluated once and remembered.
        self.is_constant_evaluable = bool(program.inputs) and all(
            slot.kind is InputKind.PARAMETER for slot in program.inputs
        )
        #: Its transformation, where a run takes nothing over, is not remembered, and reads so few
        #: inputs that it pays to try first whether it follows.
        is_plain = not (self.is_constant_evaluable or self.transformation.donated)
        is_plain = is_plain and self.takes <= MOST_TRIED
        self._followed = self.transformation if is_plain else None

    def _port(self, name: str, kind: ValueType, desc: TensorDesc) -> InputPort:
        host = TensorDesc(kind.shape, host_layout(kind.data_type))
        return InputPort(self.name, name, kind, desc, self._home.desc_key(host))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Queue one run; gives one tensor, or a tuple where the program has several outputs.

        Raises `UsageError` for missing or surplus inputs, `LinkError`.
        """
        if named or len(arguments) != self.takes:
            types = [(port.name, port.type.text()) for port in self.ports]
            what = f"program {self.name!r}"
            arguments = arranged(what, types, arguments, named, states=self.state_names)
        home = self._home
        tasks, holds_run_lock, holds_queue_lock = (
            home.tasks,
            home.holds_run_lock,
            home.holds_queue_lock,
        )
        if holds_run_lock() or holds_queue_lock() or len(home.deaths.dropped) > MANY_NOTES:
            return home.submit(self, arguments)
        handles: Tensor | tuple[Tensor, ...] | None = None
        is_full = False
        with home.queue_lock:
            window = tasks.queued
            graph = window.graph.following
            # What followed the last time is the same task if its inputs have the same numbers.
            if (
                graph is not None
                and graph.transformation is self._followed
                and window.is_whole
                and not home.is_closed
            ):
                # Written out: each call that is made here takes a tenth of the time.
                now, values = window.number, window.values
                known = number = len(values)
                fresh: list[ValueRecord] = []
                for port, argument, at in zip(self.ports, arguments, graph.inputs):  # noqa: B905
                    if type(argument) is Tensor:
                        value = argument._record
                        status = value.status
                        if (
                            (status is not PENDING and status is not READY)
                            or value.consumed
                            or value.desc_key not in port.accepted
                            or value.device is not self.device
                        ):
                            break
                        if at < number:
                            if (values[at] if at < known else fresh[at - known]) is not value:
                                break
                            continue
                        if value.window == now or value in fresh:
                            break
                    elif (
                        type(argument) is ndarray
                        and port.is_small
                        and argument.dtype is port.dtype
                        and argument.shape == port.shape
                    ):
                        # Whether it must be copied takes longer to find out.
                        value = ArgumentRecord(self.device, argument.copy(), port)
                    else:
                        break
                    if at != number:
                        break
                    fresh.append(value)
                    number += 1
                else:
                    tasks.is_idle = False
                    results = []
                    for desc, key in self.outputs:
                        results.append(ValueRecord(self.device, desc, key, self.name))
                    window.take(graph, self, fresh, results)
                    handles = handle_on(results[0]) if len(results) == 1 else handles_on(results)
                    is_full = graph.length >= tasks.limit and tasks.is_full()
        if handles is None:
            return home.submit(self, arguments)
        if is_full:
            home.flush()
        return handles

    def prepared(self) -> PreparedProgram:
        """The executor's form of the program; made, and its constants checked, on first use."""
        if self._prepared is None:
            self.verify()
            self._prepared = self._home.backend.prepare(self.program)
        return self._prepared

    @cached_attribute
    def host_bytes(self) -> ProgramBytes:
        """What running it takes of the host's memory beside the spaces, by the executor."""
        return self._home.backend.executor.host_bytes(self.program)

    @cached_attribute
    def least_microseconds(self) -> float:
        """What a run takes of the host's time, at least."""
        return least_microseconds(self.program)

    @cached_attribute
    def with_constants(self) -> Transformation:
        """What it does in a plan in which constants may leave: they are inputs, too."""
        what = self.transformation
        descs = [self.program.values[c.value].desc for c in self.program.constants]
        names = [f"constant {self.program.values[c.value].name}" for c in self.program.constants]
        return replace(
            what, inputs=(*what.inputs, *descs), input_names=(*what.input_names, *names),
            constants=len(descs),
        )  # fmt: skip

    @cached_attribute
    def content_hash(self) -> bytes:
        """What programs with the same text and constants share, whatever their file."""
        import hashlib  # It loads OpenSSL, for programs that share remembered results.

        digest = hashlib.sha256(self.program.text().encode())
        for constant in self.program.constants:
            digest.update(as_bytes(np.ascontiguousarray(constant.data)).data)
        return digest.digest()

    def initial_state(self) -> dict[str, Tensor]:
        """New tensors that the program's states begin with (buffers that a torch module writes), by
        the names of their inputs: for the first call, `program(x, **program.initial_state())`,
        whose outputs of these names are for the next one. Empty where it has none.
        """
        if not self.state_names:
            return {}
        start = self.device.load(self.binary, f"{self.name}{INITIAL_STATE}")
        results = start()
        given = results if isinstance(results, tuple) else (results,)
        named = dict(zip(start.output_names, given, strict=True))
        return {name: named[name] for name in self.state_names}

    @takes(which=INDEX_OR_NAME)
    def input_layout(self, which: int | str) -> Layout:
        """The layout that an input must have; raises `UsageError` for an unknown slot."""
        names = [port.name for port in self.ports]
        if isinstance(which, str):
            if which not in names:
                raise UsageError(
                    f"program {self.name!r} has no input {which!r}", expected=", ".join(names)
                )
            which = names.index(which)
        if not 0 <= which < len(self.ports):
            raise UsageError(f"program {self.name!r} has {len(self.ports)} inputs, not {which + 1}")
        return self.ports[which].desc.layout

    def __reduce__(self) -> Any:
        raise TypeError("a loaded program belongs to its device: load its .ttb file there again")

    def __repr__(self) -> str:
        inputs = ", ".join(f"{p.name}: {p.type.text()}" for p in self.ports)
        outputs = ", ".join(d.text() for d in self.output_descs)
        return f"<LoadedProgram {self.name}({inputs}) -> {outputs}>"

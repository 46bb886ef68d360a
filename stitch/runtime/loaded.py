"""`LoadedProgram`: a program that is loaded on a device and can be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from stitch.runtime.arguments import check_donations, link_argument, link_value
from stitch.runtime.executors import (
    PreparedProgram,
    ProgramBytes,
    as_bytes,
    cached_attribute,
    least_microseconds,
)
from stitch.runtime.lending import lent_arguments
from stitch.runtime.tensor import Tensor, handle_on, handles_on
from stitch.runtime.values import ArgumentRecord, ConstantRecord, InputPort
from stitch.tasks import Transformation, transformation_of

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

#: Queued finalizer notes that a call tolerates before it drains them.
MANY_NOTES = 256


class LoadedProgram:
    """A program on a device. Call it with arrays or tensors; it returns one tensor or a tuple.

    Calls are asynchronous; reading a result runs the queue.
    """

    def __init__(
        self,
        device: RuntimeDevice,
        program: Program,
        verify: Callable[[], None],
        constants: Sequence[ConstantRecord],
        seconds: float = 0.0,
    ) -> None:
        #: The `Device` that loaded it.
        self.device = device
        self.program = program
        self.name = program.name
        #: Verifies the checksums of the constants, once.
        self.verify = verify
        self._prepared: PreparedProgram | None = None
        #: Reserved host memory of the prepared program.
        self.host_claim: Claim | None = None
        #: Allocated while this program lives, unless evicted.
        self.constants = constants
        self.ports = tuple(
            self._port(slot.name, program.values[slot.value].type, program.input_desc(i))
            for i, slot in enumerate(program.inputs)
        )
        #: Names of the state inputs (initial values in the file; also outputs), and the binary.
        self.state_names: tuple[str, ...] = ()
        self.binary: Any = None
        self.output_names = tuple(slot.name for slot in program.outputs)
        self.transformation = transformation_of(program, seconds)
        self.output_descs = tuple(d.without_address() for d in self.transformation.outputs)
        #: Descriptors of the outputs, with the device's keys for them.
        self.outputs = tuple((d, device.desc_key(d)) for d in self.output_descs)
        self.takes = len(self.ports)
        #: A program whose inputs are all parameters is evaluated once and cached.
        self.is_constant_evaluable = bool(program.inputs) and all(
            slot.kind is InputKind.PARAMETER for slot in program.inputs
        )

    def _port(self, name: str, kind: ValueType, desc: TensorDesc) -> InputPort:
        host = TensorDesc(kind.shape, host_layout(kind.data_type))
        return InputPort(self.name, name, kind, desc, self.device.desc_key(host))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Enqueue one run; returns one tensor, or a tuple if the program has several outputs.

        Raises:
            UsageError: Inputs are missing or surplus.
            LinkError: An argument does not match its input.
        """
        if named or len(arguments) != self.takes:
            types = [(port.name, port.type.text()) for port in self.ports]
            what = f"program {self.name!r}"
            arguments = arranged(what, types, arguments, named, states=self.state_names)
        device = self.device
        holds_run_lock = device.holds_run_lock
        if device.is_closed or holds_run_lock() or device.holds_queue_lock():
            device.check_may_queue()
            device.check_open()
        if len(device.deaths.dropped) > MANY_NOTES:
            device.drain_if_free()
        # Converting a list may run user code, so no lock is held.
        inputs = []
        for port, argument in zip(self.ports, arguments):  # noqa: B905 (costs as 4 arguments)
            if type(argument) is Tensor:
                value = argument._record
                if value.desc_key not in port.accepted:
                    link_value(device, self.name, port, value)
            elif (
                type(argument) is np.ndarray
                and port.is_small
                and argument.dtype is port.dtype
                and argument.shape == port.shape
            ):
                # Copying a small array is faster than checking whether a copy is needed.
                value = ArgumentRecord(device, argument.copy(), port)
            else:
                if device.lends:
                    placed = lent_arguments(device, arguments, self.transformation.donated)
                    if placed is not arguments:
                        # At once: PyTorch may write them afterwards.
                        results = self(*placed)
                        device.flush()
                        return results
                value = link_argument(device, self.name, port, argument, borrow=False)
            inputs.append(value)
        task, tasks = self.transformation, device.tasks
        if task.donated:
            device.drain_for(task, inputs)
        elif self.is_constant_evaluable:
            _ = self.content_hash  # Slow on first use: not under the lock.
        with device.queue_lock:
            if device.is_closed:
                device.check_open()
            if task.donated:
                check_donations(task, inputs)
            handles: Tensor | tuple[Tensor, ...]
            if self.is_constant_evaluable:
                handles = device.remembered(self, inputs)
            else:
                tasks.is_idle = False
                results = tasks.queued.append(task, self, inputs, self.outputs)
                handles = handle_on(results[0]) if len(results) == 1 else handles_on(results)
            is_full = (
                len(tasks.queued.agents) >= tasks.limit and not holds_run_lock() and tasks.is_full()
            )
        if is_full:
            device.flush()
        return handles

    def prepared(self) -> PreparedProgram:
        """Return the executor's prepared program; on first use, verify the constants and prepare
        it."""
        if self._prepared is None:
            self.verify()
            backend = self.device.backend
            prepared = backend.prepare(self.program)
            if prepared.reads_placed_constants:
                backend.fill_constants(self.constants)
                prepared.constant_regions = partial(backend.constant_regions, self.constants)
            counted = self.host_bytes
            prepared.reuse(counted)
            # Without what else the executor has counted.
            self.host_bytes = ProgramBytes(
                counted.kept, counted.bound, counted.values, counted.kernels, counted.largest,
                counted.staged,
            )  # fmt: skip
            self._prepared = prepared
        return self._prepared

    @cached_attribute
    def host_bytes(self) -> ProgramBytes:
        """Host memory that a run needs outside the spaces, as the executor states."""
        return self.device.backend.executor.host_bytes(self.program)

    @cached_attribute
    def least_microseconds(self) -> float:
        """A lower bound of the host time of one run, in microseconds."""
        return least_microseconds(self.program)

    @cached_attribute
    def with_constants(self) -> Transformation:
        """The transformation with the constants as inputs, for plans that may evict them."""
        what = self.transformation
        descs = [self.program.values[c.value].desc for c in self.program.constants]
        names = [f"constant {self.program.values[c.value].name}" for c in self.program.constants]
        return replace(
            what, inputs=(*what.inputs, *descs), input_names=(*what.input_names, *names),
            constants=len(descs),
        )  # fmt: skip

    @cached_attribute
    def content_hash(self) -> bytes:
        """A hash of the program's text and constants, independent of the file."""
        import hashlib  # Loads OpenSSL; needed for cached results only.

        digest = hashlib.sha256(self.program.text().encode())
        for constant in self.program.constants:
            digest.update(as_bytes(np.ascontiguousarray(constant.data)).data)
        return digest.digest()

    def initial_state(self) -> dict[str, Tensor]:
        """Return new tensors with the initial states (buffers that a torch module writes).

        Pass them to the first call, `program(x, **program.initial_state())`; the outputs of the
        same names are the states for the next call.

        Returns:
            Tensors by input name; empty if the program has no states.
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
        """Return the layout that an input must have; raises `UsageError` for an unknown input."""
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
        raise TypeError(
            "a loaded program belongs to its device and cannot be copied: load its .ttb file there"
        )

    def __repr__(self) -> str:
        inputs = ", ".join(f"{p.name}: {p.type.text()}" for p in self.ports)
        outputs = ", ".join(d.text() for d in self.output_descs)
        return f"<LoadedProgram {self.name}({inputs}) -> {outputs}>"

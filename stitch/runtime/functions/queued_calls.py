"""Queued calls of host functions: tasks whose transformation is a Python function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from stitch.budget import Claim
from stitch.errors import TaskError
from stitch.program import Array, TensorDesc, ValueType, host_layout
from stitch.runtime.executors import CallKernel, FunctionCall, PreparedProgram, ProgramBytes
from stitch.runtime.values import ConstantRecord, InputPort
from stitch.tasks import HostCall, Transformation, TransformationKind

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

_NOTHING = ProgramBytes(0, 0, 0, 0, "")


class HostResult:
    """The future result of a host function that declares no outputs: any object.

    It may be passed to other host functions while it is pending.
    """

    __slots__ = ("__weakref__", "_value", "device", "is_pending", "name", "why")

    def __init__(self, device: RuntimeDevice, name: str) -> None:
        #: The `Device` that runs its task.
        self.device, self.name = device, name
        self._value: Any = None
        self.is_pending = True
        #: Why it failed, or None.
        self.why: str | None = None

    @property
    def function_queue(self) -> Any:
        """The device, which enqueues host functions that are called with it."""
        return self.device

    def result(self) -> Any:
        """Return the object; runs the queue if it is pending.

        Raises:
            TaskError: Its task failed or was cancelled; states the reason.
        """
        if self.is_pending:
            self.device.settle_result(self)
        if self.why is not None:
            raise TaskError(
                f"host function {self.name!r} has no result",
                where=self.why,
                remedy="look at the error that was raised when the queue ran",
            )
        return self._value

    def fulfil(self, value: object) -> None:
        """Store the value."""
        self._value, self.is_pending = value, False

    def fail(self, why: str) -> None:
        """Mark it as failed."""
        if self.is_pending:
            self.why, self.is_pending = why, False

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a HostResult: pickle its .result()")

    def __repr__(self) -> str:
        state = "pending" if self.is_pending else "failed" if self.why else "ready"
        return f"<HostResult of {self.name} {state}>"


class HostAgent:
    """A host function on tensors of given types: the data that its calls share."""

    def __init__(self, device: RuntimeDevice, call: HostCall, types: Sequence[ValueType]) -> None:
        """`types`: of its tensor arguments."""
        function = call.function
        self.device = device
        #: A weak reference: the cache must not keep the function alive.
        self.function = ref(function)
        self.name = function.name
        self.ports = tuple([
            InputPort(function.name, call.input_name(at), kind, desc, device.desc_key(desc))
            for at, kind in enumerate(types)
            if (desc := TensorDesc(kind.shape, host_layout(kind.data_type)))
        ])  # fmt: skip
        self.takes = len(self.ports)
        self.host_claim: Claim | None = None
        #: Declared layouts of its results. It writes them dense to host memory; a conversion
        #: follows.
        self.wanted = call.outputs([port.desc for port in self.ports])
        dense = self.descs = tuple([_dense(desc) for desc in self.wanted])
        self.transformation = Transformation(
            name=function.name,
            kind=TransformationKind.HOST,
            inputs=tuple([port.desc for port in self.ports]),
            outputs=dense,
            input_names=tuple([port.name for port in self.ports]),
            donated=call.consumes,
            aliases=call.aliases,
        )
        self.outputs = tuple([(desc, device.desc_key(desc)) for desc in dense])

    def shown(
        self, arrays: tuple[Array, ...], call: HostCall
    ) -> tuple[list[Array], tuple[Array, ...]]:
        """Return the input arrays for the function, and the output arrays to fill."""
        returned = len(call.function.returns)
        inputs, outputs = arrays[: self.takes], arrays[self.takes :]
        # New views: a function may change a view's shape, and the next run needs the array again.
        seen = [array.view() for array in inputs]
        for at, array in zip(call.updated, outputs[returned:], strict=True):
            seen[at] = array
        return seen, outputs[:returned]


class QueuedCall(FunctionCall):
    """One queued call of a host function; `result`: receives the return value if no outputs are
    declared."""

    __slots__ = ("_agent", "_call", "_result", "name")

    program = None
    host_bytes = _NOTHING
    constants: Sequence[ConstantRecord] = ()
    content_hash = b""
    least_microseconds = None

    def __init__(self, agent: HostAgent, call: HostCall, result: HostResult | None) -> None:
        self._agent, self._result = agent, result
        self._call: HostCall | None = call
        self.name = agent.name

    @property
    def host_claim(self) -> Claim | None:
        """Its host memory reservation: none."""
        return self._agent.host_claim

    @host_claim.setter
    def host_claim(self, claim: Claim | None) -> None:
        self._agent.host_claim = claim

    @property
    def with_constants(self) -> Transformation:
        """The transformation: it has no constants."""
        return self._agent.transformation

    def prepared(self) -> PreparedProgram:
        """Return the kernel that executables bind."""
        return CallKernel(self._agent.transformation.inputs, self._agent.transformation.outputs)

    @property
    def is_cancelled(self) -> str | None:
        """Why it cannot run, if a result among its arguments has failed."""
        call = self._call
        given = () if call is None else (*call.arguments, *[value for _, value in call.named])
        return next((o.why for o in given if type(o) is HostResult and o.why is not None), None)

    def run(self, arrays: tuple[Array, ...]) -> None:
        """Call the function on its arrays; exceptions get a note that names the function."""
        call, agent = self._call, self._agent
        assert call is not None, "it runs once"
        # Release the arguments in any case.
        self._call = None
        device = agent.device
        device.calls_host += 1
        try:
            if not arrays:
                given = call.run((), (), _settled)
            else:
                inputs, outputs = agent.shown(arrays, call)
                given = call.run(inputs, outputs, _settled)
            if self._result is not None:
                self._result.fulfil(given)
            else:
                _leave(agent.name, given, outputs[len(call.function.writes) :] if arrays else ())
        except Exception as error:
            # Some exceptions do not accept notes.
            with suppress(Exception):
                error.add_note(f"in host function {self.name!r}, a task of {device!r}")
            raise
        finally:
            device.calls_host -= 1

    def stop(self, why: str) -> None:
        """Mark its result as failed and drop its arguments."""
        self._call = None
        if self._result is not None:
            self._result.fail(why)


def _settled(argument: Any) -> Any:
    """Return an argument, or the value of a `HostResult`."""
    return argument.result() if type(argument) is HostResult else argument


def _counted(parts: Any, given: Any) -> str:
    is_sequence = isinstance(parts, tuple | list)
    return (
        f"{len(parts)} result{'s' * (len(parts) != 1)}"
        if is_sequence
        else f"one {type(given).__name__}"
    )


def _arrays(into: Sequence[Array]) -> str:
    return str(len(into)) if into else "None"


def _leave(name: str, given: Any, into: Sequence[Array]) -> None:
    """Copy returned arrays to the outputs; raises `TaskError` if they do not match."""
    parts = (given,) if len(into) == 1 else () if given is None else given
    if not isinstance(parts, tuple | list) or len(parts) != len(into):
        raise TaskError(
            f"host function {name!r} returned {_counted(parts, given)}, expected {_arrays(into)}",
            remedy="return one array per descriptor in returns= that writes= does not list",
        )
    for part, array in zip(parts, into, strict=True):
        elements = np.asarray(part)
        if elements.shape != array.shape or elements.dtype != array.dtype:
            raise TaskError(
                f"host function {name!r} returned an array of the wrong shape or type",
                expected=f"{list(array.shape)} {array.dtype}",
                got=f"{list(elements.shape)} {elements.dtype}",
                remedy="convert it with .astype(...), or change its descriptor in returns=",
            )
    for part, array in zip(parts, into, strict=True):
        array[...] = part


def _dense(desc: TensorDesc) -> TensorDesc:
    """Return the dense host layout in which a host function writes this result."""
    return TensorDesc(desc.shape, host_layout(desc.layout.data_type.in_arrays))

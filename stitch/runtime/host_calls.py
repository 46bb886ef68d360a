"""Host functions on a device: Python functions whose calls are queued as tasks.

A `HostAgent` is a function on arguments of given types; a call whose arguments have the types of an
earlier one finds its agent by one lookup. A `QueuedCall` is one call in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, ref

import numpy as np

from stitch.argument_kinds import instance_of
from stitch.budget import Claim
from stitch.errors import TaskError, UsageError
from stitch.program import Array, DataType, TensorDesc, ValueType, host_layout
from stitch.runtime.arguments import link_value
from stitch.runtime.executors import CallKernel, FunctionCall, PreparedProgram, ProgramBytes
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import (
    ArgumentRecord,
    ConstantRecord,
    InputPort,
    ValueRecord,
    as_array,
    capture,
)
from stitch.tasks import (
    Future,
    Handle,
    HostCall,
    HostFunction,
    InputPlace,
    OutputPlace,
    Transformation,
    TransformationKind,
    host_call,
)

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

HOST_FUNCTION = instance_of("a host function (stitch.task makes one)", HostFunction)
#: An agent, one call of it, and the values of its tensors and arrays.
LinkedCall: TypeAlias = "tuple[HostAgent, HostCall, list[ValueRecord]]"
#: Cache key of an agent: types of its tensors, and positions of updated ones.
_Form: TypeAlias = "tuple[tuple[ValueType, ...], tuple[int, ...]]"

_NO_BYTES = ProgramBytes(0, 0, 0, 0, "")
#: Common types of objects that hold no tensors, and those that are or hold values.
_OBJECTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_WITH_VALUES = (Tensor, np.ndarray, Future, list, tuple, set, dict)
_PLACES = (InputPlace, OutputPlace)
#: Limit for the cached argument types of one function.
MAX_KNOWN = 64


class HostResult(Handle):
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
        # It writes its results dense to host memory; conversions to other declared layouts follow.
        declared = call.outputs([port.desc for port in self.ports])
        dense = tuple([
            TensorDesc(desc.shape, host_layout(desc.layout.data_type.in_arrays))
            for desc in declared
        ])  # fmt: skip
        self._conversions = [(at, desc) for at, desc in enumerate(declared) if desc != dense[at]]
        self.transformation = Transformation(
            name=function.name,
            kind=TransformationKind.HOST,
            inputs=tuple([port.desc for port in self.ports]),
            outputs=dense,
            input_names=tuple([port.name for port in self.ports]),
            donated=call.consumes,
            aliases=call.aliases,
        )
        self._dense = tuple([(desc, device.desc_key(desc)) for desc in dense])
        #: Descriptors of its results, with the device's keys.
        self.outputs = tuple([
            (bare, device.desc_key(bare)) for desc in declared if (bare := desc.without_address())
        ])  # fmt: skip

    def enqueue(self, call: QueuedCall, inputs: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Enqueue a call, and the conversions of its results to the declared layouts.

        The queue lock is held, or the caller alone enqueues.
        """
        tasks = self.device.tasks
        tasks.is_idle = False
        values = tasks.queued.append(self.transformation, call, inputs, self._dense)
        for at, wanted in self._conversions:
            values[at] = tasks.convert(values[at], wanted)
        return values


class _Known(NamedTuple):
    """What calls with arguments of the same types share.

    `arguments`: of the `HostCall`, with None for each plain one; None if all are plain.
    """

    agent: HostAgent
    arguments: tuple[object, ...] | None
    updated: tuple[int, ...]
    has_objects: bool


_NONE_KNOWN: dict[tuple[object, ...], _Known] = {}


class HostAgents:
    """The agents of a device, cached while their functions live."""

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._agents: WeakKeyDictionary[HostFunction, dict[_Form, HostAgent]] = WeakKeyDictionary()
        #: By function identity and the kinds of the arguments.
        self._known: dict[int, dict[tuple[object, ...], _Known]] = {}

    def link(
        self, function: HostFunction, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> LinkedCall:
        """Return agent, call and input values; changes nothing.

        Raises:
            UsageError: The function does not accept the arguments, or one belongs to another
                device.
        """
        values: list[Any] = []
        kinds = None if named else self._kinds(arguments, values)
        if kinds is not None:
            known = self._known.get(id(function), _NONE_KNOWN).get(kinds)
            if known is not None and known.agent.function() is function:
                if known.arguments is None:
                    return known.agent, HostCall(function, arguments, (), 0), values
                return self._linked(function, known, known.arguments, arguments, values)
        HOST_FUNCTION.check("device.call", "function", function)
        call, given = host_call(function, arguments, named, _is_value)
        for argument in (*call.arguments, *[value for _, value in call.named]):
            if type(argument) is HostResult:
                self._check(function, argument)
            elif isinstance(argument, list | tuple | set | dict):
                inside = argument.values() if isinstance(argument, dict) else argument
                if any(type(value) is HostResult for value in inside):
                    raise UsageError(
                        f"an argument of host function {function.name!r} is a "
                        f"{type(argument).__name__} that contains results, which may be pending",
                        remedy="pass the results as separate arguments: "
                        + ("**results" if isinstance(argument, dict) else "*results"),
                    )
        agent = self.agent(call, tuple([_type_of(function, argument) for argument in given]))
        inputs = [
            self._value(agent.name, port, argument)
            for port, argument in zip(agent.ports, given, strict=True)
        ]
        if kinds is not None and not call.named and agent.function() is function:
            places = [value if type(value) in _PLACES else None for value in call.arguments]
            known_calls = self._known.setdefault(id(function), {})
            if len(known_calls) >= MAX_KNOWN:
                known_calls.clear()
            some = tuple(places) if any(places) else None
            known_calls[kinds] = _Known(agent, some, call.updated, None in places)
        return agent, call, inputs

    def _linked(
        self, function: HostFunction, known: _Known, places: tuple[object, ...],
        arguments: tuple[Any, ...], values: list[Any],
    ) -> LinkedCall:  # fmt: skip
        """As `link`, for a call like one before; `values`: of its tensors, and its arrays."""
        agent = known.agent
        if known.has_objects:
            objects = (a for a in arguments if type(a) is not Tensor and type(a) is not np.ndarray)
            places = tuple([next(objects) if place is None else place for place in places])
        for at, value in enumerate(values):
            if type(value) is np.ndarray:
                values[at] = self._value(agent.name, agent.ports[at], value)
        return agent, HostCall(function, places, (), len(values), known.updated), values

    def _kinds(self, arguments: tuple[Any, ...], values: list[Any]) -> tuple[object, ...] | None:
        """Return what a cached call is found by; None if an argument needs a closer look.

        Args:
            arguments: The arguments of the call.
            values: Receives the values of tensors, and the arrays.
        """
        kinds: list[object] = []
        for argument in arguments:
            kind = type(argument)
            if kind is Tensor:
                value = argument._record
                # Unique over all devices.
                kinds.append(value.desc_key)
                values.append(value)
            elif kind is np.ndarray:
                kinds.append((argument.dtype, argument.shape))
                values.append(argument)
            elif kind in _OBJECTS or (
                not issubclass(kind, _WITH_VALUES)
                if kind is not HostResult
                else argument.why is None and argument.device is self._device
            ):
                kinds.append(None)
            else:
                return None
        return tuple(kinds)

    def agent(self, call: HostCall, types: tuple[ValueType, ...]) -> HostAgent:
        """Return the agent for a call on tensors of these types."""
        device, function, form = self._device, call.function, (types, call.updated)
        agents = self._agents.get(function)
        if agents is None:
            agents = self._agents.setdefault(function, {})
        agent = agents.get(form)
        if agent is None:
            agent = HostAgent(device, call, types)
            forget = partial(self._forget, id(function), agent)
            device.deaths.await_end(function, forget)
            agents[form] = agent
        return agent

    def _forget(self, function: int, agent: HostAgent) -> None:
        """Drop the executables of a collected function."""
        self._device.plan_cache.forget(agent.transformation.key)
        self._known.pop(function, None)

    def _value(self, name: str, port: InputPort, argument: Any) -> ValueRecord:
        if type(argument) is Tensor:
            value = argument._record
            link_value(self._device, name, port, value)
            return value
        if port.is_small and type(argument) is np.ndarray and argument.dtype is port.dtype:
            # Copying a small array is faster than checking whether a copy is needed.
            return ArgumentRecord(self._device, argument.copy(), port)
        allowed = self._device.host_memory.allowed
        array = capture(argument, port.shape, port.type.data_type, False, port.origin, allowed)
        return ArgumentRecord(self._device, array, port)

    def _check(self, function: HostFunction, result: HostResult) -> None:
        if result.device is not self._device:
            raise UsageError(
                f"an argument of host function {function.name!r} is a result of another device",
                expected=f"a result of {self._device!r}",
                got=f"{result!r} of {result.device!r}",
                remedy="pass result.result() instead",
            )
        if result.why is not None:
            raise TaskError(
                f"an argument of host function {function.name!r} is a result that failed",
                where=result.why,
                remedy="look at the error that was raised when the queue ran",
            )


class QueuedCall(FunctionCall):
    """One queued call of a host function; `result`: receives the return value if no outputs are
    declared."""

    __slots__ = ("_agent", "_call", "_result")

    program = None
    host_bytes = _NO_BYTES
    host_claim: Claim | None = None
    constants: Sequence[ConstantRecord] = ()
    content_hash = b""
    least_microseconds = None

    def __init__(self, agent: HostAgent, call: HostCall, result: HostResult | None) -> None:
        self._agent, self._result = agent, result
        self._call: HostCall | None = call

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._agent.name

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
            function, _, _, takes, updated = call
            # New views: a function may change a view's shape, and the next run needs the array
            # again.
            inputs = [array.view() for array in arrays[:takes]]
            outputs = arrays[takes:]
            if updated:
                for at, array in zip(updated, outputs[len(function.returns) :], strict=True):
                    inputs[at] = array
            given = call.run(inputs, outputs, HostResult)
            if self._result is not None:
                self._result.fulfil(given)
            else:
                _store(agent.name, given, outputs[len(function.writes) : len(function.returns)])
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


def _is_value(argument: object) -> bool:
    """Return whether an argument is a tensor or array; raises `UsageError` for a graph's future."""
    if type(argument) is Future:
        raise UsageError(
            "a future of a task graph has no value on a device",
            got=repr(argument),
            remedy="call the function in its graph, graph.host(function, future), and prepare that",
        )
    return isinstance(argument, Tensor | np.ndarray)


def _type_of(function: HostFunction, argument: Any) -> ValueType:
    """Return the type of an argument as an array."""
    if type(argument) is Tensor:
        return ValueType(argument.shape, argument.data_type.in_arrays)
    array = as_array(argument, f"an argument of {function.name!r}")
    return ValueType(array.shape, DataType.from_dtype(array.dtype))


def _counted(parts: Any, given: Any) -> str:
    is_sequence = isinstance(parts, tuple | list)
    return (
        f"{len(parts)} result{'s' * (len(parts) != 1)}"
        if is_sequence
        else f"one {type(given).__name__}"
    )


def _store(name: str, given: Any, into: Sequence[Array]) -> None:
    """Copy returned arrays to the outputs; raises `TaskError` if they do not match."""
    if len(into) == 1 and type(given) is np.ndarray:
        (array,) = into
        if given.shape == array.shape and given.dtype is array.dtype:
            # The common case, in half the time.
            array[...] = given
            return
    parts = (given,) if len(into) == 1 else () if given is None else given
    if not isinstance(parts, tuple | list) or len(parts) != len(into):
        raise TaskError(
            f"host function {name!r} returned {_counted(parts, given)}, "
            f"expected {len(into) or None}",
            remedy="return one array per descriptor in returns= that writes= does not list",
        )
    for part, array in zip(parts, into, strict=True):
        if part is None:
            raise TaskError(
                f"host function {name!r} returned None, not an array",
                expected=f"{list(array.shape)} {array.dtype}",
                remedy="return the array, or list a parameter that it writes in writes=",
            )
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

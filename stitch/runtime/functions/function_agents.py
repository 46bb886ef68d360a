"""The host functions of a device: cached agents by function and argument types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import DataType, ValueType
from stitch.runtime.arguments import link_value
from stitch.runtime.functions.queued_calls import HostAgent, HostResult, QueuedCall
from stitch.runtime.queue import TaskQueue
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import ArgumentRecord, ValueRecord, as_array, capture
from stitch.tasks import Future, HostCall, HostFunction, host_call

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

#: Cache key of an agent: types of its tensors, and positions of updated ones.
_Form: TypeAlias = "tuple[tuple[ValueType, ...], tuple[int, ...]]"


#: Types of objects that hold no tensors.
_OBJECTS = frozenset({type(None), bool, int, float, complex, str, bytes})


class HostAgents:
    """The agents of a device, cached while their functions live."""

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._agents: WeakKeyDictionary[HostFunction, dict[_Form, HostAgent]] = WeakKeyDictionary()
        #: Agents of functions without tensors, by function identity: a fast path.
        self._of_objects: dict[int, HostAgent] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def call_on_objects(
        self, function: HostFunction, arguments: tuple[Any, ...]
    ) -> tuple[HostAgent, HostCall] | None:
        """Return agent and call for a call without tensors; None if that is not certain.

        As `call`, in a quarter of the time: such functions may be very short.
        """
        agent = self._of_objects.get(id(function))
        if agent is None or agent.function() is not function:
            return None
        if not function.least <= len(arguments) <= function.most:
            return None
        for argument in arguments:
            kind = type(argument)
            if kind is HostResult:
                if argument.why is not None or argument.device is not self._device:
                    return None
            elif kind not in _OBJECTS:
                return None
        return agent, HostCall(function, arguments, (), 0)

    def call(
        self, function: HostFunction, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[HostAgent, HostCall, list[ValueRecord]]:
        """Return agent, call and input values; changes nothing.

        Raises:
            UsageError: The function does not accept the arguments, or one belongs to another
                device.
        """
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
        types = tuple([_type_of(function, argument) for argument in given])
        agent = self.agent(call, types)
        values = [self._value(agent, at, argument) for at, argument in enumerate(given)]
        return agent, call, values

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
            device.deaths.notes.await_end(function, forget)
            agents[form] = agent
            if not (types or agent.outputs):
                self._of_objects[id(function)] = agent
        return agent

    def _forget(self, function: int, agent: HostAgent) -> None:
        """Drop the executables of a collected function."""
        self._device.recordings.forget(agent.transformation.key)
        if self._of_objects.get(function) is agent:
            del self._of_objects[function]

    def _value(self, agent: HostAgent, at: int, argument: Any) -> ValueRecord:
        port = agent.ports[at]
        if type(argument) is Tensor:
            value = argument._record
            link_value(self._device, agent.name, port, value)
            return value
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


def queue_call(
    tasks: TaskQueue, agent: HostAgent, call: QueuedCall, inputs: Sequence[ValueRecord]
) -> list[ValueRecord]:
    """Enqueue a call, and the conversions of its results to the declared layouts.

    The queue lock is held, or the caller alone enqueues.
    """
    values = tasks.append(agent.transformation, call, inputs, agent.outputs)
    for at, (desc, wanted) in enumerate(zip(agent.descs, agent.wanted, strict=True)):
        if desc != wanted:
            values[at] = tasks.convert(values[at], wanted)
    return values


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

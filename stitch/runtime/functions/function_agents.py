"""A device's host functions: what their calls have in common is made once and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import DataType, ValueType
from stitch.runtime.arguments import Caller, link_value
from stitch.runtime.functions.queued_calls import HostAgent, HostResult, QueuedCall, Settling
from stitch.runtime.queue import Reclaimer, TaskQueue
from stitch.runtime.recording import Recordings
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import ArgumentRecord, ValueRecord, as_array, capture
from stitch.tasks import Future, HostCall, HostFunction, host_call

#: What agents of one function differ in: the types of its tensors, and which of them it updates.
_Form: TypeAlias = "tuple[tuple[ValueType, ...], tuple[int, ...]]"


#: Types of objects that hold no tensors.
_OBJECTS = frozenset({type(None), bool, int, float, complex, str, bytes})


class FunctionHome(Caller, Settling, Protocol):
    """A device, as those know it who call functions on it."""

    deaths: Reclaimer
    recordings: Recordings


class HostAgents:
    """The agents of a device, for as long as their functions live."""

    def __init__(self, device: FunctionHome) -> None:
        self._device = device
        self._agents: WeakKeyDictionary[HostFunction, dict[_Form, HostAgent]] = WeakKeyDictionary()
        #: Of functions that deal in objects only, by their identities: found in no time.
        self._of_objects: dict[int, HostAgent] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def call_on_objects(
        self, function: HostFunction, arguments: tuple[Any, ...]
    ) -> tuple[HostAgent, HostCall] | None:
        """What a call queues that is given and gives objects only; None where it may be another.

        As `call`, in a quarter of the time: such tasks may well take no time themselves."""
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
        """What a call queues; nothing has changed yet. Raises `UsageError` for arguments that the
        function does not take, or of another device."""
        call, given = host_call(function, arguments, named, _is_value)
        for argument in (*call.arguments, *[value for _, value in call.named]):
            if type(argument) is HostResult:
                self._check(function, argument)
            elif isinstance(argument, list | tuple | set | dict):
                inside = argument.values() if isinstance(argument, dict) else argument
                if any(type(value) is HostResult for value in inside):
                    raise UsageError(
                        f"host function {function.name!r} is given a {type(argument).__name__} "
                        "with results in it, which are perhaps pending",
                        remedy="let the function take them one by one, as in "
                        + ("**results" if isinstance(argument, dict) else "*results"),
                    )
        types = tuple([_type_of(function, argument) for argument in given])
        agent = self.agent(call, types)
        values = [self._value(agent, at, argument) for at, argument in enumerate(given)]
        return agent, call, values

    def agent(self, call: HostCall, types: tuple[ValueType, ...]) -> HostAgent:
        """What such a call has in common with others on tensors of these types."""
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
        """A function is gone, and with it what ran it."""
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
                f"host function {function.name!r} is given a result of another device",
                expected=f"a result of {self._device!r}",
                got=f"{result!r} of {result.device!r}",
                remedy="give it what .result() gives",
            )
        if result.why is not None:
            raise TaskError(
                f"host function {function.name!r} is given a result that was never made",
                where=result.why,
                remedy="look at the error that was raised when the queue ran",
            )


def queue_call(
    tasks: TaskQueue, agent: HostAgent, call: QueuedCall, inputs: Sequence[ValueRecord]
) -> list[ValueRecord]:
    """Queue a call, and the copies to where its results shall lie; the queue's lock is held, or
    nobody else queues."""
    values = tasks.append(agent.transformation, call, inputs, agent.outputs)
    for at, (desc, wanted) in enumerate(zip(agent.descs, agent.wanted, strict=True)):
        if desc != wanted:
            values[at] = tasks.convert(values[at], wanted)
    return values


def _is_value(argument: object) -> bool:
    """Tensors and arrays are values; all else is given as it is, but for futures of graphs."""
    if type(argument) is Future:
        raise UsageError(
            "a future of a task graph has no value on a device",
            got=repr(argument),
            remedy="call the function in its graph, graph.host(function, future), and prepare that",
        )
    return isinstance(argument, Tensor | np.ndarray)


def _type_of(function: HostFunction, argument: Any) -> ValueType:
    """What is given as an array."""
    if type(argument) is Tensor:
        return ValueType(argument.shape, argument.data_type.in_arrays)
    array = as_array(argument, f"an argument of {function.name!r}")
    return ValueType(array.shape, DataType.from_dtype(array.dtype))

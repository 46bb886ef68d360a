"""The tasks of a task graph on one device: programs are loaded, host functions have agents.

Comes in: the table of a task graph without merged tasks; values for its inputs. Goes out: for each
task what is queued for it; the graph in the queue. Must not know how a graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stitch.errors import UsageError
from stitch.program import Program, TensorDesc, ValueType
from stitch.runtime.arguments import check_inputs, link_value
from stitch.runtime.functions import HostAgent, QueuedCall, queue_call
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.queue import TaskQueue
from stitch.runtime.tensor_access import target_desc
from stitch.runtime.values import InputPort, ValueRecord
from stitch.tasks import Agent, CopyAgent, HostCall, ProgramAgent, TaskTable
from stitch.ttb import Binary

#: Gives a program of a device what it is loaded from.
Load = Callable[[Any], LoadedProgram]


@dataclass(frozen=True, slots=True, eq=False)
class GraphRow:
    """A task: what runs it (None for a copy to `desc`), and the numbers of its values.

    `ports`: of its inputs. `gone`: the positions of those that it takes over.
    """

    agent: LoadedProgram | HostAgent | None
    call: HostCall | None
    desc: TensorDesc | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ports: tuple[InputPort, ...]
    gone: frozenset[int]

    @property
    def is_host(self) -> bool:
        """Whether a host function runs it, which may fail by itself."""
        return isinstance(self.agent, HostAgent)

    @property
    def name(self) -> str:
        """For messages."""
        return "to_layout" if self.agent is None else self.agent.name

    def gives(self, device: Any) -> Sequence[tuple[TensorDesc, int]]:
        """What its values are described by, and the device's keys for that."""
        if self.agent is None:
            assert self.desc is not None, "a copy"
            descs = [self.desc.without_address()]
        elif isinstance(self.agent, HostAgent):
            descs = [desc.without_address() for desc in self.agent.wanted]
        else:
            return self.agent.outputs
        return [(desc, device.desc_key(desc)) for desc in descs]


class GraphRows:
    """Makes the rows of a table; each source of a program is loaded once."""

    def __init__(self, device: Any, table: TaskTable, load: Load) -> None:
        self._device, self._table, self._load = device, table, load
        self._name = table.name or "task graph"
        self._given = {value: name for name, value in table.inputs}
        self._loaded: dict[int, LoadedProgram] = {}

    def all(self) -> tuple[GraphRow, ...]:
        """All rows, in order. Raises `UsageError` for programs of another device, and what loading
        raises."""
        return tuple([self._row(*row) for row in self._table.tasks])

    def _row(self, agent: Agent, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> GraphRow:
        if isinstance(agent, ProgramAgent):
            program = self._program(agent)
            return GraphRow(program, None, None, inputs, outputs, program.ports, agent.consumes)
        types = [_type_of(self._table.descs[number]) for number in inputs]
        if isinstance(agent, HostCall):
            host: HostAgent = self._device.host_agents.agent(agent, tuple(types))
            return GraphRow(host, agent, None, inputs, outputs, host.ports, agent.consumes)
        assert isinstance(agent, CopyAgent), "merged tasks are flattened"
        desc, name = self._table.descs[inputs[0]], self._given.get(inputs[0])
        who = ("to_layout", "tensor") if name is None else (self._name, name)
        port = InputPort(*who, _type_of(desc), desc, self._device.desc_key(desc))
        return GraphRow(None, None, agent.desc, inputs, outputs, (port,), frozenset())

    def _program(self, agent: ProgramAgent) -> LoadedProgram:
        source = agent.source
        if isinstance(source, LoadedProgram):
            if source.device is not self._device:
                raise UsageError(
                    f"the programs of a {self._name} are on one device",
                    expected=f"{self._device!r}",
                    got=f"{source.name!r} on {source.device!r}",
                    remedy="load its file there: device.load(file)",
                )
            return source
        loaded = self._loaded.get(id(source))
        if loaded is None:
            if isinstance(source, Program):
                binary: Any = Binary((source,), self._device.machine.shape, "a task graph")
            else:
                binary = source
            loaded = self._loaded[id(source)] = self._load(binary)
        return loaded


def ports_of(rows: Sequence[GraphRow]) -> dict[int, InputPort]:
    """By the numbers of what tasks read: what the first of these takes it for."""
    readers: dict[int, InputPort] = {}
    for row in rows:
        for number, port in zip(row.inputs, row.ports, strict=True):
            readers.setdefault(number, port)
    return readers


def check_links(device: Any, rows: Sequence[GraphRow], given: Sequence[ValueRecord]) -> None:
    """Raise what says so where a value given to a graph is none for a task that reads it."""
    for row in rows:
        for number, port in zip(row.inputs, row.ports, strict=True):
            if number >= len(given):
                continue
            if row.desc is None:
                link_value(device, row.name, port, given[number])
            else:
                target_desc(given[number].desc, row.desc, device.machine.shape)


def queue_rows(
    tasks: TaskQueue, rows: Sequence[GraphRow], given: Sequence[ValueRecord]
) -> list[ValueRecord]:
    """Put a graph into the queue, whose lock is held; its values by their numbers, pending.

    Raises `TaskError` for values that are gone, and tasks queued before the one that reads such a
    value stay in the queue.
    """
    values = list(given)
    for row in rows:
        inputs, agent = [values[number] for number in row.inputs], row.agent
        if agent is None:
            assert row.desc is not None, "a copy"
            inputs[0].check_usable()
            values.append(tasks.convert(inputs[0], row.desc))
            continue
        check_inputs(agent, inputs)
        if isinstance(agent, HostAgent):
            assert row.call is not None, "a host function's"
            values += queue_call(tasks, agent, QueuedCall(agent, row.call, None), inputs)
        else:
            values += tasks.append(agent.transformation, agent, inputs, agent.outputs)
    return values


def _type_of(desc: TensorDesc) -> ValueType:
    """What arrays of it are."""
    return ValueType(desc.shape, desc.layout.data_type.in_arrays)

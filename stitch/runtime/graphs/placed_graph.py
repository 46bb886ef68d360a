"""`PlacedGraph`: a task graph on one device, with loaded programs and agents of host functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from stitch.errors import UsageError
from stitch.linker import check_link
from stitch.program import Program, TensorDesc, ValueType, host_layout
from stitch.runtime.arguments import check_donations, link_value
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.host_calls import HostAgent, QueuedCall
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.tensor_access import target_desc
from stitch.runtime.values import InputPort, ValueRecord
from stitch.tasks import Agent, CopyAgent, HostCall, ProgramAgent, TaskTable, check_can_run
from stitch.ttb import Binary

#: A value's descriptor, its key, and the task that makes it.
MadeValue: TypeAlias = "tuple[TensorDesc, int, str]"


class _Row(NamedTuple):
    """A task: its agent (None for a copy to `desc`), the numbers of its values, and the ports of
    its inputs."""

    agent: LoadedProgram | HostAgent | None
    call: HostCall | None
    desc: TensorDesc | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ports: tuple[InputPort, ...]

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "to_layout" if self.agent is None else self.agent.name

    def gives(self, device: RuntimeDevice) -> Sequence[tuple[TensorDesc, int]]:
        """Return the descriptors of its results, with the device's keys."""
        if self.agent is not None:
            return self.agent.outputs
        assert self.desc is not None, "a copy"
        bare = self.desc.without_address()
        return [(bare, device.desc_key(bare))]


class PlacedGraph:
    """The tasks of a graph with the programs and agents of a device.

    Raises:
        UsageError: The graph has no tasks, an unread input or an output that no task makes, or a
            program is loaded on another device; or it names several devices.
        LinkError: With `strict_types`, a program takes a value of another floating type.
    """

    def __init__(self, device: RuntimeDevice, table: TaskTable, title: str = "") -> None:
        """`title`: its name in messages, if not the graph's name."""
        table = table.flattened()  # Merged tasks are enqueued member by member.
        self.device, self.name = device, table.name or "task graph"
        named = f"task graph {table.name!r}" if table.name else "the task graph"
        self.title = title or named
        self.input_names = tuple([name for name, _ in table.inputs])
        self.output_names = tuple([name for name, _ in table.outputs])
        #: Value numbers of its outputs.
        self.outputs = tuple([number for _, number in table.outputs])
        devices = sorted({device for device in table.devices if device is not None})
        if len(devices) > 1:
            raise UsageError(
                f"{self.title} cannot be prepared on one device: it names several",
                got=", ".join(devices),
                remedy="stitch.open_mesh(...).prepare(graph) runs it on all of them",
            )
        check_can_run(table, self.title)
        self._names = {number: name for name, number in table.inputs}
        #: Loaded programs by source: each source is loaded once.
        self._loaded: dict[int, LoadedProgram] = {}
        #: Agents of host functions by call and descriptors of the inputs, which a graph shares.
        self._hosts: dict[tuple[int, ...], HostAgent] = {}
        self._rows = tuple([self._row(table, *task) for task in table.tasks])
        self.task_count = len(self._rows)
        #: Whether a task may fail by itself: then it runs through the queue, which runs the
        #: independent tasks.
        self.calls_host = any(isinstance(row.agent, HostAgent) for row in self._rows)
        #: Its outputs by number; and donated inputs by number, with the reason.
        self.made: dict[int, MadeValue] = {}
        results = set(self.outputs)
        self.taken_over: dict[int, str] = {}
        readers: dict[int, InputPort] = {}
        #: Readers of the inputs: task, port, and number of the input.
        self._links: list[tuple[_Row, InputPort, int]] = []
        makers = {number: f"input {name!r} of {self.title}" for name, number in table.inputs}
        for row in self._rows:
            for port, number in zip(row.ports, row.inputs, strict=True):
                if number < len(table.inputs):
                    readers.setdefault(number, port)
                    self._links.append((row, port, number))
                if device.strict_types and isinstance(row.agent, LoadedProgram):
                    check_link(
                        table.descs[number], port.desc, output=makers[number],
                        input=f"{row.name}.{port.name}", strict_types=True,
                    )  # fmt: skip
            if row.agent is not None:
                for position in row.agent.transformation.donated:
                    self.taken_over[row.inputs[position]] = f"donated to {row.name!r}"
            if device.strict_types:
                makers |= dict.fromkeys(row.outputs, row.name)
            if not results.isdisjoint(row.outputs):
                for number, output in zip(row.outputs, row.gives(device), strict=True):
                    self.made[number] = (*output, row.name)
        #: The port of each input: of the first task that reads it, if that takes the type of the
        #: input. Otherwise arrays are converted for each reader, as tensors are.
        self.ports: tuple[InputPort, ...] = tuple([
            readers[number] if readers[number].type == _type_of(table.descs[number])
            else self._port(self.name, name, table.descs[number])
            for name, number in table.inputs
        ])  # fmt: skip

    def _row(
        self, table: TaskTable, agent: Agent, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> _Row:
        if isinstance(agent, ProgramAgent):
            program = self._program(agent)
            return _Row(program, None, None, inputs, outputs, program.ports)
        if isinstance(agent, HostCall):
            descs = [table.descs[number] for number in inputs]
            key = (id(agent), *map(id, descs))
            host = self._hosts.get(key)
            if host is None:
                types = tuple(map(_type_of, descs))
                host = self._hosts[key] = self.device.host_agents.agent(agent, types)
            return _Row(host, agent, None, inputs, outputs, host.ports)
        assert isinstance(agent, CopyAgent), "merged tasks are flattened"
        desc, name = table.descs[inputs[0]], self._names.get(inputs[0])
        who = ("to_layout", "tensor") if name is None else (self.name, name)
        return _Row(None, None, agent.desc, inputs, outputs, (self._port(*who, desc),))

    def _port(self, who: str, name: str, desc: TensorDesc) -> InputPort:
        """Return the port of a value with a descriptor."""
        kind = _type_of(desc)
        host = TensorDesc(kind.shape, host_layout(kind.data_type))
        return InputPort(who, name, kind, desc, self.device.desc_key(host))

    def _program(self, agent: ProgramAgent) -> LoadedProgram:
        source = agent.source
        if isinstance(source, LoadedProgram):
            if source.device is not self.device:
                raise UsageError(
                    f"the programs of {self.title} are on one device",
                    expected=f"{self.device!r}",
                    got=f"{source.name!r} on {source.device!r}",
                    remedy="load its file there: device.load(file)",
                )
            return source
        loaded = self._loaded.get(id(source))
        if loaded is None:
            if isinstance(source, Program):
                binary: Any = Binary((source,), self.device.machine.shape, "a task graph")
            else:
                binary = source
            loaded = self._loaded[id(source)] = self.device.load(binary)
        return loaded

    def link(self, given: Sequence[ValueRecord]) -> None:
        """Raise `TaskError`, `UsageError` or `LinkError` if a value does not match its input."""
        for row, port, number in self._links:
            value = given[number]
            if row.desc is None:
                link_value(self.device, row.name, port, value)
            elif value.desc.shape != row.desc.shape:
                target_desc(value.desc, row.desc, self.device.machine.shape)

    def queue(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Enqueue all tasks; returns their values by number. The queue lock is held.

        Raises:
            TaskError: A value is gone; earlier tasks remain in the queue.
        """
        tasks, values = self.device.tasks, list(given)
        for agent, call, desc, numbers, _, _ in self._rows:
            inputs = [values[number] for number in numbers]
            if agent is None:
                assert desc is not None, "a copy"
                inputs[0].check_usable()
                values.append(tasks.convert(inputs[0], desc))
                continue
            if agent.transformation.donated:
                check_donations(agent.transformation, inputs)
            if isinstance(agent, HostAgent):
                assert call is not None, "a host function's"
                values += agent.enqueue(QueuedCall(agent, call, None), inputs)
            else:
                values += tasks.append(agent.transformation, agent, inputs, agent.outputs)
        return values


def _type_of(desc: TensorDesc) -> ValueType:
    """Return the type of arrays with this descriptor."""
    return ValueType(desc.shape, desc.layout.data_type.in_arrays)

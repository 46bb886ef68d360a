"""The tasks of a task graph on one device, with loaded programs and host function agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stitch.errors import UsageError
from stitch.program import Program, TensorDesc, ValueType
from stitch.runtime.functions import HostAgent
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.values import InputPort
from stitch.tasks import Agent, CopyAgent, HostCall, ProgramAgent, TaskTable
from stitch.ttb import Binary


@dataclass(frozen=True, slots=True, eq=False)
class GraphRow:
    """A task: its agent (None for a copy to `desc`) and the numbers of its values.

    `ports`: of its inputs. `gone`: positions of donated inputs.
    """

    agent: LoadedProgram | HostAgent | None
    call: HostCall | None
    desc: TensorDesc | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ports: tuple[InputPort, ...]
    gone: frozenset[int]

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "to_layout" if self.agent is None else self.agent.name

    def gives(self, device: Any) -> Sequence[tuple[TensorDesc, int]]:
        """Return the descriptors of its results, with the device's keys."""
        if self.agent is None:
            assert self.desc is not None, "a copy"
            descs = [self.desc.without_address()]
        elif isinstance(self.agent, HostAgent):
            descs = [desc.without_address() for desc in self.agent.wanted]
        else:
            return self.agent.outputs
        return [(desc, device.desc_key(desc)) for desc in descs]


class GraphRows:
    """Creates the rows of a table; each source of a program is loaded once."""

    def __init__(self, device: Any, table: TaskTable, title: str) -> None:
        self._device, self._table, self._title = device, table, title
        self._name = table.name or "task graph"
        self._given = {value: name for name, value in table.inputs}
        self._loaded: dict[int, LoadedProgram] = {}

    def all(self) -> tuple[GraphRow, ...]:
        """Return all rows in order.

        Raises:
            UsageError: A program is loaded on another device.
        """
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
                    f"the programs of {self._title} are on one device",
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
            loaded = self._loaded[id(source)] = self._device.load(binary)
        return loaded


def _type_of(desc: TensorDesc) -> ValueType:
    """Return the type of arrays with this descriptor."""
    return ValueType(desc.shape, desc.layout.data_type.in_arrays)

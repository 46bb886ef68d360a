"""`PlacedGraph`: a task graph on one device, ready to be queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from stitch.errors import UsageError
from stitch.program import TensorDesc
from stitch.runtime.arguments import check_inputs, link_value
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.functions import HostAgent, QueuedCall, queue_call
from stitch.runtime.graphs.graph_rows import GraphRow, GraphRows
from stitch.runtime.tensor_access import target_desc
from stitch.runtime.values import InputPort, ValueRecord
from stitch.tasks import TaskTable, run_problems

#: A value's descriptor, the key of that, and which task makes it.
MadeValue: TypeAlias = "tuple[TensorDesc, int, str]"


class PlacedGraph:
    """The tasks of a graph with the programs and agents of a device.

    Raises `UsageError` for a graph without tasks, with an input that no task reads or an output
    that no task makes, and for programs of another device.
    """

    def __init__(self, device: RuntimeDevice, table: TaskTable, title: str = "") -> None:
        """`title`: what it is called in messages, where that is not its name."""
        table = table.flattened()  # The members of merged tasks are queued one by one.
        self.device, self.name = device, table.name or "task graph"
        named = f"task graph {table.name!r}" if table.name else "the task graph"
        self.title = title or named
        self.input_names = tuple([name for name, _ in table.inputs])
        self.output_names = tuple([name for name, _ in table.outputs])
        #: The values that its outputs are, by number.
        self.outputs = tuple([number for _, number in table.outputs])
        problem = next(run_problems(table), None)
        if problem is not None:
            raise UsageError(
                f"{self.title} cannot be prepared: {problem.where}: {problem.detail}",
                remedy="TaskGraph.validate() lists everything that keeps a graph from running",
            )  # fmt: skip
        self._rows = GraphRows(device, table, self.title).all()
        self.task_count = len(self._rows)
        #: Whether any task may fail by itself: the queue knows which others run nevertheless.
        self.calls_host = any(isinstance(row.agent, HostAgent) for row in self._rows)
        #: What its tasks make, by number, and which of its inputs they take over, with why.
        self.made: dict[int, MadeValue] = {}
        self.taken_over: dict[int, str] = {}
        readers: dict[int, InputPort] = {}
        #: Who reads what a run is given: the task, its port, and the number of the input.
        self._links: list[tuple[GraphRow, InputPort, int]] = []
        for row in self._rows:
            for position, number in enumerate(row.inputs):
                readers.setdefault(number, row.ports[position])
                if number < len(table.inputs):
                    self._links.append((row, row.ports[position], number))
                if position in row.gone:
                    self.taken_over[number] = f"donated to {row.name!r}"
            for number, output in zip(row.outputs, row.gives(device), strict=True):
                self.made[number] = (*output, row.name)
        #: What each input takes, as the first task that reads it has it.
        self.ports: tuple[InputPort, ...] = tuple([readers[number] for _, number in table.inputs])

    def link(self, given: Sequence[ValueRecord]) -> None:
        """Raise what says so where a value for an input is none for a task that reads it."""
        for row, port, number in self._links:
            value = given[number]
            if row.desc is None:
                link_value(self.device, row.name, port, value)
            elif value.desc.shape != row.desc.shape:
                target_desc(value.desc, row.desc, self.device.machine.shape)

    def queue(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Put all tasks into the queue, whose lock is held; their values by number, pending.

        Raises `TaskError` for values that are gone; tasks queued before the one that reads such a
        value stay in the queue.
        """
        tasks, values = self.device.tasks, list(given)
        for row in self._rows:
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

"""`PlacedGraph`: a task graph on one device, ready to be enqueued."""

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

#: A value's descriptor, its key, and the task that makes it.
MadeValue: TypeAlias = "tuple[TensorDesc, int, str]"


class PlacedGraph:
    """The tasks of a graph with the programs and agents of a device.

    Raises:
        UsageError: The graph has no tasks, an unread input or an output that no task makes, or a
            program is loaded on another device.
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
        problem = next(run_problems(table), None)
        if problem is not None:
            raise UsageError(
                f"{self.title} cannot be prepared: {problem.where}: {problem.detail}",
                remedy="TaskGraph.validate() lists everything that keeps a graph from running",
            )  # fmt: skip
        self._rows = GraphRows(device, table, self.title).all()
        self.task_count = len(self._rows)
        #: Whether a task may fail by itself: then it runs through the queue, which runs the
        #: independent tasks.
        self.calls_host = any(isinstance(row.agent, HostAgent) for row in self._rows)
        #: Its tasks' values by number; and donated inputs by number, with the reason.
        self.made: dict[int, MadeValue] = {}
        self.taken_over: dict[int, str] = {}
        readers: dict[int, InputPort] = {}
        #: Readers of the inputs: task, port, and number of the input.
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
        #: The port of each input, from the first task that reads it.
        self.ports: tuple[InputPort, ...] = tuple([readers[number] for _, number in table.inputs])

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

"""What a task graph freezes to: the form that runtimes take.

Tasks stand in an order in which they may run, one after the other: what a task reads is made
before it, and what it overwrites (`agent.consumes`) is read by no task after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stitch.program import TensorDesc
from stitch.tasks.agents import Agent, MergedAgent, TaskRow


class NamedValue(NamedTuple):
    """An input or an output of a graph: its name, and the number of the value."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class TaskTable:
    """A whole graph; `descs` describes every value, by its number.

    `devices`: of a graph that names devices, the one of each task, or None.
    """

    name: str
    inputs: tuple[NamedValue, ...]
    tasks: tuple[TaskRow, ...]
    outputs: tuple[NamedValue, ...]
    descs: tuple[TensorDesc, ...] = field(repr=False)
    devices: tuple[str | None, ...] = ()

    def device_of(self, task: int) -> str | None:
        """Return the device that a task is placed on, None for an unplaced task."""
        return self.devices[task] if self.devices else None

    def flattened(self) -> TaskTable:
        """The same with the members of merged tasks as tasks of their own."""
        if not any(type(task.agent) is MergedAgent for task in self.tasks):
            return self
        numbers = {value.value: i for i, value in enumerate(self.inputs)}
        descs = [self.descs[value.value] for value in self.inputs]
        rows: list[TaskRow] = []
        devices: list[str | None] = []

        def add(agent: Agent, inputs: tuple[int, ...]) -> range:
            made = agent.outputs([descs[number] for number in inputs])
            new = range(len(descs), len(descs) + len(made))
            descs.extend(made)
            rows.append(TaskRow(agent, inputs, tuple(new)))
            return new

        for task, (agent, inputs, outputs) in enumerate(self.tasks):
            given = tuple([numbers[number] for number in inputs])
            if type(agent) is MergedAgent:
                local = list(given)
                for member in agent.members:
                    local.extend(add(member.agent, tuple([local[n] for n in member.inputs])))
                made = [local[number] for number in agent.kept]
            else:
                made = list(add(agent, given))
            numbers.update(zip(outputs, made, strict=True))
            devices += [self.device_of(task)] * (len(rows) - len(devices))
        return replace(
            self, tasks=tuple(rows), descs=tuple(descs),
            devices=tuple(devices) if self.devices else (),
            inputs=tuple([NamedValue(name, numbers[n]) for name, n in self.inputs]),
            outputs=tuple([NamedValue(name, numbers[n]) for name, n in self.outputs]),
        )  # fmt: skip

    def task_name(self, index: int) -> str:
        """A task, for messages."""
        return f"task {index} ({self.tasks[index].agent.name})"

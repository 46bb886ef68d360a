"""What a task graph freezes to: the form that runtimes take.

Comes in: rows. Goes out: frozen data over numbered values: the inputs are the values 0, 1, ...,
then come the outputs of the tasks, in order. Must not know: futures, devices.

Tasks stand in an order in which they may run, one after the other: what a task reads is made
before it, and what it overwrites (`agent.consumes`) is read by no task after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stitch.program import TensorDesc
from stitch.tasks.agents import Agent


class NamedValue(NamedTuple):
    """An input or an output of a graph: its name, and the number of the value."""

    name: str
    value: int


class TaskRow(NamedTuple):
    """A task: who does it, and the numbers of the values that it reads and makes."""

    agent: Agent
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TaskTable:
    """A whole graph; `descs` describes every value, by its number."""

    name: str
    inputs: tuple[NamedValue, ...]
    tasks: tuple[TaskRow, ...]
    outputs: tuple[NamedValue, ...]
    descs: tuple[TensorDesc, ...] = field(repr=False)

    def task_name(self, index: int) -> str:
        """A task, for messages."""
        return f"task {index} ({self.tasks[index].agent.name})"

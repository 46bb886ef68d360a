"""What a task graph looks like as text, and when two are equal.

Comes in: the table that a graph freezes to. Goes out: JSON, lines, a picture. How they are written
is `graph_form`'s business, which is loaded when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from stitch.tasks.agents import ProgramSource
from stitch.tasks.host_functions import HostFunction
from stitch.tasks.task_table import TaskTable


class TextForms(ABC):
    """What is a table, and can be written down."""

    __slots__ = ()

    @abstractmethod
    def _table(self) -> TaskTable:
        """What it is now, sound or not."""

    @property
    def programs(self) -> dict[str, ProgramSource]:
        """What it calls, by the names of its text: a second program of one name is `name#2`."""
        from stitch.tasks.graph_form import AgentNames

        return {name: agent.source for name, agent in AgentNames(self._table()).programs.items()}

    @property
    def functions(self) -> dict[str, HostFunction]:
        """Its host functions by the names of its text."""
        from stitch.tasks.graph_form import AgentNames

        return AgentNames(self._table()).functions

    def as_json(self) -> str:
        """The graph as JSON for `TaskGraph.from_json` (form: `stitch.tasks.graph_form`).

        Programs and functions are named, not held. Raises `UsageError` for arguments of host
        functions that JSON cannot hold.
        """
        from stitch.tasks.graph_form import table_as_json

        return table_as_json(self._table())

    def text(self) -> str:
        """The graph as readable text: one line for each input, task and output."""
        from stitch.tasks.graph_form import table_text

        return table_text(self._table())

    def to_dot(self) -> str:
        """The graph in Graphviz's language, for `dot -Tsvg`."""
        from stitch.tasks.graph_form import table_dot

        return table_dot(self._table())

    def __str__(self) -> str:
        return self.text()

    def __eq__(self, other: object) -> bool:
        """Whether both freeze to one table: the same tasks of equal programs and functions."""
        if not isinstance(other, TextForms):
            return NotImplemented
        return self is other or self._table() == other._table()

    __hash__ = None  # type: ignore[assignment]  # it grows

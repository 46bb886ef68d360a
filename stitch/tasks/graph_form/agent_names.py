"""What a graph's programs and functions are called in its text: no two have one name."""

from __future__ import annotations

from collections.abc import Iterable

from stitch.program import FreeNames
from stitch.tasks.agents import Agent, MergedAgent, ProgramAgent
from stitch.tasks.host_calls import HostCall
from stitch.tasks.host_functions import HostFunction
from stitch.tasks.task_table import TaskTable


class AgentNames:
    """Programs and functions of a table by name; the second of one name is `name#2`."""

    def __init__(self, table: TaskTable) -> None:
        self.programs: dict[str, ProgramAgent] = {}
        self.functions: dict[str, HostFunction] = {}
        self._names: dict[int, str] = {}
        programs, functions = FreeNames(mark="#"), FreeNames(mark="#")
        for agent in _agents(row.agent for row in table.tasks):
            if type(agent) is ProgramAgent and id(agent.program) not in self._names:
                name = programs.free(agent.name)
                self._names[id(agent.program)] = name
                self.programs[name] = agent
            elif type(agent) is HostCall and id(agent.function) not in self._names:
                name = functions.free(agent.name)
                self._names[id(agent.function)] = name
                self.functions[name] = agent.function

    def name_of(self, agent: ProgramAgent | HostCall) -> str:
        """The name of what a task calls."""
        called = agent.program if isinstance(agent, ProgramAgent) else agent.function
        return self._names[id(called)]


def _agents(agents: Iterable[Agent]) -> Iterable[Agent]:
    seen: set[int] = set()
    for agent in agents:
        if id(agent) not in seen:
            seen.add(id(agent))
            if type(agent) is MergedAgent:
                yield from _agents(member.agent for member in agent.members)
            else:
                yield agent

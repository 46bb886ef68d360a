"""Tables for people: lines of text, and a picture for `dot`."""

from __future__ import annotations

import json

from stitch.tasks.agents import CopyAgent, MergedAgent, ProgramAgent, TaskRow
from stitch.tasks.graph_form.agent_names import AgentNames
from stitch.tasks.host_calls import InputPlace, OutputPlace
from stitch.tasks.task_order import edges_of
from stitch.tasks.task_table import TaskTable


def table_text(table: TaskTable) -> str:
    """One line for each input, task and output; members of merged tasks are indented."""
    names = AgentNames(table)
    lines = [f"task graph {json.dumps(table.name)} {{"]
    for name, number in table.inputs:
        lines.append(f"  input {name}: %{number} {table.descs[number].text()}")
    for row in table.tasks:
        types = ", ".join(table.descs[number].text() for number in row.outputs)
        lines.append(f"  {_line(row, names)}{f' : {types}' if types else ''}")
        if isinstance(row.agent, MergedAgent):
            lines += [f"    {_line(member, names)}" for member in row.agent.members]
            lines.append(f"    keep {_values(row.agent.kept)}")
    lines += [f"  output {name}: %{number}" for name, number in table.outputs]
    return "\n".join([*lines, "}\n"])


def table_dot(table: TaskTable) -> str:
    """The graph in Graphviz's language; a dashed edge is an order without a value."""
    lines = [f"digraph {_quoted(table.name or 'task graph')} {{", "  node [shape=box];"]
    origin: dict[int, str] = {}
    for i, (name, number) in enumerate(table.inputs):
        lines.append(f"  i{i} [shape=ellipse, label={_quoted(name)}];")
        origin[number] = f"i{i}"
    for index, row in enumerate(table.tasks):
        style = ", style=rounded" if type(row.agent) is not ProgramAgent else ""
        lines.append(f"  t{index} [label={_quoted(row.agent.name)}{style}];")
        origin |= dict.fromkeys(row.outputs, f"t{index}")
    for i, (name, _) in enumerate(table.outputs):
        lines.append(f"  o{i} [shape=ellipse, label={_quoted(name)}];")
    for index, (row, before) in enumerate(zip(table.tasks, edges_of(table.tasks), strict=True)):
        for number in dict.fromkeys(row.inputs):
            label = _quoted(table.descs[number].text())
            lines.append(f"  {origin[number]} -> t{index} [label={label}];")
        waits = sorted(task for task, passes in before.items() if not passes)
        lines += [f"  t{earlier} -> t{index} [style=dashed];" for earlier in waits]
    lines += [f"  {origin[number]} -> o{i};" for i, (_, number) in enumerate(table.outputs)]
    return "\n".join([*lines, "}\n"])


def _line(row: TaskRow, names: AgentNames) -> str:
    agent, made = row.agent, _values(row.outputs)
    head = f"{made} = " if made else ""
    if isinstance(agent, CopyAgent):
        return f"{head}to_layout({_values(row.inputs)})"
    if isinstance(agent, MergedAgent):
        return f"{head}merged({_values(row.inputs)})"
    if isinstance(agent, ProgramAgent):
        slots = zip(agent.transformation.input_names, row.inputs, strict=True)
        given = [f"{slot}=%{number}" for slot, number in slots]
        return f"{head}{names.name_of(agent)}({', '.join(given)})"

    def shown(value: object) -> str:
        if isinstance(value, InputPlace):
            star = "!" if value.index in agent.consumes else ""
            return f"%{row.inputs[value.index]}{star}"
        if isinstance(value, OutputPlace):
            return f"%{row.outputs[value.index]}"
        return " ".join(repr(value).split())[:60]

    given = [shown(value) for value in agent.arguments]
    given += [f"{name}={shown(value)}" for name, value in agent.named]
    return f"{head}host {names.name_of(agent)}({', '.join(given)})"


def _values(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"%{number}" for number in numbers)


def _quoted(text: str) -> str:
    """A string of Graphviz, in which quotes and line ends are escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

"""Tables to JSON: the same text for the same table."""

from __future__ import annotations

import json
from typing import Any

from stitch.tasks.agents import CopyAgent, MergedAgent, ProgramAgent, TaskRow
from stitch.tasks.graph_form.agent_names import AgentNames
from stitch.tasks.graph_form.argument_form import argument_out
from stitch.tasks.graph_form.desc_form import desc_out
from stitch.tasks.host_functions import HostFunction
from stitch.tasks.task_table import TaskTable

FORMAT = "stitch.task_graph"
VERSION = 1


def table_as_json(table: TaskTable) -> str:
    """The table as JSON text; raises `UsageError` for arguments that JSON cannot hold."""
    names = AgentNames(table)
    descs = table.descs
    body = {
        "format": FORMAT,
        "version": VERSION,
        "name": table.name,
        "inputs": [
            {"name": name, "desc": desc_out(descs[number])} for name, number in table.inputs
        ],
        "programs": [program_out(name, agent) for name, agent in names.programs.items()],
        "functions": [function_out(name, known) for name, known in names.functions.items()],
        "tasks": [
            _task_out(row, names, table.task_name(index)) for index, row in enumerate(table.tasks)
        ],
        "outputs": [{"name": name, "value": number} for name, number in table.outputs],
    }
    return json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def program_out(name: str, agent: ProgramAgent) -> dict[str, Any]:
    """What a program is known by: its slots."""
    what = agent.transformation
    inputs: list[dict[str, Any]] = [
        {"name": slot, "desc": desc_out(desc), "donate": i in what.donated}
        for i, (slot, desc) in enumerate(zip(what.input_names, what.inputs, strict=True))
    ]
    outputs = [
        {"name": slot, "desc": desc_out(desc)}
        for slot, desc in zip(what.output_names, what.outputs, strict=True)
    ]
    return {"name": name, "inputs": inputs, "outputs": outputs}


def function_out(name: str, function: HostFunction) -> dict[str, Any]:
    """What a host function is known by: what it does with its parameters, and what it gives."""
    return {
        "name": name,
        "parameters": [
            {"name": parameter.name, "permission": parameter.permission.value}
            for parameter in function.parameters
        ],
        "returns": [desc_out(desc) for desc in function.returns],
        "writes": list(function.writes),
        "updates": list(function.updates),
    }


def _task_out(row: TaskRow, names: AgentNames, where: str) -> dict[str, Any]:
    agent = row.agent
    form: dict[str, Any] = {}
    if isinstance(agent, ProgramAgent):
        form["program"] = names.name_of(agent)
    elif isinstance(agent, CopyAgent):
        form["copy"] = desc_out(agent.desc)
    elif isinstance(agent, MergedAgent):
        form["merged"] = [
            _task_out(member, names, f"{where}, member {i} ({member.agent.name})")
            for i, member in enumerate(agent.members)
        ]
        form["kept"] = list(agent.kept)
    else:
        form["function"] = names.name_of(agent)
        form["arguments"] = [argument_out(value, where) for value in agent.arguments]
        form["named"] = {name: argument_out(value, where) for name, value in agent.named}
    return form | {"inputs": list(row.inputs), "outputs": list(row.outputs)}

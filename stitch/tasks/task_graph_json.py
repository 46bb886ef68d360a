"""Task graphs as text: JSON that reads back, lines for people, a picture for `dot`.

The JSON form (version 1) is an object with `format` ("stitch.task_graph"), `version`, `name`,
`inputs` [{name, desc}], `programs` [{name, inputs [{name, desc, donate}], outputs [{name, desc}]}],
`functions` [{name, parameters [{name, permission}], returns [desc], writes, updates}], `tasks` and
`outputs` [{name, value}]. Values have numbers: the inputs 0, 1, ..., then the outputs of the tasks,
in order. A task has `inputs` and `outputs` (numbers) and one of `program` (a name), `function` (a
name; with `arguments` and `named`), `copy` (a desc) or `merged` (tasks over numbers of
their own, the inputs of the whole first; with `kept`). A desc is {shape, data_type, space} and,
where they are not plain, tile_shape, memory_layout, shard_spec, address. Programs and functions
are not in the text, only what they are known by: the reader is given them by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from stitch.errors import FormatError, LayoutError, Problem, UsageError, closest
from stitch.graph import JsonObject, reject_duplicate_keys, shorten
from stitch.program import (
    DataType,
    FreeNames,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)
from stitch.tasks.agents import (
    Agent,
    CopyAgent,
    MergedAgent,
    ProgramAgent,
    ProgramSource,
    TaskRow,
    program_agent,
)
from stitch.tasks.host_calls import HostCall, InputPlace, OutputPlace, placed_call
from stitch.tasks.host_functions import HostFunction, Permission, host_function
from stitch.tasks.task_table import NamedValue, TaskTable
from stitch.tasks.validation import agent_problems, edges_of, order_problems, problems_of

# --------------------------------------------------------------------------------------------------
# Unique names of a graph's programs and functions.


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


# --------------------------------------------------------------------------------------------------
# Arguments of host functions as JSON, in both directions.

_TAGS = ("input", "output", "float", "path", "list", "tuple", "dict")
#: Maximum nesting depth of arguments.
MAX_DEPTH = 32


def argument_out(value: object, where: str, depth: int = 0) -> Any:
    """An argument as JSON data; raises `UsageError` for what the form cannot hold."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, InputPlace):
        return {"input": value.index}
    if isinstance(value, OutputPlace):
        return {"output": value.index}
    if isinstance(value, Path):
        return {"path": str(value)}
    if depth < MAX_DEPTH:
        if type(value) in (list, tuple):
            assert isinstance(value, Sequence)
            parts = [argument_out(part, where, depth + 1) for part in value]
            return {type(value).__name__: parts}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {k: argument_out(v, where, depth + 1) for k, v in value.items()}}
    remedy = "give arrays as inputs of the graph; let the function find other objects by name"
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        remedy = f"it holds Python's numbers and texts: try {type(value.item()).__name__}(x)"
    raise UsageError(
        "a task graph's JSON holds no such argument",
        where=where,
        expected="None, truth values, numbers, texts, paths; lists, tuples and dicts of them",
        got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
        remedy=remedy,
    )


def argument_in(data: object, record: JsonObject, key: str, depth: int = 0) -> Any:
    """What `argument_out` gave; notes a problem for anything else."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    tag = next(iter(data)) if isinstance(data, dict) and len(data) == 1 else None
    if tag not in _TAGS or depth > MAX_DEPTH:
        record.problem("bad_value", key, "an argument is a plain value, or an object with one of "
                       f"{', '.join(_TAGS)}")  # fmt: skip
        return None
    assert isinstance(data, dict)
    inside = data[tag]
    if tag in ("input", "output") and type(inside) is int and inside >= 0:
        return InputPlace(inside) if tag == "input" else OutputPlace(inside)
    if tag == "float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if tag == "path" and isinstance(inside, str):
        return Path(inside)
    if tag in ("list", "tuple") and isinstance(inside, list):
        parts = [argument_in(part, record, key, depth + 1) for part in inside]
        return parts if tag == "list" else tuple(parts)
    if tag == "dict" and isinstance(inside, dict):
        return {str(k): argument_in(v, record, key, depth + 1) for k, v in inside.items()}
    record.problem("bad_value", key, f"{str(inside)[:40]!r} is no {tag}")
    return None


# --------------------------------------------------------------------------------------------------
# Descriptors as JSON, in both directions.

_ALWAYS = ("shape", "data_type", "space")
_SOMETIMES = ("tile_shape", "memory_layout", "shard_spec", "address")
_SHARD = ("core_grid", "shape", "orientation")
_Word = TypeVar("_Word", DataType, Space, MemoryLayout, Orientation)


def desc_out(desc: TensorDesc) -> dict[str, Any]:
    """A descriptor as JSON data."""
    layout, spec = desc.layout, desc.layout.shard_spec
    form: dict[str, Any] = {
        "shape": list(desc.shape),
        "data_type": layout.data_type.value,
        "space": layout.space.value,
    }
    if layout.tile_shape is not None:
        form["tile_shape"] = list(layout.tile_shape)
    if layout.memory_layout is not MemoryLayout.INTERLEAVED:
        form["memory_layout"] = layout.memory_layout.value
    if spec is not None:
        form["shard_spec"] = {
            "core_grid": list(spec.core_grid),
            "shape": list(spec.shape),
            "orientation": spec.orientation.value,
        }
    if layout.address is not None:
        form["address"] = layout.address
    return form


def desc_in(record: JsonObject) -> TensorDesc | None:
    """What `desc_out` gave; None, and a problem, for anything else."""
    record.refuse_other_keys((*_ALWAYS, *_SOMETIMES))
    shape = record.integers("shape")
    data_type = _word(record, "data_type", DataType.FLOAT32)
    space = _word(record, "space", Space.HOST)
    memory_layout = MemoryLayout.INTERLEAVED
    if record.get("memory_layout") is not None:
        memory_layout = _word(record, "memory_layout", memory_layout)
    tile = None if record.get("tile_shape") is None else _pair(record, "tile_shape")
    address = None if record.get("address") is None else record.integer("address")
    try:
        spec = _spec_in(record) if record.get("shard_spec") is not None else None
        return TensorDesc(shape, Layout(data_type, space, tile, memory_layout, spec, address))
    except LayoutError as error:
        record.problem("bad_layout", "layout", error.sentence())
        return None


def _spec_in(record: JsonObject) -> ShardSpec:
    spec = record.record("shard_spec")
    spec.refuse_other_keys(_SHARD)
    grid, shape = _pair(spec, "core_grid"), _pair(spec, "shape")
    return ShardSpec(grid, shape, _word(spec, "orientation", Orientation.ROW_MAJOR))


def _word(record: JsonObject, key: str, otherwise: _Word) -> _Word:
    return record.choice(key, {member.value: member for member in type(otherwise)}, otherwise)


def _pair(record: JsonObject, key: str) -> tuple[int, int]:
    numbers = record.integers(key)
    if len(numbers) != 2:
        record.problem("bad_value", key, f"two whole numbers are needed, not {len(numbers)}")
        return 1, 1
    return numbers[0], numbers[1]


# --------------------------------------------------------------------------------------------------
# Writing JSON: equal tables give equal text.

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


# --------------------------------------------------------------------------------------------------
# Reading JSON: a valid table, or one error that lists all defects.

Programs: TypeAlias = Mapping[str, ProgramSource]
Functions: TypeAlias = "Mapping[str, HostFunction | Callable[..., Any]]"
_Agent = TypeVar("_Agent")
_TOP = ("format", "version", "name", "inputs", "programs", "functions", "tasks", "outputs")
_KINDS = ("program", "function", "copy", "merged")


def table_from_json(
    text: str | bytes,
    programs: Programs,
    functions: Functions,
) -> TaskTable:
    """The table that a text describes; raises `FormatError` listing every defect."""
    problems: list[Problem] = []
    root = JsonObject(_parsed(text), "graph", problems)
    if root.text("format") != FORMAT or root.integer("version") != VERSION:
        raise FormatError(
            "not a task graph that this version reads",
            expected=f"format {FORMAT!r}, version {VERSION}",
            got=f"format {root.get('format')!r}, version {root.get('version')!r}"[:200],
        )
    root.refuse_other_keys(_TOP)
    read = _Reader(programs, functions)
    read.read_agents(root)
    inputs = []
    for record in root.records("inputs"):
        record.refuse_other_keys(("name", "desc"))
        inputs.append((record.text("name"), desc_in(record.record("desc"))))
    count, rows = len(inputs), []
    for record in root.records("tasks"):
        rows.append(read.task(record, count))
        count += len(rows[-1].outputs)
    outputs = []
    for record in root.records("outputs"):
        record.refuse_other_keys(("name", "value"))
        outputs.append(NamedValue(record.text("name"), record.integer("value")))
    descs = tuple([desc for _, desc in inputs if desc is not None])
    named = tuple([NamedValue(word, i) for i, (word, _) in enumerate(inputs)])
    table = TaskTable(root.text("name"), named, tuple(rows), tuple(outputs), descs)
    root.more_problems(order_problems(table))
    if not problems:
        table = _described(table, root)
        root.more_problems(problems_of(table))
    if problems:
        raise FormatError("not a sound task graph", problems=tuple(problems))
    return table


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except RecursionError as error:
        raise FormatError("JSON nested too deeply for a task graph") from error
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error


def _described(table: TaskTable, root: JsonObject) -> TaskTable:
    """The table with a descriptor for every value, as its agents say."""
    descs = list(table.descs)
    for index, row in enumerate(table.tasks):
        wrong = list(agent_problems(row, table.task_name(index)))
        root.more_problems(wrong)
        if wrong:
            return replace(table, descs=tuple(descs))
        descs += row.agent.outputs([descs[number] for number in row.inputs])
    return replace(table, descs=tuple(descs))


class _Reader:
    """Programs and functions that a text names, and its tasks."""

    def __init__(self, given_programs: Programs, given_functions: Functions) -> None:
        self.given_programs, self.given_functions = given_programs, given_functions
        #: What the text names, found or not, in its order.
        self.named: dict[str, dict[str, None]] = {"program": {}, "function": {}}
        self.programs: dict[str, ProgramAgent] = {}
        self.functions: dict[str, HostFunction] = {}

    def read_agents(self, root: JsonObject) -> None:
        """The programs and functions, which the caller gives by name."""
        for record in root.records("programs"):
            record.refuse_other_keys(("name", "inputs", "outputs"))
            name = record.text("name")
            source = self._given(record, name, self.given_programs, "program")
            if source is not None:
                agent = program_agent(source)
                self._compare(record, program_out(name, agent), "program")
                self.programs[name] = agent
        for record in root.records("functions"):
            record.refuse_other_keys(("name", "parameters", "returns", "writes", "updates"))
            name = record.text("name")
            function = self._given(record, name, self.given_functions, "function")
            if function is not None and not isinstance(function, HostFunction):
                function = _function(record, name, function)
            if function is not None:
                self._compare(record, function_out(name, function), "function")
                self.functions[name] = function

    def task(self, record: JsonObject, first: int, *, inner: bool = False) -> TaskRow:
        """A task; `first`: the number of its first output."""
        kinds = [kind for kind in _KINDS if record.get(kind) is not None]
        if len(kinds) != 1 or (inner and kinds == ["merged"]):
            known = " or ".join(_KINDS[:-1] if inner else _KINDS)
            record.problem("bad_value", "task", f"a task has one of {known}, not {kinds}")
            kinds = [""]
        inputs, outputs = record.integers("inputs"), record.integers("outputs")
        expected = tuple(range(first, first + len(outputs)))
        if outputs != expected:
            what = f"values are numbered in order: {list(expected)}, not {list(outputs)}"
            record.problem("bad_value", "outputs", what)
        extra = {"function": ("arguments", "named"), "merged": ("kept",)}.get(kinds[0], ())
        if kinds[0]:
            record.refuse_other_keys((kinds[0], *extra, "inputs", "outputs"))
        agent = self._agent(record, kinds[0], len(inputs))
        return TaskRow(agent or MergedAgent(len(inputs), (), ()), inputs, expected)

    def _agent(self, record: JsonObject, kind: str, takes: int) -> Agent | None:
        if kind == "copy":
            desc = desc_in(record.record("copy"))
            return None if desc is None else CopyAgent(desc)
        if kind == "program":
            return self._known(record, kind, self.programs)
        if kind == "merged":
            rows: list[TaskRow] = []
            count = takes
            for member in record.records("merged"):
                rows.append(self.task(member, count, inner=True))
                count += len(rows[-1].outputs)
            return MergedAgent(takes, tuple(rows), record.integers("kept"))
        function = self._known(record, kind, self.functions) if kind else None
        if function is None:
            return None
        arguments = [argument_in(part, record, "arguments") for part in record.items("arguments")]
        named = {
            name: argument_in(part, record, "named")
            for name, part in record.fields("named").items()
        }
        try:
            return placed_call(function, arguments, named, takes)
        except UsageError as error:
            record.problem("signature", "arguments", error.sentence())
            return None

    def _given(self, record: JsonObject, name: str, given: Mapping[str, Any], kind: str) -> Any:
        if name in self.named[kind]:
            record.problem("bad_name", "name", f"another {kind} has the name {name!r}")
        self.named[kind][name] = None
        found = given.get(name)
        if found is None:
            near = "" if record.is_full else closest(name, given, "; ")
            record.problem(f"unknown_{kind}", "name",
                           f"{kind} {name!r} is not given in {kind}s={near}")  # fmt: skip
        return found

    def _known(self, record: JsonObject, kind: str, known: Mapping[str, _Agent]) -> _Agent | None:
        name = record.text(kind)
        if name not in self.named[kind]:
            near = "" if record.is_full else closest(name, self.named[kind], "; ")
            record.problem(f"unknown_{kind}", kind, f"the text has no {kind} {name!r}{near}")
        return known.get(name)

    def _compare(self, record: JsonObject, wanted: Mapping[str, Any], kind: str) -> None:
        for key, value in wanted.items():
            if record.get(key) != value:
                has, said = (shorten(json.dumps(data), 100) for data in (value, record.get(key)))
                what = f"the {kind} that is given has {has}, not {said}"
                record.problem("signature", key, what)


def _function(record: JsonObject, name: str, function: Callable[..., Any]) -> HostFunction | None:
    """A host function of a plain one, as the text says what it does."""
    returns = [desc_in(part) for part in record.records("returns")]
    reads = [
        part.text("name")
        for part in record.records("parameters")
        if part.get("permission") == Permission.READ_ONLY.value
    ]
    called, mark, number = name.rpartition("#")
    try:
        return host_function(
            function, returns=[desc for desc in returns if desc is not None], reads=reads,
            writes=record.texts("writes"), updates=record.texts("updates"),
            name=called if mark and number.isdigit() else name,
        )  # fmt: skip
    except UsageError as error:
        record.problem("signature", "parameters", error.sentence())
        return None


# --------------------------------------------------------------------------------------------------
# Text and Graphviz output.


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

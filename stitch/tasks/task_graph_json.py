"""Task graphs as text: JSON that reads back, and lines for people.

The JSON form (version 1) is an object with `format` ("stitch.task_graph"), `version`, `name`,
`inputs` [{name, desc}], `programs` [{name, inputs [{name, desc, donate}], outputs [{name, desc}]}],
`functions` [{name, parameters [{name, permission}], returns [desc], writes, updates}], `tasks` and
`outputs` [{name, value}]. Values have numbers: the inputs 0, 1, ..., then the outputs of the tasks,
in order. A task has `inputs` and `outputs` (numbers) and one of `program` (a name), `function` (a
name; with `arguments` and `named`), `copy` (a desc) or `merged` (tasks over numbers of
their own, the inputs of the whole first; with `kept`). A desc is {shape, data_type, space} and,
where they are not plain, tile_shape, memory_layout, shard_spec, address. A placed task has
`device`. Programs and functions are not in the text, only what they are known by: the reader is
given them by name, or a program by its file: `sha256` (of the bytes of a `.ttb` file, 64 lower-case
hexadecimal digits) and `index` (which of its programs) are both there or neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from stitch.argument_kinds import MAPPING
from stitch.errors import FormatError, Problem, UsageError, unknown
from stitch.frozen_json import (
    MAX_CHARACTERS,
    check_format,
    from_plain,
    located,
    read_json,
    shown,
    to_plain,
)
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
from stitch.tasks.validation import MAX_PROBLEMS, agent_problems, order_problems, problems_of

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
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            parts = [argument_out(part, where, depth + 1) for part in value]
            return {type(value).__name__: parts}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {k: argument_out(v, where, depth + 1) for k, v in value.items()}}
    raise UsageError(
        "a task graph's JSON holds no such argument",
        where=where,
        expected="None, truth values, numbers, texts, paths; lists, tuples and dicts of them",
        got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
        remedy="give arrays as inputs of the graph; let the function find other objects by name",
    )


#: The types of arguments by their tags.
_TAGS: Mapping[str, Any] = {
    "input": int, "output": int, "float": float, "path": str, "list": tuple[Any, ...],
    "tuple": tuple[Any, ...], "dict": Mapping[str, Any],
}  # fmt: skip


def argument_in(data: Any, where: str, depth: int = 0) -> Any:
    """What `argument_out` gave; raises `FormatError` for anything else."""
    if not isinstance(data, dict | list):
        return data
    tag = next(iter(data)) if isinstance(data, dict) and len(data) == 1 else ""
    if not isinstance(data, dict) or tag not in _TAGS or depth > MAX_DEPTH:
        raise FormatError(
            "no argument of a task", where=where, got=shown(data)[:80],
            expected=f"a plain value, or an object with one of {', '.join(_TAGS)}",
        )  # fmt: skip
    inside: Any = from_plain(_TAGS[tag], data[tag], f"{where}.{tag}")
    if tag in ("input", "output"):
        return InputPlace(inside) if tag == "input" else OutputPlace(inside)
    if tag == "dict":
        return {key: argument_in(v, where, depth + 1) for key, v in inside.items()}
    if tag in ("list", "tuple"):
        parts = [argument_in(part, where, depth + 1) for part in inside]
        return parts if tag == "list" else tuple(parts)
    return Path(inside) if tag == "path" else inside


# --------------------------------------------------------------------------------------------------
# The JSON form: equal tables give equal text.

FORMAT: Final = "stitch.task_graph"
VERSION: Final = 1


class _Shards(NamedTuple):
    core_grid: tuple[int, int]
    shape: tuple[int, int]
    orientation: Orientation


class _Desc(NamedTuple):
    shape: tuple[int, ...]
    data_type: DataType
    space: Space
    tile_shape: tuple[int, int] | None = None
    memory_layout: MemoryLayout = MemoryLayout.INTERLEAVED
    shard_spec: _Shards | None = None
    address: int | None = None


class _Input(NamedTuple):
    name: str
    desc: _Desc


class _Slot(NamedTuple):
    name: str
    desc: _Desc
    donate: bool


class _Program(NamedTuple):
    name: str
    inputs: tuple[_Slot, ...]
    outputs: tuple[_Input, ...]
    sha256: str | None = None
    index: int | None = None  # type: ignore[assignment]  # instead of the method of tuples


class _Parameter(NamedTuple):
    name: str
    permission: Permission


class _Function(NamedTuple):
    name: str
    parameters: tuple[_Parameter, ...]
    returns: tuple[_Desc, ...]
    writes: tuple[str, ...]
    updates: tuple[str, ...]


class _Task(NamedTuple):
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    program: str | None = None
    function: str | None = None
    arguments: tuple[Any, ...] | None = None
    named: Mapping[str, Any] | None = None
    copy: _Desc | None = None
    merged: tuple[_Task, ...] | None = None
    kept: tuple[int, ...] | None = None
    device: str | None = None


class _Graph(NamedTuple):
    format: Literal["stitch.task_graph"]
    version: Literal[1]
    name: str
    inputs: tuple[_Input, ...]
    programs: tuple[_Program, ...]
    functions: tuple[_Function, ...]
    tasks: tuple[_Task, ...]
    outputs: tuple[NamedValue, ...]


#: The files of programs by the names of the programs: the SHA-256 of the bytes, and the index.
ProgramFiles: TypeAlias = Mapping[str, tuple[str, int]]


def table_as_json(table: TaskTable, files: ProgramFiles | None = None) -> str:
    """Return the table as JSON text, which names the programs in `files` by their files too.

    Raises `UsageError` for arguments that JSON cannot hold, and for a file that is not named by a
    SHA-256 and an index, or is that of no program.
    """
    names, files = AgentNames(table), {} if files is None else files
    MAPPING.check("graph.as_json", "files", files)
    for name, file in files.items():
        if name not in names.programs:
            what = f"the graph calls no program {name!r}, which files= names"
            raise unknown(what, name, names.programs, expected=None)
        if not (isinstance(file, tuple) and _names_a_file(*file)):
            raise UsageError(f"the file of program {name!r} has no such name",
                             expected=f"a tuple of {_FILE_NAME}", got=repr(file)[:80])  # fmt: skip
    body = to_plain(_Graph(
        FORMAT, VERSION, table.name,
        tuple([_Input(name, _desc_out(table.descs[number])) for name, number in table.inputs]),
        tuple([
            _program_out(name, agent, *files.get(name, ()))
            for name, agent in names.programs.items()
        ]),
        tuple([_function_out(name, known) for name, known in names.functions.items()]),
        tuple([
            _task_out(row, names, table.task_name(i))._replace(device=table.device_of(i))
            for i, row in enumerate(table.tasks)
        ]),
        table.outputs,
    ))  # fmt: skip
    return json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


_FILE_NAME = "the SHA-256 of its bytes (64 lower-case hexadecimal digits), and an index"


def _names_a_file(*name: object) -> bool:
    match name:
        case (str(sha256), int(index)):
            return bool(re.fullmatch("[0-9a-f]{64}", sha256)) and index >= 0
    return False


def _desc_out(desc: TensorDesc) -> _Desc:
    layout, spec = desc.layout, desc.layout.shard_spec
    shards = None if spec is None else _Shards(spec.core_grid, spec.shape, spec.orientation)
    return _Desc(
        desc.shape, layout.data_type, layout.space, layout.tile_shape, layout.memory_layout,
        shards, layout.address,
    )  # fmt: skip


def _program_out(
    name: str, agent: ProgramAgent, sha256: str | None = None, index: int | None = None
) -> _Program:
    """What a program is known by: its slots, and perhaps its file."""
    what = agent.transformation
    inputs = zip(what.input_names, what.inputs, strict=True)
    outputs = zip(what.output_names, what.outputs, strict=True)
    return _Program(
        name,
        tuple([
            _Slot(slot, _desc_out(desc), i in what.donated) for i, (slot, desc) in enumerate(inputs)
        ]),
        tuple([_Input(slot, _desc_out(desc)) for slot, desc in outputs]), sha256, index,
    )  # fmt: skip


def _function_out(name: str, function: HostFunction) -> _Function:
    """What a host function is known by: what it does with its parameters, and what it gives."""
    return _Function(
        name, tuple([_Parameter(one.name, one.permission) for one in function.parameters]),
        tuple(map(_desc_out, function.returns)), function.writes, function.updates,
    )  # fmt: skip


def _task_out(row: TaskRow, names: AgentNames, where: str) -> _Task:
    agent = row.agent
    form = _Task(row.inputs, row.outputs)
    if isinstance(agent, ProgramAgent):
        return form._replace(program=names.name_of(agent))
    if isinstance(agent, CopyAgent):
        return form._replace(copy=_desc_out(agent.desc))
    if isinstance(agent, MergedAgent):
        members = [
            _task_out(member, names, f"{where}, member {i} ({member.agent.name})")
            for i, member in enumerate(agent.members)
        ]
        return form._replace(merged=tuple(members), kept=agent.kept)
    return form._replace(
        function=names.name_of(agent),
        arguments=tuple([argument_out(value, where) for value in agent.arguments]),
        named={name: argument_out(value, where) for name, value in agent.named},
    )


#: Programs by name, and those of a file, in order, by its SHA-256.
Programs: TypeAlias = Mapping[str, ProgramSource | Sequence[ProgramSource]]
Functions: TypeAlias = "Mapping[str, HostFunction | Callable[..., Any]]"
_KINDS = ("program", "function", "copy", "merged")


def table_from_json(text: str | bytes, programs: Programs, functions: Functions) -> TaskTable:
    """The table that a text describes; raises `FormatError`."""
    data = read_json(text, "task graph")
    check_format(data, "task graph", format=FORMAT, version=VERSION)
    form = from_plain(_Graph, data, "graph")
    read = _Reader(form, programs, functions)
    descs = [_desc_in(one.desc, f"graph.inputs[{i}].desc") for i, one in enumerate(form.inputs)]
    rows: list[TaskRow] = []
    count = len(descs)
    for i, task in enumerate(form.tasks):
        rows.append(read.task(task, count, f"graph.tasks[{i}]"))
        count += len(rows[-1].outputs)
    named = tuple([NamedValue(one.name, i) for i, one in enumerate(form.inputs)])
    devices = tuple([task.device for task in form.tasks])
    table = TaskTable(
        form.name, named, tuple(rows), form.outputs, tuple(descs), devices if any(devices) else ()
    )
    _refuse(order_problems(table))
    for index, row in enumerate(rows):
        _refuse(agent_problems(row, table.task_name(index)))
        descs += row.agent.outputs([descs[number] for number in row.inputs])
    table = replace(table, descs=tuple(descs))
    _refuse(problems_of(table))
    return table


def _refuse(problems: Iterable[Problem]) -> None:
    """Raise `FormatError` that lists some problems in short, if there are any."""
    listed = tuple([
        Problem(p.kind, p.where[:MAX_CHARACTERS], p.detail[:MAX_CHARACTERS])
        for p in islice(problems, MAX_PROBLEMS)
    ])  # fmt: skip
    if listed:
        raise FormatError("not a sound task graph", problems=listed)


def _desc_in(form: _Desc, where: str) -> TensorDesc:
    spec = form.shard_spec
    with located(where):
        return TensorDesc(form.shape, Layout(
            form.data_type, form.space, form.tile_shape, form.memory_layout,
            None if spec is None else ShardSpec(*spec), form.address,
        ))  # fmt: skip


class _Reader:
    """Programs and functions that a text names and the caller gives, and its tasks."""

    def __init__(self, form: _Graph, programs: Programs, functions: Functions) -> None:
        self._programs: dict[str, ProgramAgent] = {}
        self._functions: dict[str, HostFunction] = {}
        for i, program in enumerate(form.programs):
            file = program.sha256, program.index
            if file != (None, None) and not _names_a_file(*file):
                raise FormatError("a file of programs has no such name",
                                  where=f"graph.programs[{i}]", expected=_FILE_NAME,
                                  got=repr(file)[:80])  # fmt: skip
            agent = program_agent(_source(program, programs))
            _compare("program", program, _program_out(program.name, agent, *file))
            self._programs[program.name] = agent
        for one in form.functions:
            found = _named("function", one.name, functions, "functions=")
            function = found if isinstance(found, HostFunction) else _function(one, found)
            _compare("function", one, _function_out(one.name, function))
            self._functions[one.name] = function

    def task(self, form: _Task, first: int, where: str) -> TaskRow:
        """A task; `first`: the number of its first output."""
        kinds = [kind for kind in _KINDS if getattr(form, kind) is not None]
        if len(kinds) != 1:
            raise FormatError(
                f"a task has one of {' or '.join(_KINDS)}", where=where, got=str(kinds)
            )
        if form.device == "":
            raise FormatError("the name of a device is empty", where=where)
        expected = tuple(range(first, first + len(form.outputs)))
        if form.outputs != expected:
            raise FormatError(
                "the outputs of a task are not numbered in order", where=where,
                expected=str(list(expected))[:80], got=str(list(form.outputs))[:80],
            )  # fmt: skip
        return TaskRow(self._agent(form, where), form.inputs, expected)

    def _agent(self, form: _Task, where: str) -> Agent:
        takes = len(form.inputs)
        if form.copy is not None:
            return CopyAgent(_desc_in(form.copy, f"{where}.copy"))
        if form.program is not None:
            return _named("program", form.program, self._programs, "the programs of the text")
        if form.merged is not None:
            rows: list[TaskRow] = []
            count = takes
            for i, member in enumerate(form.merged):
                if member.device is not None:
                    raise FormatError("a member of a merged task names a device",
                                      where=f"{where}.merged[{i}]",
                                      expected="only the merged task names one")  # fmt: skip
                rows.append(self.task(member, count, f"{where}.merged[{i}]"))
                count += len(rows[-1].outputs)
            return MergedAgent(takes, tuple(rows), form.kept or ())
        function = _named(
            "function", form.function or "", self._functions, "the functions of the text"
        )
        arguments = argument_in({"tuple": [*(form.arguments or ())]}, f"{where}.arguments")
        named = argument_in({"dict": form.named or {}}, f"{where}.named")
        with located(where):
            return placed_call(function, arguments, named, takes)


_Found = TypeVar("_Found")


def _named(kind: str, name: str, given: Mapping[str, _Found], where: str) -> _Found:
    if name not in given:
        what = f"{kind} {name[:60]!r} is not given"
        raise unknown(what, name, given, FormatError, where=where, expected=None)
    return given[name]


def _source(form: _Program, programs: Programs) -> Any:
    """Return a program by its file, if that is given, else by its name."""
    if form.sha256 is None or form.index is None or form.sha256 not in programs:
        return _named("program", form.name, programs, "programs=")
    of_file = programs[form.sha256]
    if not isinstance(of_file, Sequence):
        raise UsageError("programs= has the programs of a file as a list, in order",
                         got=f"{type(of_file).__name__} for {form.sha256}")  # fmt: skip
    if form.index >= len(of_file):
        raise FormatError(f"the file of program {form.name[:60]!r} has {len(of_file)} programs",
                          where=form.sha256, expected=f"one of index {form.index}")  # fmt: skip
    return of_file[form.index]


def _compare(kind: str, said: _Program | _Function, has: _Program | _Function) -> None:
    for key, one, other in zip(said._fields, said, has, strict=True):
        if one != other:
            raise FormatError(
                f"the {kind} that is given is another one",
                where=f"{key} of {kind} {said.name[:60]!r}",
                expected=json.dumps(to_plain(one))[:100], got=json.dumps(to_plain(other))[:100],
            )  # fmt: skip


def _function(form: _Function, function: Callable[..., Any]) -> HostFunction:
    """A host function of a plain one, as the text says what it does."""
    called, mark, number = form.name.rpartition("#")
    where = f"function {form.name[:60]!r}"
    with located(where):
        return host_function(
            function, returns=[_desc_in(desc, where) for desc in form.returns],
            reads=[one.name for one in form.parameters if one.permission is Permission.READ_ONLY],
            writes=form.writes, updates=form.updates,
            name=called if mark and number.isdigit() else form.name,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Text.


def table_text(table: TaskTable) -> str:
    """One line for each input, task and output; members of merged tasks are indented."""
    names = AgentNames(table)
    lines = [f"task graph {json.dumps(table.name)} {{"]
    for name, number in table.inputs:
        lines.append(f"  input {name}: %{number} {table.descs[number].text()}")
    for i, row in enumerate(table.tasks):
        types = ", ".join(table.descs[number].text() for number in row.outputs)
        device = table.device_of(i)
        on = "" if device is None else f" on {device}"
        lines.append(f"  {_line(row, names)}{on}{f' : {types}' if types else ''}")
        if isinstance(row.agent, MergedAgent):
            lines += [f"    {_line(member, names)}" for member in row.agent.members]
            lines.append(f"    keep {_values(row.agent.kept)}")
    lines += [f"  output {name}: %{number}" for name, number in table.outputs]
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

"""JSON to tables: whatever text comes in, a sound table or one error with all defects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from stitch.errors import FormatError, Problem, UsageError, closest
from stitch.graph import JsonObject, objects_without_duplicates, shortened
from stitch.tasks.agents import (
    Agent,
    CopyAgent,
    MergedAgent,
    ProgramAgent,
    ProgramSource,
    TaskRow,
    program_agent,
)
from stitch.tasks.graph_form.argument_form import argument_in
from stitch.tasks.graph_form.desc_form import desc_in
from stitch.tasks.graph_form.graph_writer import FORMAT, VERSION, function_out, program_out
from stitch.tasks.host_calls import placed_call
from stitch.tasks.host_functions import HostFunction, host_function
from stitch.tasks.permissions import Permission
from stitch.tasks.task_table import NamedValue, TaskTable
from stitch.tasks.validation import agent_problems, order_problems, problems_of

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
        return json.loads(text, object_pairs_hook=objects_without_duplicates)
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
                has, said = (shortened(json.dumps(data), 100) for data in (value, record.get(key)))
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

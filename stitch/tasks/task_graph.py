"""Task graphs: tasks and their values, built before anything runs.

An invalid call (missing arguments, futures of another graph) raises immediately and does not change
the graph; `validate` finds all defects of values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from stitch.argument_kinds import (
    MAPPING,
    TEXT,
    ArgumentKind,
    arranged,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.errors import Problem, TaskError, UsageError
from stitch.on_demand import late_import
from stitch.program import Layout, TensorDesc
from stitch.tasks.agents import (
    Agent,
    CopyAgent,
    ProgramAgent,
    ProgramSource,
    TaskRow,
    program_agent,
)
from stitch.tasks.future import OUTSIDE, Future, Task, TaskList
from stitch.tasks.host_calls import HostCall, host_call
from stitch.tasks.host_functions import Handle, HostFunction, Names, Returns, host_function
from stitch.tasks.task_table import NamedValue, TaskTable
from stitch.tasks.validation import MAX_PROBLEMS, check_table, problems_of, run_problems

# --------------------------------------------------------------------------------------------------
# A table of tasks that grows, as calls come in: what a task graph keeps.


class GrowingTable:
    """Tasks and values, numbered in the order in which they were added.

    >>> GrowingTable().frozen("empty").tasks
    ()
    """

    __slots__ = (
        "descs", "device", "devices", "inputs", "outputs", "producers", "sources", "tasks",
    )  # fmt: skip

    def __init__(self) -> None:
        #: By the number of a value: its descriptor, and the task that makes it.
        self.descs: list[TensorDesc] = []
        self.producers: list[int] = []
        self.tasks: list[TaskRow] = []
        #: The device of the next tasks, and of those placed so far by their numbers.
        self.device: str | None = None
        self.devices: dict[int, str] = {}
        #: The numbers of inputs, in order; inputs and outputs by name.
        self.sources: list[int] = []
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}

    @staticmethod
    def of(table: TaskTable) -> GrowingTable:
        """Return a growing copy of a table, with the same numbers."""
        grown = GrowingTable()
        grown.descs, grown.tasks = list(table.descs), list(table.tasks)
        grown.producers = [OUTSIDE] * len(table.descs)
        for index, task in enumerate(table.tasks):
            for number in task.outputs:
                grown.producers[number] = index
        grown.inputs, grown.outputs = dict(table.inputs), dict(table.outputs)
        grown.sources = list(grown.inputs.values())
        grown.devices = {task: name for task, name in enumerate(table.devices) if name is not None}
        return grown

    def add_input(self, desc: TensorDesc, name: str | None) -> int:
        """Add an input; return its number. Raises `UsageError` for a name that exists."""
        number = len(self.descs)
        self.inputs[_fresh(name, "input", self.inputs)] = number
        self.sources.append(number)
        self.descs.append(desc)
        self.producers.append(OUTSIDE)
        return number

    def add_output(self, number: int, name: str | None) -> None:
        """Add an output; raise `UsageError` for a name that exists."""
        self.outputs[_fresh(name, "output", self.outputs)] = number

    def add(self, agent: Agent, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Add a task; return the numbers of its outputs."""
        descs = self.descs
        made = agent.outputs([descs[number] for number in inputs])
        task, first = len(self.tasks), len(descs)
        if len(made) == 1:
            outputs: tuple[int, ...] = (first,)
            self.producers.append(task)
        else:
            outputs = tuple(range(first, first + len(made)))
            self.producers.extend([task] * len(made))
        descs.extend(made)
        self.tasks.append(TaskRow(agent, inputs, outputs))
        if self.device is not None:
            self.devices[task] = self.device
        return outputs

    def origin_of(self, number: int) -> tuple[int, int]:
        """Return the task of a value (`OUTSIDE` for an input), and its output index."""
        task = self.producers[number]
        if task == OUTSIDE:
            return OUTSIDE, bisect_left(self.sources, number)
        return task, number - self.tasks[task].outputs[0]

    def frozen(self, name: str) -> TaskTable:
        """Return a frozen copy, with the inputs first."""
        inputs = len(self.sources)
        if not inputs or self.sources[-1] == inputs - 1:
            numbers: Sequence[int] = range(len(self.descs))
            tasks, descs = tuple(self.tasks), tuple(self.descs)
        else:  # Inputs were added between tasks.
            order = [*self.sources, *(n for task in self.tasks for n in task.outputs)]
            numbers = renumbered = [0] * len(order)
            for new, old in enumerate(order):
                renumbered[old] = new
            at = renumbered.__getitem__
            tasks = tuple([
                TaskRow(agent, tuple(map(at, read)), tuple(map(at, made)))
                for agent, read, made in self.tasks
            ])  # fmt: skip
            descs = tuple([self.descs[old] for old in order])
        return TaskTable(
            name,
            tuple([NamedValue(word, numbers[n]) for word, n in self.inputs.items()]),
            tasks,
            tuple([NamedValue(word, numbers[n]) for word, n in self.outputs.items()]),
            descs,
            tuple(map(self.devices.get, range(len(tasks)))) if self.devices else (),
        )


def _fresh(name: str | None, side: str, taken: dict[str, int]) -> str:
    chosen = f"{side}{len(taken)}" if name is None else name
    if not chosen or chosen in taken:
        why = f"another {side} has it" if chosen else "it is empty"
        raise UsageError(f"no {side} can have the name {chosen!r}: {why}",
                         expected="a name of its own")  # fmt: skip
    return chosen


_DESC = instance_of("a TensorDesc", TensorDesc)
_LAYOUT = instance_of("a Layout", Layout)
_DEVICE = ArgumentKind("the name of a device", lambda value: TEXT.accepts(value) and value != "")


def _is_future(value: object) -> bool:
    if type(value) is Future:
        return True
    if isinstance(value, np.ndarray) and value.ndim:
        raise UsageError(
            "an array is no plain argument of a task: it could change before the task runs",
            got=f"{value.dtype} of shape {value.shape}",
            remedy="give it as an input: graph.input(desc)",
        )
    if isinstance(value, Handle):
        raise UsageError(
            "a tensor of a device is no plain argument of a task of a graph",
            got=" ".join(repr(value).split())[:60],
            remedy="give it as an input: graph.input(desc), and the tensor at each run",
        )
    return False


class TaskGraph:
    """Tasks in the order in which they were added; a future refers to an earlier task.

    >>> from stitch.program import DataType, host_layout
    >>> desc = TensorDesc((2,), host_layout(DataType.FLOAT32))
    >>> graph = TaskGraph("doubling")
    >>> x = graph.input(desc, "x")
    >>> graph.output(graph.host(lambda x: x + x, x, returns=desc), "y")
    >>> len(graph)
    1
    """

    __slots__ = ("__weakref__", "_agents", "_calls", "_functions", "_grown", "name")

    @takes(name=TEXT)
    def __init__(self, name: str = "") -> None:
        self.name = name
        self._grown = GrowingTable()
        #: What was made for programs and functions that were called before.
        self._agents: dict[int, ProgramAgent] = {}
        self._functions: dict[Any, HostFunction] = {}
        self._calls: dict[tuple[HostFunction, int], HostCall] = {}

    def __len__(self) -> int:
        return len(self._grown.tasks)

    @staticmethod
    def of(table: TaskTable) -> TaskGraph:
        """Return the graph of a table, with the same numbers of values."""
        graph = TaskGraph(table.name)
        graph._grown = GrowingTable.of(table)
        return graph

    # -- adding ------------------------------------------------------------------------------------

    @takes(desc=_DESC, name=optional(TEXT))
    def input(self, desc: TensorDesc, name: str | None = None) -> Future:
        """Add an input, an argument of each run (default names: `input0`, `input1`, ...).

        Raises `UsageError` for a name that exists.
        """
        return Future(self, self._grown.add_input(desc, name))

    def call(self, program: ProgramSource | HostFunction, /, *arguments: Any, **named: Any) -> Any:
        """One run of a program, or of a host function (see `host`); one future, or a tuple where it
        has several outputs.

        Inputs that the program is given for good (`donate`) are gone afterwards. Raises
        `UsageError` for missing or surplus inputs.
        """
        if isinstance(program, HostFunction):
            return self.host(program, *arguments, **named)
        agent = self._agents.get(id(program))
        if agent is None:
            agent = program_agent(program)
            self._agents[id(program)] = agent
        given: Sequence[object] = arguments
        if named or len(arguments) != len(agent.program.inputs):
            types = [
                (slot.name, agent.program.values[slot.value].type.text())
                for slot in agent.program.inputs
            ]
            given = arranged(f"program {agent.name!r}", types, arguments, named)
        return self._add(agent, self._numbers(given, agent))

    def host(
        self,
        function: HostFunction | Callable[..., Any],
        /,
        *arguments: Any,
        returns: Returns = None,
        reads: Names = None,
        writes: Names = None,
        updates: Names = None,
        **named: Any,
    ) -> Any:
        """One call of a Python function: futures become arrays, other arguments (but no arrays)
        stay as they are.

        `returns`, `reads`, `writes` and `updates` are as for `stitch.task`; a host function has
        said them already. Gives one future, or a tuple of as many as there are results. Raises
        `UsageError` for arguments that the function does not take.
        """
        if type(function) is HostFunction:
            if not (returns is None and reads is None and writes is None and updates is None):
                raise UsageError(
                    f"task {function.name!r} has said already what it returns, reads and writes"
                )
        else:
            function = self._function(function, returns, reads, writes, updates)
        # Calls by position with futures only have one agent, whatever the futures are.
        known = None if named else self._calls.get((function, len(arguments)))
        if known is not None and all(map(_is_future, arguments)):
            return self._add(known, self._numbers(arguments, known))
        call, values = host_call(function, arguments, named, _is_future)
        numbers = self._numbers(values, call)
        if len(values) == len(arguments) and not (named or function.writes or function.updates):
            self._calls[function, len(arguments)] = call
        return self._add(call, numbers)

    @takes(layout=either(_LAYOUT, _DESC))
    def copy(self, future: Future, layout: Layout | TensorDesc) -> Future:
        """Add a copy into another layout; raise `UsageError` for another shape."""
        number = self._number(future, "what is copied")
        shape = self._grown.descs[number].shape
        desc = TensorDesc(shape, layout) if isinstance(layout, Layout) else layout
        if desc.shape != shape:
            raise UsageError("a copy has the same shape", expected=str(shape), got=str(desc.shape))
        (made,) = self._grown.add(CopyAgent(desc), (number,))
        return Future(self, made)

    @contextmanager
    @takes(device=_DEVICE)
    def on(self, device: str) -> Iterator[None]:
        """Place the tasks that are added in a `with` block on a device, named as in a machine
        specification; of nested blocks the innermost decides."""
        before, self._grown.device = self._grown.device, device
        try:
            yield
        finally:
            self._grown.device = before

    @takes(name=optional(TEXT))
    def output(self, future: Future, name: str | None = None) -> None:
        """Add an output of each run (default names: `output0`, `output1`, ...)."""
        number = self._number(future, "an output")
        self._grown.add_output(number, name)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def tasks(self) -> Sequence[Task]:
        """Return the tasks in the order in which they were added, created on access."""
        return TaskList(self, self._grown.tasks)

    @property
    def rows(self) -> Sequence[TaskRow]:
        """Return the tasks as rows of value numbers."""
        return tuple(self._grown.tasks)

    @property
    def inputs(self) -> dict[str, Future]:
        """Return the inputs by name."""
        return {name: Future(self, number) for name, number in self._grown.inputs.items()}

    @property
    def outputs(self) -> dict[str, Future]:
        """Return the outputs by name."""
        return {name: Future(self, number) for name, number in self._grown.outputs.items()}

    def producer(self, future: Future) -> Task | None:
        """Return the task of a value in constant time; None for an input of the graph."""
        task, _ = self._grown.origin_of(self._number(future, "what a task makes"))
        return None if task == OUTSIDE else self.tasks[task]

    def validate(self) -> tuple[Problem, ...]:
        """Return all defects of the graph that no device accepts."""
        table = self._table()
        return problems_of(table) or tuple(islice(run_problems(table), MAX_PROBLEMS))

    def table(self) -> TaskTable:
        """Return the frozen graph for execution; raise `TaskError` that lists all defects."""
        return check_table(self._table())

    # -- as text, written by `task_graph_json`
    # ----------------------------------------------------------

    @property
    def programs(self) -> dict[str, ProgramSource]:
        """What it calls, by the names of its text: a second program of one name is `name#2`."""
        with late_import():
            from stitch.tasks.task_graph_json import AgentNames

        return {name: agent.source for name, agent in AgentNames(self._table()).programs.items()}

    @property
    def functions(self) -> dict[str, HostFunction]:
        """Its host functions by the names of its text."""
        with late_import():
            from stitch.tasks.task_graph_json import AgentNames

        return AgentNames(self._table()).functions

    def as_json(self, *, files: Mapping[str, tuple[str, int]] | None = None) -> str:
        """The graph as JSON for `TaskGraph.from_json` (form: `stitch.tasks.task_graph_json`).

        Programs and functions are named, not held. `files`: of programs by their names in
        `graph.programs`, the SHA-256 of the bytes of the file (hexadecimal) and the index of the
        program there; the text has them too. Raises `UsageError` for arguments of host functions
        that JSON cannot hold, and for such files of no program.
        """
        with late_import():
            from stitch.tasks.task_graph_json import table_as_json

        return table_as_json(self._table(), files)

    @staticmethod
    @takes(text=instance_of("a text", str, bytes), programs=optional(MAPPING),
           functions=optional(MAPPING))  # fmt: skip
    def from_json(
        text: str | bytes,
        *,
        programs: Mapping[str, ProgramSource | Sequence[ProgramSource]] | None = None,
        functions: Mapping[str, HostFunction | Callable[..., Any]] | None = None,
    ) -> TaskGraph:
        """The graph that `as_json` wrote: equal to it, given the same programs and functions.

        `programs` and `functions` are by the names of the text, as in `graph.programs`; where the
        text names the file of a program, the programs of the file, in order, may be there by its
        SHA-256. Of a plain Python function the text says what it does with its parameters. Raises
        `FormatError` with the first defect, `UsageError` for what is no program or function.
        """
        with late_import():
            from stitch.tasks.task_graph_json import table_from_json

        return TaskGraph.of(table_from_json(text, programs or {}, functions or {}))

    def text(self) -> str:
        """Return the graph as text: one line for each input, task and output."""
        with late_import():
            from stitch.tasks.task_graph_json import table_text

        return table_text(self._table())

    # -- inside ------------------------------------------------------------------------------------

    def _table(self) -> TaskTable:
        return self._grown.frozen(self.name)

    def _add(self, agent: Agent, inputs: tuple[int, ...]) -> Future | tuple[Future, ...]:
        made = self._grown.add(agent, inputs)
        if len(made) == 1:
            return Future(self, made[0])
        return tuple([Future(self, number) for number in made])

    def _numbers(self, values: Sequence[object], agent: Agent) -> tuple[int, ...]:
        numbers = []
        for i, value in enumerate(values):
            if type(value) is Future and value.graph is self:
                numbers.append(value.number)
            else:
                numbers.append(self._number(value, f"{agent.input_name(i)!r} of {agent.name!r}"))
        return tuple(numbers)

    def _number(self, value: object, what: str) -> int:
        if type(value) is not Future:
            raise UsageError(
                f"a task graph takes futures of its own as {what}",
                got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
                remedy="give it as an input: graph.input(desc)",
            )
        if value.graph is not self:
            raise TaskError(
                f"a future of another task graph was given as {what}",
                expected=f"futures of {self!r}",
                got=repr(value),
                remedy="make it an output there and an input here",
            )
        return value.number

    def _function(
        self, function: Callable[..., Any], returns: Returns, reads: Names, writes: Names,
        updates: Names,
    ) -> HostFunction:  # fmt: skip
        """The host function of a Python function, the same for the same words."""
        words = [tuple(w) if isinstance(w, list) else w for w in (returns, reads, writes, updates)]
        key = (function, *words)
        try:
            known = self._functions.get(key)
        except TypeError:  # It cannot be looked up, so it is made for each call.
            return host_function(
                function, returns=returns, reads=reads, writes=writes, updates=updates
            )
        if known is None:
            known = self._functions[key] = host_function(
                function, returns=returns, reads=reads, writes=writes, updates=updates
            )
        return known

    # -- what futures ask --------------------------------------------------------------------------

    def desc_of(self, number: int) -> TensorDesc:
        """The descriptor of a value."""
        return self._grown.descs[number]

    def origin_of(self, number: int) -> tuple[int, int]:
        """Return the task of a value (`OUTSIDE` for an input), and its output index."""
        return self._grown.origin_of(number)

    def device_of(self, task: int) -> str | None:
        """Return the device that a task is placed on, None for an unplaced task."""
        return self._grown.devices.get(task)

    def __eq__(self, other: object) -> bool:
        """Whether both freeze to one table: the same tasks of equal programs and functions."""
        if not isinstance(other, TaskGraph):
            return NotImplemented
        return self is other or self._table() == other._table()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return (
            f"<TaskGraph{name}: {len(self._grown.inputs)} inputs, {len(self)} tasks, "
            f"{len(self._grown.outputs)} outputs>"
        )


def tasks_without(
    table: TaskTable, missing: frozenset[int]
) -> tuple[TaskGraph, tuple[int, ...], tuple[int, ...]]:
    """Return the graph of the tasks that do not depend on the missing inputs.

    Args:
        table: A graph without merged tasks.
        missing: Positions of the inputs that do not exist.

    Returns:
        The graph, the positions of its inputs in the whole, and those of its outputs.
    """
    gone = {table.inputs[position].value for position in missing}
    kept: list[TaskRow] = []
    for row in table.tasks:
        if gone.isdisjoint(row.inputs):
            kept.append(row)
        else:
            gone.update(row.outputs)
    read = {number for row in kept for number in row.inputs}
    rest, numbers = GrowingTable(), dict[int, int]()
    inputs, outputs = [], []
    for position, (name, number) in enumerate(table.inputs):
        if number in read:
            numbers[number] = rest.add_input(table.descs[number], name)
            inputs.append(position)
    for row in kept:
        made = rest.add(row.agent, tuple([numbers[number] for number in row.inputs]))
        numbers.update(zip(row.outputs, made, strict=True))
    for position, (name, number) in enumerate(table.outputs):
        if number in numbers:
            rest.add_output(numbers[number], name)
            outputs.append(position)
    return TaskGraph.of(rest.frozen(table.name)), tuple(inputs), tuple(outputs)

"""The task graphs of a pipeline file, and the order in which a driver runs them.

Steps without a repeat between them are tasks of one graph, and so are the rounds of short repeats.
A longer repeat is a graph of several rounds that runs in a loop. Values that pass from run to run
have unique names. Small programs stack collected results in groups of `MAX_JOINED`, so that none
has an input for every round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from stitch.compiler import compile_graph
from stitch.documents.pipeline_form import (
    PipelineFile,
    PipelineStep,
    Reference,
    RepeatStep,
    RunStep,
    defines,
)
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine
from stitch.program import DataType, FreeNames, InputKind, InputSlot, OutputSlot, Program
from stitch.tasks import Future, ProgramAgent, ProgramSource, TaskGraph, program_agent

#: Tasks of the rounds of one graph, unless one round has more. A repeat of fewer than twice as many
#: tasks runs in the graph around it.
MAX_TASKS = 64
#: Tensors that one program joins.
MAX_JOINED = 64


@dataclass(slots=True, eq=False)
class GraphRun:
    """A run of a task graph.

    Args:
        graph: The graph.
        inputs: The value of each input of the graph.
        outputs: The names of its results.
        drops: The values that nothing reads afterwards.
        consumed: Those of them, all results, that the graph reads.
    """

    graph: TaskGraph
    inputs: list[Reference] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    drops: Set[str] = frozenset()
    consumed: Set[str] = frozenset()


@dataclass(slots=True, eq=False)
class Assign:
    """Names given to other values, all at once: values by name.

    `drops`: as of a run. `moved`: the values that have no other name afterwards.
    """

    values: dict[str, str]
    drops: Set[str] = frozenset()
    moved: Set[str] = frozenset()


@dataclass(slots=True, eq=False)
class Loop:
    """Runs that repeat.

    Args:
        times: How often.
        index: The variable of the repeat, which grows from `start` by `step`; in a loop of the same
            variable, from its value there.
        body: What runs each time.
        collected: A value of the body, and its name after each turn.
        drops: The values that nothing reads afterwards.
    """

    times: int
    index: str
    start: int
    step: int
    body: Sequence[PipelineRun]
    collected: Sequence[tuple[str, Sequence[str]]]
    drops: Set[str] = frozenset()


PipelineRun: TypeAlias = GraphRun | Assign | Loop


def _names(run: PipelineRun) -> tuple[Set[str], Set[str]]:
    """Return the names that a run reads, and those that have other values afterwards."""
    if isinstance(run, GraphRun):
        return {reference.name for reference in run.inputs}, set(run.outputs)
    if isinstance(run, Assign):
        return set(run.values.values()), run.values.keys()
    reads, makes = set[str](), set[str]()
    for each in run.body:
        read, made = _names(each)
        reads, makes = reads | (read - makes), makes | made
    return reads, {name for _, names in run.collected for name in names}


def graph_runs(runs: Iterable[PipelineRun], times: int = 1) -> Iterator[tuple[GraphRun, int]]:
    """Yield the runs of graphs, and how often each runs."""
    for run in runs:
        if isinstance(run, GraphRun):
            yield run, times
        elif isinstance(run, Loop):
            yield from graph_runs(run.body, times * run.times)


def graphs_of(
    file: PipelineFile, programs: Mapping[str, ProgramSource], machine: Machine,
    places: Mapping[str, str] | None = None,
) -> tuple[Sequence[PipelineRun], tuple[str, ...]]:  # fmt: skip
    """Return the runs of one pass over a checked pipeline, and the names of its outputs.

    Args:
        file: The file, without defects.
        programs: The program of each module; a loaded one for a device.
        machine: The machine that programs that join results are compiled for.
        places: The names of the devices of modules, for graphs of several devices.
    """
    builder = _Builder([entry.name for entry in file.inputs], programs, machine, places or {})
    builder.add(file.steps)
    outputs = tuple([builder.name_of(word) for _, word, _ in file.outputs])
    _set_drops(builder.runs, set(outputs), {entry.name for entry in file.inputs})
    return builder.runs, outputs


def _set_drops(runs: Sequence[PipelineRun], live: Set[str], inputs: Set[str]) -> None:
    """Set what each run drops: what it reads or makes and is not `live` afterwards."""
    for run in reversed(runs):
        reads, makes = _names(run)
        collected: Set[str] = set()
        if isinstance(run, Loop):
            collected = {source for source, _ in run.collected}
            _set_drops(run.body, live | reads | collected, inputs)
        run.drops = (reads | makes | collected) - live
        live = (live - makes) | reads
        if isinstance(run, GraphRun):
            run.consumed = {r.name for r in run.inputs if not r.is_element} & run.drops - inputs
        elif isinstance(run, Assign):
            times = Counter(run.values.values())
            run.moved = {value for value in run.drops | makes if times[value] == 1}


#: A value: a result of a task, or the name of a value outside of the graph.
_Value: TypeAlias = Future | str
#: A collected value, and how many results are stacked in it (0: it is a single one).
_Piece: TypeAlias = tuple[_Value, int]
#: What a loop runs, and for each collected name the value of one turn.
_Body: TypeAlias = tuple[list[PipelineRun], list[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class _Round:
    """A round of a repeat.

    Args:
        tasks: Its tasks if it can be a part of one graph, else 0.
        carries: The values from before the repeat that it or a repeat inside changes.
        makes: The values that it makes.
        divides: The values that it reads elements of.
    """

    tasks: int
    carries: tuple[str, ...]
    makes: Set[str]
    divides: Set[str]

    @property
    def unrolled(self) -> int:
        """Return the number of rounds of one graph."""
        return max(1, MAX_TASKS // self.tasks) if self.tasks else 1


class _Builder:
    def __init__(
        self, inputs: Sequence[str], programs: Mapping[str, ProgramSource], machine: Machine,
        places: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._programs, self._machine, self._places = programs, machine, places
        self._agents = {name: program_agent(source) for name, source in programs.items()}
        #: Whether a collected value may be overwritten, so that a copy of it is collected.
        self._is_overwriting = any(agent.consumes for agent in self._agents.values())
        self._file_inputs, self._free = frozenset(inputs), FreeNames(inputs)
        #: The value of each name of the file.
        self._values: dict[str, _Value] = {name: name for name in inputs}
        #: The variables of repeats: their values, in a loop those added to the loop's.
        self._at: dict[str, int] = {}
        self._loops: set[str] = set()
        self.runs: list[PipelineRun] = []
        self._runs: dict[int, GraphRun] = {}
        #: The names of results outside of their graphs, and the type of each.
        self._named: dict[Future, str] = {}
        self._types: dict[str, tuple[tuple[int, ...], DataType]] = {}
        self._rounds: dict[int, _Round] = {}
        self._joins: dict[tuple[object, ...], Program] = {}
        self._close()

    # -- graphs and their values -------------------------------------------------------------------

    def _close(self) -> None:
        """Let the next task begin a graph."""
        self._open: GraphRun | None = None
        self._inputs: dict[tuple[Reference, DataType], Future] = {}
        self._names = FreeNames()
        #: The results of programs of parameters, which run once for the same arguments.
        self._evaluated: dict[tuple[object, ...], tuple[Future, ...]] = {}

    def _graph(self) -> TaskGraph:
        """Return the graph that takes tasks now."""
        if self._open is None:
            self._open = GraphRun(TaskGraph("pipeline"))
            self._runs[id(self._open.graph)] = self._open
            self.runs.append(self._open)
        return self._open.graph

    def _inside(self, value: _Value) -> Future | None:
        """Return a value if a task of the graph that takes tasks now makes it."""
        return value if isinstance(value, Future) and value.graph is self._graph() else None

    def name_of(self, name: str) -> str:
        """Return the name of a value outside of the graphs."""
        return self._outside(self._values[name], name)

    def _outside(self, value: _Value, name: str) -> str:
        if isinstance(value, str):
            return value
        if value not in self._named:
            run, outside = self._runs[id(value.graph)], self._free.free(name)
            run.graph.output(value, outside)
            run.outputs.append(outside)
            self._named[value] = outside
            self._types[outside] = _type_of(value)
        return self._named[value]

    def _reference(self, reference: Reference) -> Reference:
        """Return a reference with the value's name outside, counted from the loop's variable."""
        name, index = self.name_of(reference.name), reference.index
        if index is None:
            return replace(reference, name=name)
        offset = reference.offset + self._at[index] * (-1 if reference.is_backward else 1)
        if index not in self._loops:
            return Reference(name, True, None, offset)
        return replace(reference, name=name, offset=offset)

    def _input(self, outside: Reference, agent: ProgramAgent, position: int) -> Future:
        """Return an input of the graph for an input of a program."""
        graph, desc = self._graph(), agent.program.input_desc(position)
        assert self._open is not None, "it takes the task"
        key = outside, agent.program.values[agent.program.inputs[position].value].type.data_type
        is_file_input = outside.name in self._file_inputs
        # A program that overwrites its input needs a tensor of its own.
        is_own = position in agent.consumes and (outside.is_element or is_file_input)
        if not is_own and key in self._inputs:
            return self._inputs[key]
        future = graph.input(desc, self._names.free(outside.text()))
        self._open.inputs.append(outside)
        if not is_own:
            self._inputs[key] = future
        # An element of a tensor shares its bytes.
        return graph.copy(future, desc) if is_own and not is_file_input else future

    # -- steps -------------------------------------------------------------------------------------

    def add(self, steps: Iterable[PipelineStep]) -> None:
        """Add steps."""
        for step in steps:
            if isinstance(step, RunStep):
                self._run(step)
            else:
                self._repeat(step)

    def _run(self, step: RunStep) -> None:
        agent = self._agents[step.module]
        slots = agent.program.inputs
        # Elements are read between runs.
        if any(r.is_element and self._inside(self._values[r.name]) for _, r in step.inputs):
            self._close()
        graph, arguments = self._graph(), {}
        for at, (_, reference) in zip(_indices(step.inputs, slots), step.inputs, strict=True):
            value = self._inside(self._values[reference.name])
            arguments[at] = value or self._input(self._reference(reference), agent, at)
        given = [arguments[at] for at in range(len(slots))]
        is_evaluated = bool(slots) and all(slot.kind is InputKind.PARAMETER for slot in slots)
        results = self._evaluated.get((step.module, *given)) if is_evaluated else None
        if results is None:
            place = self._places.get(step.module)
            with nullcontext() if place is None else graph.on(place):
                called = graph.call(self._programs[step.module], *given)
            results = called if isinstance(called, tuple) else (called,)
            if is_evaluated:
                self._evaluated[step.module, *given] = results
        outputs = _indices(step.outputs, agent.program.outputs)
        for at, (_, name) in zip(outputs, step.outputs, strict=True):
            self._values[name] = results[at]

    def _repeat(self, step: RepeatStep) -> None:
        pieces: list[list[_Piece]] = [[] for _ in step.collect]
        first, count = 0, self._round(step).unrolled
        left = step.times % count if step.times >= 2 * count else step.times
        if left < step.times:
            # A round of a loop reads what the round before it left under these names.
            carried = {name: self._free.free(name) for name in self._round(step).carries}
            self._assign({outside: self.name_of(name) for name, outside in carried.items()})
            self._values.update(carried)
            self._loops.add(step.index)
            body = self._body(step, carried, partial(self._add_rounds, step, 0, count))
            while first + left < step.times:
                turns = (step.times - first) // count
                # Loops of loops join what they collect.
                is_longer = bool(step.collect) and turns >= 2 * MAX_JOINED
                turns = turns % MAX_JOINED if is_longer else turns
                if turns:
                    self._add_loop(step, first, count, turns, body, pieces)
                    first += turns * count
                if is_longer:
                    add = partial(self._add_loop, step, 0, count, MAX_JOINED, body)
                    body, count = self._body(step, carried, add), MAX_JOINED * count
            self._loops.remove(step.index)
        self._add_rounds(step, first, left, pieces)
        for (name, _), each in zip(step.collect, pieces, strict=True):
            self._values[name], _ = self._whole(each)

    def _add_rounds(
        self, step: RepeatStep, first: int, times: int, pieces: Sequence[list[_Piece]]
    ) -> None:
        """Add rounds one by one, and what they collect to `pieces`."""
        for number in range(first, first + times):
            self._at[step.index] = number
            self.add(step.steps)
            for (_, source), each in zip(step.collect, pieces, strict=True):
                piece = self._values[source], 0
                each.append(self._joined([piece]) if self._is_overwriting else piece)
            self._values.update([(name, self._values[after]) for name, after in step.carry])

    def _add_loop(
        self, step: RepeatStep, first: int, count: int, turns: int, body: _Body,
        pieces: Sequence[list[_Piece]],
    ) -> None:  # fmt: skip
        """Add a loop of bodies of `count` rounds."""
        runs, results = body
        collected = []
        for (source, stacked), each in zip(results, pieces, strict=True):
            names = [self._free.free(source) for _ in range(turns)]
            self._types |= dict.fromkeys(names, self._types[source])
            each += [(name, stacked) for name in names]
            collected.append((source, names))
        self.runs.append(Loop(turns, step.index, first, count, runs, collected))
        self._close()

    def _body(
        self, step: RepeatStep, carried: Mapping[str, str],
        add: Callable[[list[list[_Piece]]], None],
    ) -> _Body:  # fmt: skip
        """Return what `add` adds as the body of a loop."""
        before, self.runs = self.runs, []
        self._close()
        pieces: list[list[_Piece]] = [[] for _ in step.collect]
        add(pieces)
        made = []
        for (_, source), each in zip(step.collect, pieces, strict=True):
            value, stacked = each[0] if len(each) == 1 else self._whole(each)
            made.append((self._outside(value, source), stacked))
        self._assign({outside: self.name_of(name) for name, outside in carried.items()})
        self._values.update(carried)
        runs, self.runs = self.runs, before
        return runs, made

    def _assign(self, values: dict[str, str]) -> None:
        values = {name: value for name, value in values.items() if name != value}
        if values:
            self._types |= {n: self._types[v] for n, v in values.items() if v in self._types}
            self.runs.append(Assign(values))
        self._close()

    def _round(self, step: RepeatStep) -> _Round:
        """Return what a round of a repeat has."""
        if id(step) in self._rounds:
            return self._rounds[id(step)]
        tasks, is_whole = len(step.collect) * self._is_overwriting, True
        carries = [name for name, _ in step.carry]
        makes: set[str] = set()
        divides: set[str] = set()
        for each in step.steps:
            makes |= defines(each)
            if isinstance(each, RunStep):
                tasks += 1
                divides |= {r.name for _, r in each.inputs if r.is_element}
                continue
            inner = self._round(each)
            carries += [name for name in inner.carries if name not in makes]
            makes, divides = makes | inner.makes, divides | inner.divides
            is_whole = is_whole and inner.tasks > 0 and each.times < 2 * inner.unrolled
            tasks += each.times * inner.tasks + len(each.collect) * (1 + each.times // MAX_JOINED)
        makes |= {*carries}
        tasks = tasks if is_whole and makes.isdisjoint(divides) else 0
        self._rounds[id(step)] = _Round(tasks, tuple(dict.fromkeys(carries)), makes, divides)
        return self._rounds[id(step)]

    # -- collected results -------------------------------------------------------------------------

    def _whole(self, pieces: Sequence[_Piece]) -> _Piece:
        """Stack all results; there is at least one."""
        while len(pieces) > 1 or not pieces[0][1]:
            pieces = [self._joined(pieces[:MAX_JOINED]), *pieces[MAX_JOINED:]]
        return pieces[0]

    def _joined(self, pieces: Sequence[_Piece]) -> _Piece:
        """Stack at most `MAX_JOINED` pieces by one program, in their storage type: the bits stay
        the same."""
        counts = tuple([stacked for _, stacked in pieces])
        value = pieces[0][0]
        shape, kind = self._types[value] if isinstance(value, str) else _type_of(value)
        key = shape[1:] if counts[0] else shape, kind, counts
        if key not in self._joins:
            builder = ComputationGraphBuilder("collect")
            parts = []
            for number, count in enumerate(counts):
                own = (count, *key[0]) if count else key[0]
                piece = builder.input(f"piece{number}", own, kind)
                parts.append(piece if count else builder.unsqueeze(piece, 0))
            builder.output("all", builder.concat(parts, 0))
            self._joins[key] = compile_graph(builder.build(), self._machine).program
        program = self._joins[key]
        agent, arguments = program_agent(program), []
        for at, (value, _) in enumerate(pieces):
            inside = self._inside(value)
            if inside is None:
                inside = self._input(Reference(self._outside(value, "piece")), agent, at)
            arguments.append(inside)
        return self._graph().call(program, *arguments), sum(max(1, count) for count in counts)


def _indices(
    bindings: Sequence[tuple[str | None, object]], slots: Sequence[InputSlot | OutputSlot]
) -> tuple[int, ...]:
    by_name = {slot.name: at for at, slot in enumerate(slots)}
    return tuple(
        at if slot is None else by_name[slot] if slot in by_name else int(slot)
        for at, (slot, _) in enumerate(bindings)
    )


def _type_of(value: Future) -> tuple[tuple[int, ...], DataType]:
    return value.desc.shape, value.desc.layout.data_type.in_arrays

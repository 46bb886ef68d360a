"""The schedule of a pipeline file: its steps with slots by index, and the values each step frees.

Several rounds of a `repeat` run as one prepared graph, so that a long loop takes few calls. Only
the next round uses a carried value, and may overwrite it. Small programs, compiled on first use,
stack collected results in groups of `MAX_JOINED`, so that none has an input for every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from stitch.compiler import compile_graph
from stitch.documents.pipeline_form import (
    PipelineStep,
    Reference,
    RepeatStep,
    RunStep,
    at_end,
    defines,
    runs_of,
    uses_of,
)
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array, InputSlot, OutputSlot, Program, TensorDesc, ValueType, host_layout
from stitch.report import Device
from stitch.runtime import LoadedProgram, PreparedGraph, Tensor
from stitch.tasks import Future, TaskGraph
from stitch.ttb import Binary

# Values.


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """The type of a value; of a result also its descriptor and its producer (`module.slot`)."""

    type: ValueType
    desc: TensorDesc | None = None
    made_by: str = ""


def collected_desc(desc: TensorDesc, times: int) -> TensorDesc:
    """Return the descriptor of `times` stacked tensors in their storage type; the space is open.

    >>> from stitch.program import DataType
    >>> collected_desc(TensorDesc((2,), host_layout(DataType.FLOAT32)), 3).text()
    '3x2xf32:host:row_major:interleaved'
    """
    return TensorDesc((times, *desc.shape), host_layout(desc.layout.data_type.in_arrays))


def all_rounds(value: CheckedValue, times: int, made_by: str) -> CheckedValue:
    """Return the value of a result collected over `times` rounds."""
    kind = ValueType((times, *value.type.shape), value.type.data_type)
    assert value.desc is not None, "it is a result"
    return CheckedValue(kind, collected_desc(value.desc, times), made_by)


# Collected results.

#: Tensors that one program joins.
MAX_JOINED = 64

T = TypeVar("T", Tensor, Future)
#: Joins pieces with counts of stacked tensors (0: one tensor without the new axis).
Join: TypeAlias = Callable[[Sequence[T], Sequence[int], TensorDesc], T]


class Joins:
    """The programs of a device that stack tensors, one for each combination of shapes.

    `is_copying`: copy each tensor when it is added, because a later step may overwrite it.
    """

    def __init__(self, device: Device, *, is_copying: bool) -> None:
        self._device, self.is_copying = device, is_copying
        self._programs: dict[tuple[TensorDesc, tuple[int, ...]], LoadedProgram] = {}

    def tensors(self) -> Collected[Tensor]:
        """Return a collector of tensors, by queued runs."""
        return Collected(self._queued, is_copying=self.is_copying)

    def futures(self, graph: TaskGraph) -> Collected[Future]:
        """Return a collector of values of a task graph, by its tasks."""
        return Collected(partial(self._added, graph), is_copying=self.is_copying)

    def max_tasks(self, rounds: int) -> int:
        """Return an upper bound of the runs that join the results of `rounds` rounds."""
        copies = rounds if self.is_copying else 0
        return copies + rounds // (MAX_JOINED - 1) + 1

    def _queued(self, pieces: Sequence[Tensor], counts: Sequence[int], desc: TensorDesc) -> Tensor:
        joined = self._device.submit(self._program(desc, counts), pieces, True)
        assert isinstance(joined, Tensor), "it has one output"
        return joined

    def _added(
        self, graph: TaskGraph, pieces: Sequence[Future], counts: Sequence[int], desc: TensorDesc
    ) -> Future:
        joined = graph.call(self._program(desc, counts), *pieces)
        assert isinstance(joined, Future), "it has one output"
        return joined

    def _program(self, desc: TensorDesc, counts: Sequence[int]) -> LoadedProgram:
        key = desc.without_address(), tuple(counts)
        if key not in self._programs:
            self._programs[key] = self._loaded(*key)
        return self._programs[key]

    def forget(self) -> None:
        """Release the programs."""
        self._programs.clear()

    def _loaded(self, desc: TensorDesc, counts: tuple[int, ...]) -> LoadedProgram:
        builder = ComputationGraphBuilder("collect")
        # The storage type, so that the bits stay the same.
        kind = collected_desc(desc, 1).layout.data_type
        parts = []
        for number, count in enumerate(counts):
            shape = (count, *desc.shape) if count else desc.shape
            piece = builder.input(f"piece{number}", shape, kind)
            parts.append(piece if count else builder.unsqueeze(piece, 0))
        builder.output("all", builder.concat(parts, 0))
        machine = self._device.machine
        program = compile_graph(builder.build(), machine).program
        return self._device.load(Binary((program,), machine.shape, "pipeline"))


class Collected(Generic[T]):
    """The results of the rounds of one repeat so far, under one name."""

    def __init__(self, join: Join[T], *, is_copying: bool) -> None:
        self._join: Join[T] = join
        self._is_copying = is_copying
        #: Pieces, their numbers of stacked tensors (0: not joined yet), their levels of joining.
        self._pieces: list[tuple[T, int, int]] = []
        self._desc: TensorDesc | None = None

    def add(self, result: T) -> None:
        """Add the result of one round."""
        if self._desc is None:
            self._desc = result.desc
        if self._is_copying:
            result = self._join([result], [0], self._desc)
        self._append(result, int(self._is_copying), 0)

    def settle(self) -> None:
        """Join the single results, so that steps may overwrite them."""
        single = [piece for piece in self._pieces if not piece[1]]
        if single:
            self._join_last(single)

    def add_joined(self, results: T, count: int) -> None:
        """Add the stacked results of `count` rounds, after the first round."""
        self._append(results, count, 1)

    def whole(self) -> T:
        """Return all results, stacked; there is at least one."""
        while len(self._pieces) > 1 or not self._pieces[0][1]:
            self._join_last(self._pieces[-MAX_JOINED:])
        return self._pieces[0][0]

    def _append(self, piece: T, count: int, level: int) -> None:
        self._pieces.append((piece, count, level))
        while len(last := self._last_of_one_level()) == MAX_JOINED:
            self._join_last(last)

    def _last_of_one_level(self) -> list[tuple[T, int, int]]:
        # Pieces of one level are adjacent.
        level = self._pieces[-1][2]
        return [piece for piece in self._pieces[-MAX_JOINED:] if piece[2] == level]

    def _join_last(self, last: Sequence[tuple[T, int, int]]) -> None:
        assert self._desc is not None, "there is a piece"
        pieces, counts = [piece for piece, _, _ in last], [count for _, count, _ in last]
        whole = self._join(pieces, counts, self._desc)
        level = max(level for _, _, level in last) + 1
        del self._pieces[-len(last) :]
        self._pieces.append((whole, sum(max(1, count) for count in counts), level))


# Steps and rounds.

Value = Tensor | Array
#: An outer value; for an element, with the indices of the repeats.
_Outside = tuple[Reference, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step with its slots by index.

    Args:
        step: The step.
        drops: Names that no later step reads.
        inputs: Its input slots.
        outputs: Its output slots.
        body: The steps of a repeat.
        ends: Names of a round that are carried or collected.
    """

    step: PipelineStep
    drops: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    body: tuple[Scheduled, ...] = ()
    ends: tuple[str, ...] = ()


def schedule_of(
    steps: Sequence[PipelineStep],
    outer: frozenset[str],
    wanted: frozenset[str],
    programs: Mapping[str, Program],
) -> list[Scheduled]:
    """Schedule steps, each with the names that it may drop.

    Args:
        steps: The steps, in run order.
        outer: Names defined before the first step, which may be dropped.
        wanted: Names that are read after the last step.
        programs: The programs by module.
    """
    live = set(wanted)
    #: Index of the step that defines a name first: only later ones can drop it.
    defined_at = dict.fromkeys(outer, -1)
    for at, step in enumerate(steps):
        for name in defines(step):
            defined_at.setdefault(name, at)
    planned: list[Scheduled] = []
    for at in reversed(range(len(steps))):
        step = steps[at]
        uses, defined = uses_of(step), defines(step)
        drops = tuple(sorted(
            name for name in uses | defined
            if name not in live and defined_at.get(name, len(steps)) <= at
        ))  # fmt: skip
        if isinstance(step, RunStep):
            program = programs[step.module]
            inputs = _indices(step.inputs, program.inputs)
            outputs = _indices(step.outputs, program.outputs)
            planned.append(Scheduled(step, drops, inputs, outputs))
        else:
            # A round may drop the names that it defines, and carried ones.
            own = frozenset(name for name, _ in step.carry)
            after = at_end(step)
            body = schedule_of(step.steps, own, after, programs)
            inner = {name for s in step.steps for name in defines(s)}
            ends = tuple(sorted(after & inner))
            planned.append(Scheduled(step, drops, body=tuple(body), ends=ends))
        live -= defined
        live |= uses
    return planned[::-1]


def _indices(
    bindings: Sequence[tuple[str | None, object]], slots: Sequence[InputSlot | OutputSlot]
) -> tuple[int, ...]:
    by_name = {slot.name: at for at, slot in enumerate(slots)}
    return tuple(
        at if slot is None else by_name[slot] if slot in by_name else int(slot)
        for at, (slot, _) in enumerate(bindings)
    )


def value_of(reference: Reference, scope: Mapping[str, Value], indices: Mapping[str, int]) -> Value:
    """Return the value of a reference."""
    value = scope[reference.name]
    if not reference.is_element:
        return value
    element: Value = value[reference.at(indices)]
    return element if isinstance(element, Tensor) else np.asarray(element)


@dataclass(frozen=True, slots=True)
class Rounds:
    """`count` rounds of a repeat in one call.

    Args:
        graph: Its outputs are the carried values, then the collected ones, stacked.
        count: The number of rounds.
        index: The variable of the repeat.
        inputs: For each input of the graph its reference, and the indices of inner repeats; that of
            the repeat itself counts from the first of these rounds.
        carried: The names of the carried values.
    """

    graph: PreparedGraph
    count: int
    index: str
    inputs: tuple[tuple[Reference, Mapping[str, int]], ...]
    carried: tuple[str, ...]

    def run(
        self, scope: MutableMapping[str, Value], indices: Mapping[str, int], number: int,
        collected: Sequence[Collected[Tensor]],
    ) -> bool:  # fmt: skip
        """Run the rounds from `number` on.

        Returns False without running if they read elements of a tensor: each is a view at another
        address.
        """
        arguments = []
        for reference, inner in self.inputs:
            if reference.is_element and not isinstance(scope[reference.name], np.ndarray):
                return False
            at = {**indices, **inner, self.index: number + inner.get(self.index, 0)}
            arguments.append(value_of(reference, scope, at))
        for one in collected:
            one.settle()  # The rounds may overwrite carried values.
        called = self.graph(*arguments)
        results = called if isinstance(called, tuple) else (called,)
        scope.update(zip(self.carried, results, strict=False))
        for one, stacked in zip(collected, results[len(self.carried) :], strict=True):
            one.add_joined(stacked, self.count)
        return True


def rounds_of(
    scheduled: Scheduled, programs: Mapping[str, LoadedProgram], window: int, joins: Joins
) -> Rounds | None:
    """Prepare as many rounds of a repeat as fit a window.

    Returns None if one round exceeds it, a program is evaluated at load time, or a carried value is
    not a result of each round.
    """
    step = scheduled.step
    assert isinstance(step, RepeatStep)
    tasks = _tasks_of(step.steps, joins)
    count = window // tasks
    while count and count * tasks + len(step.collect) * joins.max_tasks(count) > window:
        count -= 1
    if not count or any(programs[name].is_constant_evaluable for name in _modules(scheduled)):
        return None
    unrolled = _Unrolled(programs, {name for name, _ in step.carry}, joins)
    collected = [unrolled.collected() for _ in step.collect]
    for number in range(count):
        unrolled.round(scheduled, {step.index: number}, collected)
    carried = {unrolled.results.get(name): name for name, _ in step.carry}
    if unrolled.is_divided or None in carried or len(carried) < len(step.carry):
        return None
    if not carried and not collected:
        return None
    for value, name in carried.items():
        assert value is not None, "checked above"
        unrolled.graph.output(value, name)
    for (name, _), each in zip(step.collect, collected, strict=True):
        unrolled.graph.output(each.whole(), name)
    donated = [unrolled.names.get((Reference(name), ())) for name in carried.values()]
    device = next(iter(programs.values())).device
    graph = PreparedGraph(
        device, unrolled.graph.table(), [name for name in donated if name is not None],
        title="the rounds of a pipeline",
    )  # fmt: skip
    inputs = tuple([(reference, dict(at)) for reference, at in unrolled.inputs])
    return Rounds(graph, count, step.index, inputs, tuple(carried.values()))


def _tasks_of(steps: Sequence[PipelineStep], joins: Joins) -> int:
    """Return an upper bound of the runs of steps, with those that join collected values."""
    tasks = runs_of(steps)
    for step in steps:
        if isinstance(step, RepeatStep):
            inside = _tasks_of(step.steps, joins) - runs_of(step.steps)
            tasks += step.times * inside + len(step.collect) * joins.max_tasks(step.times)
    return tasks


def _modules(scheduled: Scheduled) -> set[str]:
    """Return the modules that a step runs."""
    if isinstance(scheduled.step, RunStep):
        return {scheduled.step.module}
    return {name for inner in scheduled.body for name in _modules(inner)}


class _Unrolled:
    """A task graph of the runs of several rounds."""

    def __init__(
        self, programs: Mapping[str, LoadedProgram], carried: Set[str], joins: Joins
    ) -> None:
        self._programs, self._carried, self._joins = programs, carried, joins
        self.graph = TaskGraph("loop")
        #: The last result of each name; other names are outer values.
        self.results: dict[str, Future] = {}
        #: The outer value of each input of the graph.
        self.inputs: list[_Outside] = []
        #: The inputs that several runs may read, and their names.
        self._shared: dict[_Outside, Future] = {}
        self.names: dict[_Outside, str] = {}
        #: Whether a run reads an element of a result, or an outer value is carried.
        self.is_divided = False

    def collected(self) -> Collected[Future]:
        """Return a collector of values of the graph."""
        return self._joins.futures(self.graph)

    def round(
        self, scheduled: Scheduled, indices: Mapping[str, int],
        collected: Sequence[Collected[Future]],
    ) -> None:  # fmt: skip
        """Add one round of a repeat."""
        repeat = scheduled.step
        assert isinstance(repeat, RepeatStep)
        for inner in scheduled.body:
            if isinstance(inner.step, RunStep):
                self._run(inner, inner.step, indices)
                continue
            within = [self.collected() for _ in inner.step.collect]
            for number in range(inner.step.times):
                self.round(inner, {**indices, inner.step.index: number}, within)
            for (name, _), each in zip(inner.step.collect, within, strict=True):
                self.results[name] = each.whole()
        for (_, source), each in zip(repeat.collect, collected, strict=True):
            each.add(self.results[source])
        carried = {name: self.results.get(after) for name, after in repeat.carry}
        for name, value in carried.items():
            if value is None:
                self.is_divided = True
            else:
                self.results[name] = value

    def _run(self, scheduled: Scheduled, step: RunStep, indices: Mapping[str, int]) -> None:
        program = self._programs[step.module]
        arguments: dict[int, Future] = {}
        for at, (_, reference) in zip(scheduled.inputs, step.inputs, strict=True):
            value = self.results.get(reference.name)
            if value is not None:
                self.is_divided = self.is_divided or reference.is_element
            else:
                outside = reference, tuple(indices.items()) if reference.is_element else ()
                # A run that overwrites its input needs a tensor of its own.
                is_donated = at in program.transformation.donated
                is_shared = not is_donated or reference.name in self._carried
                value = self._shared.get(outside) if is_shared else None
                if value is None:
                    name = f"input{len(self.inputs)}"
                    value = self.graph.input(program.program.input_desc(at), name)
                    self.inputs.append(outside)
                    if is_shared:
                        self._shared[outside], self.names[outside] = value, name
            arguments[at] = value
        called = self.graph.call(program, *[arguments[at] for at in range(program.takes)])
        outputs = called if isinstance(called, tuple) else (called,)
        for at, (_, name) in zip(scheduled.outputs, step.outputs, strict=True):
            self.results[name] = outputs[at]

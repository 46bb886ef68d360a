"""The schedule of a pipeline file: its steps with slots by index, and the values each step frees.

Several rounds of a `repeat` run as one prepared graph, so that a long loop takes few calls. A
carried value is used only by the next round, which may overwrite it. Collected results are joined
along a new first axis in groups of `MOST_JOINED`, by small programs compiled on first use, so that
no program has an input for every round.
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
    """What is known of a value: its type; where it lies, if a program made it, and which one.

    `elements`: the types of the arrays of a list, of which `type` is the first.
    """

    type: ValueType
    desc: TensorDesc | None = None
    made_by: str = ""
    elements: tuple[ValueType, ...] | None = None


def collected_desc(desc: TensorDesc, times: int) -> TensorDesc:
    """What all rounds made of such a tensor: [times, *shape], in the type that it is stored in.

    Where it lies is settled when it is compiled for a device.

    >>> from stitch.program import DataType
    >>> collected_desc(TensorDesc((2,), host_layout(DataType.FLOAT32)), 3).text()
    '3x2xf32:host:row_major:interleaved'
    """
    return TensorDesc((times, *desc.shape), host_layout(desc.layout.data_type.in_arrays))


def all_rounds(value: CheckedValue, times: int, made_by: str) -> CheckedValue:
    """What so many rounds made of such a value, along a new first axis."""
    kind = ValueType((times, *value.type.shape), value.type.data_type)
    assert value.desc is not None, "a step made it"
    return CheckedValue(kind, collected_desc(value.desc, times), made_by)


# Collected results.

#: Tensors that one program joins.
MOST_JOINED = 64

T = TypeVar("T", Tensor, Future)
#: Joins pieces; each is so many tensors of a descriptor, 0: one without the axis.
Join: TypeAlias = Callable[[Sequence[T], Sequence[int], TensorDesc], T]


class Joins:
    """Programs of a device that put tensors one after the other; loaded once for each form.

    `is_copying`: a tensor may be given away after it was added, so it is copied at once.
    """

    def __init__(self, device: Device, *, is_copying: bool) -> None:
        self._device, self.is_copying = device, is_copying
        self._programs: dict[tuple[TensorDesc, tuple[int, ...]], LoadedProgram] = {}

    def tensors(self) -> Collected[Tensor]:
        """Collects tensors, by runs that are queued."""
        return Collected(self._queued, is_copying=self.is_copying)

    def futures(self, graph: TaskGraph) -> Collected[Future]:
        """Collects values of a task graph, by tasks of it."""
        return Collected(partial(self._added, graph), is_copying=self.is_copying)

    def most_tasks(self, rounds: int) -> int:
        """So many runs join so many rounds, at most."""
        copies = rounds if self.is_copying else 0
        return copies + rounds // (MOST_JOINED - 1) + 1

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
        """Drop the programs."""
        self._programs.clear()

    def _loaded(self, desc: TensorDesc, counts: tuple[int, ...]) -> LoadedProgram:
        builder = ComputationGraphBuilder("collect")
        # In what elements are stored in, so that joined they keep their bits.
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
    """What the rounds of one repeat made so far, under one name."""

    def __init__(self, join: Join[T], *, is_copying: bool) -> None:
        self._join: Join[T] = join
        self._is_copying = is_copying
        #: Pieces, how many tensors each holds (0: one as it came), how often it was joined.
        self._pieces: list[tuple[T, int, int]] = []
        self._desc: TensorDesc | None = None

    def add(self, made: T) -> None:
        """What one more round made."""
        if self._desc is None:
            self._desc = made.desc
        if self._is_copying:
            made = self._join([made], [0], self._desc)
        self._take(made, int(self._is_copying), 0)

    def settle(self) -> None:
        """Joins what was added one by one: none of it is needed any more, and may be given away."""
        alone = [piece for piece in self._pieces if not piece[1]]
        if alone:
            self._joined(alone)

    def add_joined(self, made: T, count: int) -> None:
        """What so many more rounds made, joined; not the first one."""
        self._take(made, count, 1)

    def whole(self) -> T:
        """All of them; there is at least one."""
        while len(self._pieces) > 1 or not self._pieces[0][1]:
            self._joined(self._pieces[-MOST_JOINED:])
        return self._pieces[0][0]

    def _take(self, made: T, count: int, level: int) -> None:
        self._pieces.append((made, count, level))
        # Those that were joined equally often lie next to each other, at the end.
        while len(alike := self._alike()) == MOST_JOINED:
            self._joined(alike)

    def _alike(self) -> list[tuple[T, int, int]]:
        """The last pieces that were joined equally often."""
        level = self._pieces[-1][2]
        last = self._pieces[-MOST_JOINED:]
        return [piece for piece in last if piece[2] == level]

    def _joined(self, last: Sequence[tuple[T, int, int]]) -> None:
        """Joins the last pieces."""
        assert self._desc is not None, "something was added"
        pieces, counts = [piece for piece, _, _ in last], [count for _, count, _ in last]
        whole = self._join(pieces, counts, self._desc)
        level = max(level for _, _, level in last) + 1
        del self._pieces[-len(last) :]
        self._pieces.append((whole, sum(max(1, count) for count in counts), level))


# Steps and rounds.

Value = Tensor | Array
#: A value, or the arrays of a list.
Named = Value | tuple[Value, ...]
#: What comes from outside; the indices of loops are part of it for elements.
_Outside = tuple[Reference, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step with its slots by index, and the names that no step needs after it.

    `ends`: what a round of a repeat defines and still has at its end, carried over or collected.
    """

    step: PipelineStep
    drops: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    body: tuple[Scheduled, ...] = ()
    ends: tuple[str, ...] = ()


def schedule_of(
    steps: Sequence[PipelineStep],
    known: frozenset[str],
    wanted: frozenset[str],
    programs: Mapping[str, Program],
) -> list[Scheduled]:
    """The steps, each with the names of `known` and of earlier steps that are not used later.

    `wanted` names what is needed after the last step.
    """
    live = set(wanted)
    #: Where a name is defined first; a step can drop only what is defined by then.
    defined_at = dict.fromkeys(known, -1)
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
            # A round may drop what it defines, and the carried names; the rest is not its own.
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
    places = {slot.name: at for at, slot in enumerate(slots)}
    return tuple(
        at if slot is None else places[slot] if slot in places else int(slot)
        for at, (slot, _) in enumerate(bindings)
    )


def value_of(reference: Reference, scope: Mapping[str, Named], indices: Mapping[str, int]) -> Value:
    """What a reference stands for."""
    value = scope[reference.name]
    if not reference.is_element:
        assert not isinstance(value, tuple), "no slot takes a list"
        return value
    element: Value = value[reference.at(indices)]
    return element if isinstance(element, Tensor) else np.asarray(element)


@dataclass(frozen=True, slots=True)
class Rounds:
    """`count` rounds in one call. `inputs`: for each input of the graph what it takes, and the
    indices of the loops in it; `index`: the own one, counted from the first of these rounds.

    It gives what is carried, by name, then what is collected, the rounds joined.
    """

    graph: PreparedGraph
    count: int
    index: str
    inputs: tuple[tuple[Reference, Mapping[str, int]], ...]
    carried: tuple[str, ...]

    def run(
        self, scope: MutableMapping[str, Named], indices: Mapping[str, int], number: int,
        collected: Sequence[Collected[Tensor]],
    ) -> bool:  # fmt: skip
        """Run the rounds from `number` on; False, with nothing done, where they take elements of a
        tensor, or tensors of a list: each would be a view, or a tensor, at a place of its own."""
        arguments = []
        for reference, inner in self.inputs:
            if reference.is_element and not isinstance(scope[reference.name], np.ndarray):
                return False
            at = {**indices, **inner, self.index: number + inner.get(self.index, 0)}
            arguments.append(value_of(reference, scope, at))
        for one in collected:
            one.settle()  # What is carried is given away.
        results = self.graph(*arguments)
        made = results if isinstance(results, tuple) else (results,)
        scope.update(zip(self.carried, made, strict=False))
        for one, rounds_made in zip(collected, made[len(self.carried) :], strict=True):
            one.add_joined(rounds_made, self.count)
        return True


def rounds_of(
    scheduled: Scheduled, programs: Mapping[str, LoadedProgram], window: int, joins: Joins
) -> Rounds | None:
    """As many rounds of a repeat as a window holds; None where one is too long, or where a program
    is evaluated once and remembered, or what is carried is not made anew in each."""
    step = scheduled.step
    assert isinstance(step, RepeatStep)
    tasks = _tasks_of(step.steps, joins)
    count = window // tasks
    while count and count * tasks + len(step.collect) * joins.most_tasks(count) > window:
        count -= 1
    if not count or any(programs[name].is_constant_evaluable for name in _modules(scheduled)):
        return None
    unrolled = _Unrolled(programs, {name for name, _ in step.carry}, joins)
    collected = [unrolled.collected() for _ in step.collect]
    for number in range(count):
        unrolled.round(scheduled, {step.index: number}, collected)
    made = {unrolled.made.get(name): name for name, _ in step.carry}
    if unrolled.is_parted or None in made or len(made) < len(step.carry):
        return None
    if not made and not collected:
        return None
    for value, name in made.items():
        assert value is not None, "asked above"
        unrolled.graph.output(value, name)
    for (name, _), each in zip(step.collect, collected, strict=True):
        unrolled.graph.output(each.whole(), name)
    taken = [unrolled.names.get((Reference(name), ())) for name in made.values()]
    device = next(iter(programs.values())).device
    graph = PreparedGraph(
        device,
        unrolled.graph.table(),
        [name for name in taken if name is not None],
        title="the rounds of a pipeline",
    )
    inputs = tuple([(reference, dict(at)) for reference, at in unrolled.inputs])
    return Rounds(graph, count, step.index, inputs, tuple(made.values()))


def _tasks_of(steps: Sequence[PipelineStep], joins: Joins) -> int:
    """So many runs are in steps, with those that join what is collected, at most."""
    tasks = runs_of(steps)
    for step in steps:
        if isinstance(step, RepeatStep):
            inside = _tasks_of(step.steps, joins) - runs_of(step.steps)
            tasks += step.times * inside + len(step.collect) * joins.most_tasks(step.times)
    return tasks


def _modules(scheduled: Scheduled) -> set[str]:
    """The modules that run in it."""
    if isinstance(scheduled.step, RunStep):
        return {scheduled.step.module}
    return {name for inner in scheduled.body for name in _modules(inner)}


class _Unrolled:
    """The runs of some rounds one after the other, and what feeds them."""

    def __init__(
        self, programs: Mapping[str, LoadedProgram], carried: Set[str], joins: Joins
    ) -> None:
        self._programs, self._carried, self._joins = programs, carried, joins
        self.graph = TaskGraph("loop")
        #: What a name stood for last; the others come from outside.
        self.made: dict[str, Future] = {}
        #: What comes from outside, by the graph's inputs.
        self.inputs: list[_Outside] = []
        #: The inputs that later runs may take too, and their names.
        self._shared: dict[_Outside, Future] = {}
        self.names: dict[_Outside, str] = {}
        #: Whether an element of what is made inside is taken, or something from outside carried.
        self.is_parted = False

    def collected(self) -> Collected[Future]:
        """What collects values of the graph."""
        return self._joins.futures(self.graph)

    def round(
        self, scheduled: Scheduled, indices: Mapping[str, int],
        collected: Sequence[Collected[Future]],
    ) -> None:  # fmt: skip
        """One round of a repeat."""
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
                self.made[name] = each.whole()
        for (_, source), each in zip(repeat.collect, collected, strict=True):
            each.add(self.made[source])
        carried = {name: self.made.get(after) for name, after in repeat.carry}
        for name, value in carried.items():
            if value is None:
                self.is_parted = True
            else:
                self.made[name] = value

    def _run(self, scheduled: Scheduled, step: RunStep, indices: Mapping[str, int]) -> None:
        program = self._programs[step.module]
        given: dict[int, Future] = {}
        for at, (_, reference) in zip(scheduled.inputs, step.inputs, strict=True):
            value = self.made.get(reference.name)
            if value is not None:
                self.is_parted = self.is_parted or reference.is_element
            else:
                outside = reference, tuple(indices.items()) if reference.is_element else ()
                # What is made of an array for a run that uses it up is that run's alone.
                is_given = at in program.transformation.donated
                is_shared = not is_given or reference.name in self._carried
                value = self._shared.get(outside) if is_shared else None
                if value is None:
                    name = f"input{len(self.inputs)}"
                    value = self.graph.input(program.program.input_desc(at), name)
                    self.inputs.append(outside)
                    if is_shared:
                        self._shared[outside], self.names[outside] = value, name
            given[at] = value
        made = self.graph.call(program, *[given[at] for at in range(program.takes)])
        outputs = made if isinstance(made, tuple) else (made,)
        for at, (_, name) in zip(scheduled.outputs, step.outputs, strict=True):
            self.made[name] = outputs[at]

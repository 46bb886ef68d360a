"""A window: the stretch of tasks that is queued, its numbered values, and who asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stitch.runtime.executors import FunctionCall
from stitch.runtime.recording.agent import Agent
from stitch.runtime.values import ArgumentRecord, ConstantRecord, Forms, Places, ValueRecord
from stitch.tasks import NumberedTask, TaskSequence, Transformation


class TaskBatch:
    """The queue of a device between two runs; `number` tells windows apart, and counts tasks.

    While it runs, the next one fills: `value.window` and `value.number` then speak of that one, so
    who runs this one goes by the numbers in it.
    """

    __slots__ = (
        "agents", "given_up", "graph", "is_done", "is_planned", "is_whole", "merged", "nothing",
        "number",
        "reads_exposed", "reads_failed", "values",
    )  # fmt: skip

    def __init__(self, number: int, nothing: TaskSequence) -> None:
        """`nothing`: the device's graph without tasks, which all its work comes after."""
        self.number = number
        self.graph = self.nothing = nothing
        #: Whether others may have written to a source's bytes, and whether the one before it failed
        #: when tasks of this one may have asked for its results.
        self.reads_exposed = self.reads_failed = False
        #: Whether what runs it is known: an interrupt before that leaves it in the queue. Then,
        #: whether it has run, to its end or as far as it can.
        self.is_planned = self.is_done = False
        #: Whether no task is half queued.
        self.is_whole = True
        #: Every value by its number, the ones that existed before with theirs, and the agent of
        #: each task.
        self.values: list[ValueRecord] = []
        self.agents: list[Agent | None] = []
        #: Values that somebody freed while it ran.
        self.given_up: list[ValueRecord] = []
        #: Of each task whether it stands for several of another window; () where none does.
        self.merged: tuple[bool, ...] = ()

    def after(
        self, what: Transformation, inputs: Sequence[ValueRecord]
    ) -> tuple[TaskSequence, Iterable[ValueRecord], Sequence[ValueRecord]]:
        """What `take` is given for one more task: the graph with it, which of its inputs have no
        number yet, and which it takes over."""
        now, number = self.number, len(self.values)
        fresh, numbers = [], []
        # Until the graph has the task, the lists and the values may say too much: see `of`.
        self.is_whole = False
        for value in inputs:
            if value.window != now:
                value.window, value.number = now, number
                fresh.append(value)
                number += 1
            numbers.append(value.number)
        gone = [inputs[index] for index in what.donated]
        return self.graph.after(what, tuple(numbers), len(fresh)), fresh, gone

    def take(
        self,
        graph: TaskSequence,
        agent: Agent | None,
        fresh: Iterable[ValueRecord],
        outputs: Sequence[ValueRecord],
        gone: Sequence[ValueRecord] = (),
    ) -> None:
        """The next task is the last of `graph`: it reads values that have numbers or are `fresh`,
        makes `outputs`, and those that are `gone` are its own."""
        now, values = self.number, self.values
        number = len(values)
        self.is_whole = False
        for value in fresh:
            if value.is_exposed:
                self.reads_exposed = True
            value.window, value.number = now, number
            number += 1
        values += fresh
        for value in outputs:
            value.window, value.number = now, number
            number += 1
        values += outputs
        self.agents.append(agent)
        self.graph = graph
        for value in gone:
            assert graph.transformation is not None
            value.consumed = True
            value.lease = None
            value.by = f"donated to {graph.transformation.name!r}"
        self.is_whole = True

    @classmethod
    def of(cls, number: int, *windows: TaskBatch) -> TaskBatch:
        """The tasks of these windows as one, but for one that is half queued. Its number is above
        `number` where an attempt that was interrupted has given that to values already."""
        after = [value.window + 1 for window in windows for value in window.values]
        joined = cls(max([number, *after]), windows[0].nothing)
        for window in windows:
            for task, agent in zip(window.graph.tasks, window.agents, strict=False):
                inputs = [window.values[n] for n in task.inputs]
                results = [window.values[n] for n in task.outputs]
                graph, fresh, gone = joined.after(task.transformation, inputs)
                joined.take(graph, agent, fresh, results, gone)
            joined.reads_exposed |= window.reads_exposed
            joined.reads_failed |= window.reads_failed
        return joined

    @property
    def end(self) -> int:
        """The number of the next one."""
        return self.number + (len(self.agents) or 1)

    @property
    def sources(self) -> list[tuple[int, ValueRecord]]:
        """Those that existed before, with their numbers."""
        return [(number, self.values[number]) for number in self.graph.sources]

    @property
    def constants(self) -> list[ConstantRecord]:
        """Those that its programs read, each once."""
        agents = dict.fromkeys([agent for agent in self.agents if agent is not None])
        # Several may read the same one.
        return list(dict.fromkeys([c for agent in agents for c in agent.constants]))

    @property
    def has_constants_placed(self) -> bool:
        """Whether all of them lie in their spaces."""
        return all(constant.is_placed for constant in self.constants)

    def call(self, index: int) -> FunctionCall | None:
        """The call that a task makes, where it runs a host function."""
        agent = self.agents[index]
        return agent if isinstance(agent, FunctionCall) else None

    def following(self) -> TaskBatch:
        """An empty one, for what comes after it."""
        return TaskBatch(self.end, self.nothing)

    def alone(self, index: int, task: NumberedTask) -> tuple[TaskBatch, list[int]]:
        """One of its tasks, the one with this index, as a window that was never queued; and the
        numbers that the values of that one have in this."""
        single = TaskBatch(self.number, self.nothing)
        single.reads_exposed = self.reads_exposed
        numbers = list(dict.fromkeys(task.inputs))
        inputs = tuple([numbers.index(number) for number in task.inputs])
        single.graph = self.nothing.after(task.transformation, inputs, len(numbers))
        single.agents.append(self.agents[index])
        numbers += task.outputs
        single.values += [self.values[number] for number in numbers]
        return single, numbers

    def forms(self) -> tuple[Forms, Places]:
        """What a plan depends on in the sources but for where they lie; and where those of them lie
        that are not just arrays of a call."""
        forms: list[tuple[object, ...]] = []
        places, values = [], self.values
        for number in self.graph.sources:
            value = values[number]
            # After a failure an array may have copies in the spaces, too: those a plan would read.
            if type(value) is ArgumentRecord and len(value.instances) < 2:
                forms.append(value.port.signature)
            else:
                forms.append(value.signature())
                places.append((number, value.places()))
        return tuple(forms), tuple(places)

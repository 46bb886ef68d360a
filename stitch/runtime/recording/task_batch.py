"""`TaskBatch`: a batch of queued tasks, its numbered values, and the agents of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stitch.runtime.executors import FunctionCall
from stitch.runtime.recording.agent import Agent
from stitch.runtime.values import ArgumentRecord, ConstantRecord, Forms, Places, ValueRecord
from stitch.tasks import Cut, NumberedTask, TaskSequence, Transformation


class TaskBatch:
    """The tasks between two runs of a queue; `number` identifies the batch and counts tasks.

    While it runs, the next batch fills: `value.window` and `value.number` then refer to that one,
    so the runner uses the numbers of the batch.
    """

    __slots__ = (
        "agents", "given_up", "graph", "is_done", "is_planned", "is_whole", "nothing", "number",
        "reads_exposed", "reads_failed", "values",
    )  # fmt: skip

    def __init__(self, number: int, nothing: TaskSequence) -> None:
        """`nothing`: the device's empty task sequence, the root of all its sequences."""
        self.number = number
        self.graph = self.nothing = nothing
        #: Whether sources may be written from outside; whether tasks may read failed results of the
        #: previous batch.
        self.reads_exposed = self.reads_failed = False
        #: Whether it is planned (before that, an interrupt returns it to the queue), and whether it
        #: has finished.
        self.is_planned = self.is_done = False
        #: Whether no task is partially enqueued.
        self.is_whole = True
        #: All values by number, and the agent of each task.
        self.values: list[ValueRecord] = []
        self.agents: list[Agent | None] = []
        #: Values freed while it ran.
        self.given_up: list[ValueRecord] = []

    def after(
        self, what: Transformation, inputs: Sequence[ValueRecord]
    ) -> tuple[TaskSequence, Iterable[ValueRecord], Sequence[ValueRecord]]:
        """Number the inputs of one more task.

        Returns:
            The sequence with the task, the inputs without a number so far, and the donated inputs:
            arguments of `take`.
        """
        now, number = self.number, len(self.values)
        fresh, numbers = [], []
        # Incomplete until the sequence contains the task: see `of`.
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
        """Append the last task of `graph`.

        `fresh`: its inputs without a number; `outputs`: its new values; `gone`: its donated inputs.
        """
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
        """Concatenate batches, without a partially enqueued task.

        The new number is at least `number`, and above any that an interrupted attempt has assigned.
        """
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
        """The number of the next batch."""
        return self.number + (len(self.agents) or 1)

    @property
    def sources(self) -> list[tuple[int, ValueRecord]]:
        """The values that existed before, with their numbers."""
        return [(number, self.values[number]) for number in self.graph.sources]

    @property
    def constants(self) -> list[ConstantRecord]:
        """The constants of its programs, each once."""
        agents = dict.fromkeys([agent for agent in self.agents if agent is not None])
        # Programs may share constants.
        return list(dict.fromkeys([c for agent in agents for c in agent.constants]))

    @property
    def has_constants_placed(self) -> bool:
        """Whether all its constants are in device memory."""
        return all(constant.is_placed for constant in self.constants)

    def call(self, index: int) -> FunctionCall | None:
        """Return the host function call of a task, if it is one."""
        agent = self.agents[index]
        return agent if isinstance(agent, FunctionCall) else None

    def following(self) -> TaskBatch:
        """Return an empty batch that follows this one."""
        return TaskBatch(self.end, self.nothing)

    def alone(self, index: int, task: NumberedTask) -> tuple[TaskBatch, list[int]]:
        """Return one task as a separate batch, and the numbers of its values in this one."""
        single = TaskBatch(self.number, self.nothing)
        single.reads_exposed = self.reads_exposed
        numbers = list(dict.fromkeys(task.inputs))
        inputs = tuple([numbers.index(number) for number in task.inputs])
        single.graph = self.nothing.after(task.transformation, inputs, len(numbers))
        single.agents.append(self.agents[index])
        numbers += task.outputs
        single.values += [self.values[number] for number in numbers]
        return single, numbers

    def piece(self, cut: Cut, kept: Sequence[bool]) -> tuple[TaskBatch, tuple[bool, ...]]:
        """Return a stretch of tasks as a separate batch, and which of its values are kept: also
        those that later pieces read."""
        piece = TaskBatch(self.number + cut.start, self.nothing)
        piece.graph, piece.reads_exposed = cut.graph, self.reads_exposed
        piece.values = [self.values[number] for number in cut.numbers]
        piece.agents = self.agents[cut.start : cut.stop]
        read_later = zip(cut.numbers, cut.read_later, strict=True)
        return piece, tuple([kept[number] or is_read for number, is_read in read_later])

    def forms(self) -> tuple[Forms, Places]:
        """Return the signatures of the sources, and the addresses of those that are not plain host
        arrays."""
        forms: list[tuple[object, ...]] = []
        places, values = [], self.values
        for number in self.graph.sources:
            value = values[number]
            # After a failure a host array may have copies in device memory, which a plan would
            # read.
            if type(value) is ArgumentRecord and len(value.instances) < 2:
                forms.append(value.port.signature)
            else:
                forms.append(value.signature())
                places.append((number, value.places()))
        return tuple(forms), tuple(places)

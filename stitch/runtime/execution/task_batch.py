"""`TaskBatch`: a batch of queued tasks, its numbered values, and the agents of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stitch.program import TensorDesc
from stitch.runtime.backends import Agent
from stitch.runtime.executors import FunctionCall
from stitch.runtime.values import (
    ArgumentRecord,
    ConstantRecord,
    Forms,
    Places,
    Status,
    ValueRecord,
)
from stitch.tasks import Cut, NumberedTask, TaskSequence, Transformation

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY


class TaskBatch:
    """The tasks between two runs of a queue; `number` identifies the batch and counts tasks.

    While it runs, the next batch fills: `value.batch` and `value.number` then refer to that one,
    so the runner uses the numbers of the batch.
    """

    __slots__ = (
        "agents", "cached", "device", "given_up", "graph", "is_done", "is_planned", "nothing",
        "number", "reads_exposed", "reads_failed", "values",
    )  # fmt: skip

    def __init__(self, device: RuntimeDevice, number: int, nothing: TaskSequence) -> None:
        """`nothing`: the device's empty task sequence, the root of all its sequences."""
        self.device, self.number = device, number
        self.graph = self.nothing = nothing
        #: Whether sources may be written from outside; whether tasks may read failed results of the
        #: previous batch.
        self.reads_exposed = self.reads_failed = False
        #: Whether it is planned (before that, an interrupt returns it to the queue), and whether it
        #: has finished.
        self.is_planned = self.is_done = False
        #: All values by number, and the agent of each task.
        self.values: list[ValueRecord] = []
        self.agents: list[Agent | None] = []
        #: Pending values for which a result is cached: the cache forgets those that are never kept.
        self.cached: list[ValueRecord] = []
        #: Values freed while it ran.
        self.given_up: list[ValueRecord] = []

    def append(
        self,
        what: Transformation,
        agent: Agent | None,
        inputs: Sequence[ValueRecord],
        outputs: Sequence[tuple[TensorDesc, int]],
        made: Sequence[ValueRecord] = (),
    ) -> list[ValueRecord]:
        """Append a task; returns its pending outputs.

        Donated inputs are consumed. If an exception is raised, nothing has changed: `TaskError` for
        inputs that are gone.

        Args:
            what: What it does.
            agent: What runs it; None for a copy.
            inputs: Its inputs.
            outputs: Descriptors of its outputs with the device's keys.
            made: Its outputs if it was queued before; then its inputs are not checked again.
        """
        now, values, device = self.number, self.values, self.device
        number = len(values)
        fresh: list[ValueRecord] = []
        gone: Sequence[ValueRecord] = ()
        try:
            for value in inputs:
                status = value.status
                if ((status is not READY and status is not PENDING) or value.consumed) and not made:
                    value.check_usable()
                if value.batch != now:
                    fresh.append(value)
                    value.batch, value.number = now, number
                    number += 1
                    if value.is_exposed:
                        self.reads_exposed = True
            if len(inputs) == 1:  # Most programs; a comprehension costs 60 ns.
                reads: tuple[int, ...] = (inputs[0].number,)
            else:
                reads = tuple([value.number for value in inputs])
            graph = self.graph.following
            if (
                graph is None
                or graph.transformation is not what
                or graph.first != number
                or graph.inputs != reads
            ):
                graph = self.graph.after(what, reads, len(fresh))
            results: list[ValueRecord] = []
            if made:
                results += made
                for value in made:
                    value.batch, value.number = now, number
                    number += 1
            for desc, key in outputs:
                results.append(ValueRecord(device, desc, key, what.name, number, now))
                number += 1
            if what.donated:
                gone = [inputs[index] for index in what.donated]
                by = f"donated to {what.name!r}"
                for value in gone:
                    value.consumed, value.slots, value.by = True, None, by
            # Atomic under the GIL: no call in between.
            values += fresh
            values += results
            self.agents += (agent,)
            self.graph = graph
            return results
        except BaseException:
            for value in fresh:
                value.batch = -1
            for value in gone:
                value.consumed = False
            raise

    @classmethod
    def of(cls, number: int, *batches: TaskBatch) -> TaskBatch:
        """Concatenate batches; the new number is at least `number`, and above all earlier ones."""
        after = [value.batch + 1 for batch in batches for value in batch.values]
        joined = cls(batches[0].device, max([number, *after]), batches[0].nothing)
        for batch in batches:
            for task, agent in zip(batch.graph.tasks, batch.agents, strict=True):
                inputs = [batch.values[n] for n in task.inputs]
                results = [batch.values[n] for n in task.outputs]
                joined.append(task.transformation, agent, inputs, (), results)
            joined.reads_exposed |= batch.reads_exposed
            joined.reads_failed |= batch.reads_failed
            joined.cached += batch.cached
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
        return TaskBatch(self.device, self.end, self.nothing)

    def alone(self, index: int, task: NumberedTask) -> tuple[TaskBatch, list[int]]:
        """Return one task as a separate batch, and the numbers of its values in this one."""
        single = TaskBatch(self.device, self.number, self.nothing)
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
        piece = TaskBatch(self.device, self.number + cut.start, self.nothing)
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

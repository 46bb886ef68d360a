"""The linked form of a batch: fewer tasks, some of which are linked programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stitch.runtime.recording import Agent, TaskBatch
from stitch.runtime.values import Status
from stitch.tasks import TaskSequence


@dataclass(frozen=True, slots=True, eq=False)
class Linked:
    """The work of a batch with fewer tasks.

    `members`: for each task the tasks of the batch that it replaces. `programs`: the linked program
    of each task, None for a task that is unchanged. `numbers`: for each value its number in the
    batch. `kept`: which of these are kept; `inside`: the batch's other values, which become
    internal.
    """

    graph: TaskSequence
    members: tuple[tuple[int, ...], ...]
    programs: tuple[Agent | None, ...]
    numbers: tuple[int, ...]
    kept: tuple[bool, ...]
    inside: tuple[int, ...]

    def window(self, window: TaskBatch) -> TaskBatch:
        """Return the linked batch for a batch; it is never queued itself."""
        linked = TaskBatch(window.number, window.nothing)
        linked.graph = self.graph
        values, agents = window.values, window.agents
        linked.values = [values[number] for number in self.numbers]
        linked.agents = [
            agents[members[0]] if program is None else program
            for members, program in zip(self.members, self.programs, strict=True)
        ]
        linked.merged = tuple([len(members) > 1 for members in self.members])
        return linked

    def end_inside(self, window: TaskBatch) -> None:
        """Mark the internal values as freed after the linked batch has run."""
        values = window.values
        for number in self.inside:
            values[number].status = Status.FREED

    def members_of(self, tasks: Iterable[int]) -> list[int]:
        """Return the tasks of the batch that these tasks replace, in order."""
        return sorted([member for task in tasks for member in self.members[task]])


class Linking(Protocol):
    """Decides which batches run linked."""

    def linked(self, window: TaskBatch, kept: tuple[bool, ...]) -> Linked | None:
        """Count a run of a batch, and return its linked form or None."""

    def is_settled(self, window: TaskBatch, kept: tuple[bool, ...]) -> bool:
        """Return whether the decision for this work is final."""

    def keep_apart(self, window: TaskBatch, kept: tuple[bool, ...], why: str) -> None:
        """Stop linking this work: linked, it costs more or does not fit."""

"""Linked work: the tasks of a window as fewer tasks, some of which are linked programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stitch.runtime.recording import Agent, TaskBatch
from stitch.runtime.values import Status
from stitch.tasks import TaskSequence


@dataclass(frozen=True, slots=True, eq=False)
class Linked:
    """The same work with fewer tasks.

    `members`: for each task those of the window that it stands for. `programs`: what runs it where
    it stands for several. `numbers`: for each of its values the number in the window. `kept`: which
    of these are wanted; `inside`: the window's other values, which nobody wants.
    """

    graph: TaskSequence
    members: tuple[tuple[int, ...], ...]
    programs: tuple[Agent | None, ...]
    numbers: tuple[int, ...]
    kept: tuple[bool, ...]
    inside: tuple[int, ...]

    def window(self, window: TaskBatch) -> TaskBatch:
        """A window's work in this form; it is never queued."""
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
        """It has run in this form: what its programs hand on inside is not there any more."""
        values = window.values
        for number in self.inside:
            values[number].status = Status.FREED

    def members_of(self, tasks: Iterable[int]) -> list[int]:
        """The tasks of the window that these stand for, in order."""
        return sorted([member for task in tasks for member in self.members[task]])


class Linking(Protocol):
    """Who decides which work runs linked."""

    def linked(self, window: TaskBatch, kept: tuple[bool, ...]) -> Linked | None:
        """The form in which a window runs now, if it is linked; counts that it runs."""

    def is_settled(self, window: TaskBatch, kept: tuple[bool, ...]) -> bool:
        """Whether the same work will run in the same form from now on."""

    def keep_apart(self, window: TaskBatch, kept: tuple[bool, ...], why: str) -> None:
        """Linked, it would cost more than apart, or does not fit."""

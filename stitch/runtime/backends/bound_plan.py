"""A bound plan: steps to call, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stitch.planner import ArenaSlot, ThreadAssignment
from stitch.program import Array, Program
from stitch.runtime.executors import BoundProgram

Thunk = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """One step of a plan: its thunks and, for programs, data for hooks.

    `claim`: host memory reserved for binding it, if separate from the plan's.
    """

    thunks: tuple[Thunk, ...]
    program: Program | None = None
    bound: BoundProgram | None = None
    claim: object = None


@dataclass(frozen=True, slots=True, eq=False)
class OwnBytes:
    """The arenas of a plan's threads (`bases`), and the assignment of its buffers to them."""

    assignment: ThreadAssignment
    bases: tuple[Array, ...]

    def of(self, place: ArenaSlot) -> Array:
        """Return the bytes of an arena slot."""
        return self.bases[place.thread][place.offset : place.offset + place.nbytes]


@dataclass(slots=True, eq=False)
class BoundPlan:
    """A plan bound to memory.

    `thunks` run it; `arguments` receives the host arrays before a run, in the order of
    `argument_values` (numbers of host values). `positions`: buffer → argument position.
    `progress[0]`: lower bound of completed steps, in plans that change more than their results;
    `progress[1]`: state of overwriting (see `OverwritingRun`).
    """

    steps: tuple[BoundStep, ...]
    arguments: list[Any]
    positions: Mapping[int, int]
    argument_values: tuple[int, ...]
    staging_nbytes: int
    progress: list[int]
    own_bytes: OwnBytes
    _thunks: tuple[Thunk, ...] | None = None

    @property
    def thunks(self) -> tuple[Thunk, ...]:
        """The thunks of all steps in order."""
        if self._thunks is None:
            self._thunks = tuple([thunk for step in self.steps for thunk in step.thunks])
        return self._thunks

    def ends(self) -> tuple[int, ...]:
        """Return the number of thunks up to the end of each step."""
        return tuple(accumulate([len(step.thunks) for step in self.steps]))

    def with_steps(self, others: Mapping[int, BoundStep]) -> BoundPlan:
        """Return a copy with some steps replaced; it shares the list of arguments."""
        steps = list(self.steps)
        for index, step in others.items():
            steps[index] = step
        return BoundPlan(
            tuple(steps), self.arguments, self.positions, self.argument_values,
            self.staging_nbytes, self.progress, self.own_bytes,
        )  # fmt: skip

"""What a plan is once it is bound: steps to call, and what a run of them is given."""

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
    """One step of a plan: its thunks, and, for programs, what hooks need. `claim`: what binding it
    took of the host's memory, where that is not the plan's."""

    thunks: tuple[Thunk, ...]
    program: Program | None = None
    bound: BoundProgram | None = None
    claim: object = None


@dataclass(frozen=True, slots=True, eq=False)
class OwnBytes:
    """The arena slots of a plan's runs; `bases` are the arenas, by thread."""

    assignment: ThreadAssignment
    bases: tuple[Array, ...]

    def of(self, place: ArenaSlot) -> Array:
        """The bytes of one place."""
        return self.bases[place.thread][place.offset : place.offset + place.nbytes]


@dataclass(slots=True, eq=False)
class BoundPlan:
    """A plan bound to bytes.

    `thunks` run it; `arguments` receives the host arrays of this run before it starts, in the
    order of `argument_values` (numbers of the values outside the spaces). `positions`: of buffers
    outside the spaces, among the arguments. `progress[0]`: how many steps are done at least, while
    a plan runs that changes more than its results; `progress[1]`: how far it is with what it
    overwrites (see `OverwritingRun`).
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
        """Those of all steps, in order."""
        if self._thunks is None:
            self._thunks = tuple([thunk for step in self.steps for thunk in step.thunks])
        return self._thunks

    def ends(self) -> tuple[int, ...]:
        """How many thunks are done when each step is."""
        return tuple(accumulate([len(step.thunks) for step in self.steps]))

    def with_steps(self, others: Mapping[int, BoundStep]) -> BoundPlan:
        """The same with other steps at some positions; it receives its arrays in the same list."""
        steps = list(self.steps)
        for index, step in others.items():
            steps[index] = step
        return BoundPlan(
            tuple(steps), self.arguments, self.positions, self.argument_values,
            self.staging_nbytes, self.progress, self.own_bytes,
        )  # fmt: skip

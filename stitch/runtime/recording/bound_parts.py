"""The bound steps of an executable, shared between bindings to different addresses.

Only steps that touch sources or results are bound again for each binding. If the generated code
takes only arrays (`placed_objects`), even these are bound only for hooks and for new listeners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    Buffer,
    Copy,
    Execute,
    Plan,
    Step,
    ThreadAssignment,
)
from stitch.program import Program
from stitch.runtime.backends import BoundPlan, BoundStep, HostMemory, LocalBackend
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.recording.placed_objects import PlacedObjects, RegionOf

#: Host memory limit for bindings to different addresses; the first few are always allowed.
MAX_NBYTES = 128 << 20
MIN_BOUND = 32


class BoundParts:
    """The steps that all bindings of an executable share, and those that vary."""

    def __init__(
        self,
        plan: Plan,
        results: Collection[int],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        nbytes: Sequence[int],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> None:
        """Initialize.

        Args:
            plan: The plan.
            results: Numbers of result buffers, which like sources have different addresses per
                binding.
            programs: Prepared program per task.
            bodies: Program per task, for hooks.
            nbytes: Host memory to bind each task's program.
            assignment: Threads of the steps.
        """
        self._plan, self._programs, self._bodies, self._assignment = (
            plan,
            programs,
            bodies,
            assignment,
        )
        buffers = {b.number: b for b in plan.request.buffers}
        buffers |= {s.buffer.number: s.buffer for s in plan.steps if isinstance(s, Allocate)}
        elsewhere = {b.number for b in plan.request.buffers if b.address is not None} | set(results)
        touched = ((i, _touched_by(step)) for i, step in enumerate(plan.steps))
        #: The buffers of the varying steps.
        self._varying = {
            index: tuple([buffers[number] for number in numbers])
            for index, numbers in touched
            if not elsewhere.isdisjoint(numbers)
        }
        steps = [plan.steps[index] for index in self._varying]
        self._nbytes = sum([nbytes[step.task] for step in steps if isinstance(step, Execute)])
        #: The shared steps, once bound.
        self._rest: BoundPlan | None = None

    @property
    def varying(self) -> Collection[int]:
        """The steps that differ between bindings, in order."""
        return self._varying.keys()

    @property
    def most(self) -> int:
        """The number of bindings that fit in the memory limit."""
        return max(MIN_BOUND, MAX_NBYTES // max(1, self._nbytes))

    def bound(
        self,
        backend: LocalBackend,
        addresses: Mapping[int, int],
        memory: HostMemory,
    ) -> BoundPlan:
        """Return the plan bound to buffer addresses (number → address).

        Host memory for binding steps again is reserved for their lifetime, except for the first
        binding.

        Raises:
            OutOfMemoryError: The reservation exceeds the limit.
        """
        rest = self._rest
        if rest is None:
            whole = backend.bind(
                self._plan, self._programs, self._bodies, addresses, self._assignment
            )
            # A step without thunks has none at any address.
            for index in [*self._varying]:
                if whole.steps[index].program is None and not whole.steps[index].thunks:
                    del self._varying[index]
            # Drop the varying steps: they would keep lent buffers alive.
            self._rest = whole.with_steps(dict.fromkeys(self._varying, BoundStep(())))
            return whole
        claimed = memory.reuse(self._plan, (), self._nbytes)
        own = {
            index: backend.bind_step(
                self._plan.steps[index], self._programs, self._bodies, buffers, addresses, rest,
                claimed,
            )
            for index, buffers in self._varying.items()
        }  # fmt: skip
        return rest.with_steps(own)

    def placed(
        self, objects: Sequence[Sequence[object]], addresses: Mapping[int, int],
        region_of: RegionOf,
    ) -> PlacedObjects | None:  # fmt: skip
        """Return the arguments of the generated code for these addresses, so that they can be
        recreated for other addresses.

        `objects`: the arguments by varying step. Returns None if they cannot be recreated.
        """
        elsewhere = [
            [buffer.where(addresses) for buffer in buffers if buffer.number in addresses]
            for buffers in self._varying.values()
        ]
        return PlacedObjects.of(zip(objects, elsewhere, strict=True), region_of)

    def bring_back(self, buffers: Iterable[Buffer], backend: LocalBackend) -> None:
        """Copy buffers from thread arenas to their addresses."""
        for buffer in buffers:
            assert self._rest is not None, "it has run"
            assert buffer.address is not None, "it lies in a space"
            region = backend.region(buffer.space, buffer.address, buffer.size_per_bank)
            region[...] = self._rest.own_bytes.of(self._assignment.buffers[buffer.number])

    def clear(self) -> None:
        """Drop the shared steps."""
        self._rest = None


def _touched_by(step: Step) -> tuple[int, ...]:
    """Return the numbers of the buffers to whose addresses a step is bound."""
    if isinstance(step, Allocate):
        return (step.buffer.number,)
    if isinstance(step, Copy):
        return step.source.buffer, step.target.buffer
    if isinstance(step, Execute):
        return tuple(dict.fromkeys([i.buffer for i in (*step.inputs, *step.outputs)]))
    return ()

"""The steps of a recording bound to bytes, for any places of its sources and results.

Only what touches such places differs from one binding to the next: that is bound anew for each, the
rest once for all. Where written code is given arrays alone (`placed_objects`) steps at other places
are bound only for hooks, and for listeners for whom no code is written yet.
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

#: Of the host's memory, what is bound at a time to different places may take so much; some always
#: are.
MAX_NBYTES = 128 << 20
MIN_BOUND = 32


class BoundParts:
    """What all bindings of one recording share, and what each has for itself."""

    def __init__(
        self,
        plan: Plan,
        results: Collection[int],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        nbytes: Sequence[int],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> None:
        """`results`: the buffers of the results, which lie elsewhere each time, as sources do;
        `nbytes`: what binding each task's program takes of the host's memory."""
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
        #: The buffers of the steps that differ from one binding to the next.
        self._varying = {
            index: tuple([buffers[number] for number in numbers])
            for index, numbers in touched
            if not elsewhere.isdisjoint(numbers)
        }
        steps = [plan.steps[index] for index in self._varying]
        self._nbytes = sum([nbytes[step.task] for step in steps if isinstance(step, Execute)])
        #: The others, once they are bound.
        self._rest: BoundPlan | None = None

    @property
    def varying(self) -> Collection[int]:
        """The steps that differ from one binding to the next, in order."""
        return self._varying.keys()

    @property
    def most(self) -> int:
        """For how many sets of places it is reasonable to be bound at a time."""
        return max(MIN_BOUND, MAX_NBYTES // max(1, self._nbytes))

    def bound(
        self,
        backend: LocalBackend,
        addresses: Mapping[int, int],
        memory: HostMemory,
    ) -> BoundPlan:
        """The plan with buffers (number → address) where they lie now.

        What binding steps anew takes of the host's memory is claimed before they are, but for the
        first time, for as long as they live. Raises `OutOfMemoryError`.
        """
        rest = self._rest
        if rest is None:
            whole = backend.bind(
                self._plan, self._programs, self._bodies, addresses, self._assignment
            )
            # What has nothing to do at one place has nothing to do at any.
            for index in [*self._varying]:
                if whole.steps[index].program is None and not whole.steps[index].thunks:
                    del self._varying[index]
            # What is lent is its owner's to keep alive.
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
        """What written code is given for a binding to these addresses (`objects`, by varying
        steps), to be made anew for others."""
        elsewhere = [
            [buffer.where(addresses) for buffer in buffers if buffer.number in addresses]
            for buffers in self._varying.values()
        ]
        return PlacedObjects.of(zip(objects, elsewhere, strict=True), region_of)

    def bring_back(self, buffers: Iterable[Buffer], backend: LocalBackend) -> None:
        """What lies in threads' own bytes comes to the addresses of its buffers."""
        for buffer in buffers:
            assert self._rest is not None, "it has run"
            assert buffer.address is not None, "it lies in a space"
            region = backend.region(buffer.space, buffer.address, buffer.size_per_bank)
            region[...] = self._rest.own_bytes.of(self._assignment.buffers[buffer.number])

    def clear(self) -> None:
        """Keep nothing for the next time."""
        self._rest = None


def _touched_by(step: Step) -> tuple[int, ...]:
    """The numbers of the buffers whose addresses a step is bound to."""
    if isinstance(step, Allocate):
        return (step.buffer.number,)
    if isinstance(step, Copy):
        return step.source.buffer, step.target.buffer
    if isinstance(step, Execute):
        return tuple(dict.fromkeys([i.buffer for i in (*step.inputs, *step.outputs)]))
    return ()

"""The steps of a recording bound to bytes, for any places of its sources and results.

Only what touches such places differs from one binding to the next: that is bound once for each set
of addresses, the rest once for all. Where written code is given arrays alone (`placed_objects`)
steps at other places are bound only for hooks, and for listeners for whom no code is written yet.
Comes in: a plan that moves nothing, and addresses. Goes out: bound plans that share steps. Must not
know leases, or when a binding runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from stitch.memory import LENT_ADDRESSES
from stitch.planner import Allocate, Copy, Execute, Plan, Step
from stitch.program import Program
from stitch.runtime.backends import BoundPlan, BoundStep, LocalBackend
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.recording.placed_objects import PlacedObjects, RegionOf

#: Bound steps that a recording keeps, for each of its steps that are bound more than once: so many,
#: or as many as may take so many bytes of the host's memory, but always some.
MAX_PARTS = 256
MAX_NBYTES = 128 << 20
MIN_PARTS = 32

#: A step of the plan, and the addresses of those of its buffers that may lie elsewhere.
_Part = tuple[int, tuple[int, ...]]


class BoundParts:
    """The bound steps of one recording."""

    def __init__(
        self,
        plan: Plan,
        results: Collection[int],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        nbytes: Sequence[int],
    ) -> None:
        """`results`: the buffers of the results, which lie elsewhere each time, as sources do;
        `nbytes`: what binding each task's program takes of the host's memory."""
        self._plan, self._programs, self._bodies = plan, programs, bodies
        self._buffers = {b.number: b for b in plan.request.buffers}
        self._buffers |= {s.buffer.number: s.buffer for s in plan.steps if isinstance(s, Allocate)}
        inside = {b.number for b in plan.request.buffers if b.address is not None} | set(results)
        touched = ((i, _touched_by(step)) for i, step in enumerate(plan.steps))
        #: The steps that are bound anew for other places: all buffers of each, and those that may
        #: lie elsewhere.
        self._varying = {
            index: (
                tuple([self._buffers[number] for number in numbers]),
                tuple([number for number in numbers if number in inside]),
            )
            for index, numbers in touched
            if not inside.isdisjoint(numbers)
        }
        self._nbytes = {
            index: nbytes[step.task] if isinstance(step, Execute) else 0
            for index, step in enumerate(plan.steps)
            if index in self._varying
        }
        self._parts: OrderedDict[_Part, BoundStep] = OrderedDict()
        #: The others, once they are bound.
        self._rest: BoundPlan | None = None

    @property
    def varying(self) -> Collection[int]:
        """The steps that differ from one binding to the next, in order."""
        return self._varying.keys()

    @property
    def most(self) -> int:
        """For how many sets of places it is reasonable to be bound at a time."""
        return max(MIN_PARTS, MAX_NBYTES // max(1, sum(self._nbytes.values())))

    def bound(
        self,
        backend: LocalBackend,
        addresses: Mapping[int, int],
        claim: Callable[[int], object],
    ) -> BoundPlan:
        """The plan with buffers (number → address) where they lie now.

        `claim` is told what binding steps anew takes, before they are, but for the first time; what
        it gives lives as long as they do.
        """
        if self._rest is None:
            return self._first(backend, addresses)
        wanted = self._wanted(addresses)
        known = {index: self._parts.get(part) for index, part in wanted.items()}
        missing = [index for index, step in known.items() if step is None]
        claimed = claim(sum([self._nbytes[index] for index in missing])) if missing else None
        steps: dict[int, BoundStep] = {}
        for index, step in known.items():
            if step is None:
                step = backend.bind_step(
                    self._plan.steps[index], self._programs, self._bodies, self._varying[index][0],
                    addresses, self._rest, claimed,
                )  # fmt: skip
            steps[index] = step
        self._keep(wanted, steps)
        return self._rest.with_steps(steps)

    def placed(
        self, objects: Sequence[Sequence[object]], addresses: Mapping[int, int],
        region_of: RegionOf,
    ) -> PlacedObjects | None:  # fmt: skip
        """What written code is given for a binding to these addresses (`objects`, by varying
        steps), to be made anew for others."""
        inside = [
            [self._buffers[number].where(addresses) for number in numbers]
            for _, numbers in self._varying.values()
        ]
        return PlacedObjects.of(zip(objects, inside, strict=True), region_of)

    def _wanted(self, addresses: Mapping[int, int]) -> dict[int, _Part]:
        return {
            index: (index, tuple([addresses[number] for number in numbers]))
            for index, (_, numbers) in self._varying.items()
        }

    def _first(self, backend: LocalBackend, addresses: Mapping[int, int]) -> BoundPlan:
        """All steps; what they leave undone is the same everywhere."""
        whole = backend.bind(self._plan, self._programs, self._bodies, addresses)
        for index in [*self._varying]:
            if whole.steps[index].program is None and not whole.steps[index].thunks:
                del self._varying[index]
        wanted = self._wanted(addresses)
        self._rest = whole.with_steps(dict.fromkeys(wanted, BoundStep(())))
        self._keep(wanted, whole.steps)
        return whole

    def _keep(
        self, wanted: Mapping[int, _Part], steps: Mapping[int, BoundStep] | Sequence[BoundStep]
    ) -> None:
        """For the next binding to these addresses; what is lent is its owner's to keep alive."""
        for index, part in wanted.items():
            if max(part[1]) < LENT_ADDRESSES:
                self._parts[part] = steps[index]
                self._parts.move_to_end(part)
        most = min(MAX_PARTS, self.most) * len(self._varying)
        while len(self._parts) > most:
            self._parts.popitem(last=False)

    def clear(self) -> None:
        """Keep nothing for the next time."""
        self._parts.clear()
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

"""Plan a batch: make a new plan, or rebind one of a cached executable to the current addresses.

A plan is first made against a snapshot in which all output slots are occupied and unreferenced
values stay, so that running it changes nothing but its results. If that would need moves or
evictions, or does not fit, it is made against the actual state, and output slots are revoked, least
recently run first. If only addresses prevent the replay of an executable, its plan is rebound
(`planner.rebind_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.errors import StitchError
from stitch.planner import Plan, PlanRequest, copy_cost, plan, predicted_cost, rebind_plan
from stitch.program import Space
from stitch.runtime.recording.next_uses import NextUses
from stitch.runtime.recording.recording import Executable
from stitch.runtime.recording.task_batch import TaskBatch
from stitch.runtime.values import ConstantRecord, MemorySnapshot, OutputSlots, effects_of
from stitch.tasks import NumberedTask

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, its snapshot, and the output slots whose spare memory it uses.

    `only_results`: it changes nothing but its results, for any source addresses. `is_known`: its
    steps are those of an earlier plan, rebound.
    """

    plan: Plan
    picture: MemorySnapshot
    leases: list[OutputSlots]
    only_results: bool
    is_known: bool = False


class WindowPlans:
    """Makes and rebinds the plans for the batches of one device."""

    def __init__(self, device: RuntimeDevice, next_uses: NextUses) -> None:
        self._device = device
        self._next_uses = next_uses

    def placed(
        self, variants: Sequence[Executable], window: TaskBatch, kept: tuple[bool, ...]
    ) -> Planned | None:
        """Rebind the plan of an executable of the same work to the current addresses.

        Returns None if no plan fits, or a constant was evicted.
        """
        taken = self._device.records.all_allocators()
        requests: dict[tuple[bool, frozenset[Space]], tuple[PlanRequest, MemorySnapshot]] = {}
        for recording in variants if window.has_constants_placed else ():
            if not recording.may_be_placed:
                continue
            only_results, spaces = asked = recording.places is None, recording.gives_way_in
            if asked not in requests:
                staying = _passing(window, kept) if only_results else ()
                requests[asked] = self._request(window, kept, (), staying, spaces=spaces)
            request, picture = requests[asked]
            plan = rebind_plan(recording.plan, request, taken)
            if plan is not None:
                return Planned(plan, picture, [], only_results, is_known=True)
        return None

    def planned(self, window: TaskBatch, kept: tuple[bool, ...]) -> Planned:
        """Plan a batch in the current state.

        Constants keep their addresses, unless one that it reads is evicted, memory is short, or
        evicting other values costs more than fetching constants again.
        """
        best: Planned | None = None
        if window.has_constants_placed:
            try:
                best = self._planned_around(window, kept)
            except StitchError:
                if not self._constants_may_leave(tuple(Space)):
                    raise
            else:
                if not self._constants_may_leave(best.plan.pressured_spaces):
                    return best
        try:
            other = self._planned_around(window, kept, window.constants)
        except (StitchError, MemoryError):
            if best is None:
                raise
            return best
        return other if best is None else min(best, other, key=_foreseen)

    def _constants_may_leave(self, spaces: Collection[Space]) -> bool:
        """Return whether these spaces contain a constant, and eviction is allowed."""
        return self._device.spills and any(
            buffer.holds_constant and buffer.space in spaces
            for buffer in self._device.records.all_buffers().values()
        )

    def _planned_around(
        self, window: TaskBatch, kept: tuple[bool, ...],
        constants: Sequence[ConstantRecord] | None = None,
    ) -> Planned:  # fmt: skip
        """Plan a batch; `constants`: those that it reads, if all constants may be evicted."""
        records, spills = self._device.records, self._device.spills
        spare = records.spare_leases()
        best: Planned | None = None
        staying = _passing(window, kept) if constants is None else ()
        request, picture = self._request(window, kept, (), staying, constants)
        # Revoke no slots, then the older half, then all; if nothing has to stay, the first snapshot
        # is the actual state.
        counts = dict.fromkeys((0, len(spare) // 2, len(spare)))
        to_try = [count for count in counts if picture.keeps_some or count]
        try:
            first = plan(request, spills=spills)
            only_results = (
                constants is None
                and first.moves_nothing
                and not _reads_fixed(first, window)
                and effects_of(first, records.desc_key).is_simple
            )
            if only_results:
                return Planned(first, picture, [], True)
            if not picture.keeps_some:
                best = Planned(first, picture, [], False)
        except StitchError:
            # Do not store the error: its frames would keep the caller's objects alive.
            if not to_try:
                raise
        # Keep the first plan unless revoking more slots is faster.
        for count in to_try:
            if best is not None and not best.plan.is_pressed:
                break
            leases = spare[:count]
            try:
                request, picture = self._request(window, kept, leases, (), constants)
                candidate = Planned(plan(request, spills=spills), picture, leases, False)
            except (StitchError, MemoryError):
                if best is None and count == to_try[-1]:
                    raise
                continue
            if best is None or _foreseen(candidate) < _foreseen(best):
                best = candidate
        assert best is not None, "the last that failed was raised"
        return best

    def _request(
        self,
        window: TaskBatch,
        kept: tuple[bool, ...],
        without: Collection[OutputSlots],
        staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None,
    ) -> tuple[PlanRequest, MemorySnapshot]:
        """Return a plan request and its snapshot.

        `spaces`: spaces to include, besides values with predicted uses (None: all).
        """
        device, values = self._device, window.values
        for value in values:
            value.place()
        picture = MemorySnapshot(
            device.records, window.sources, len(values), window.number, without, staying, constants,
            spaces, () if spaces is None else self._next_uses.expected(window),
        )  # fmt: skip
        tasks = window.graph.tasks
        if constants is not None:
            tasks = _with_constants(window, picture)
        picture.kept.update(i for i, alive in enumerate(kept) if alive)
        request = PlanRequest(
            device.machine, tasks, tuple(picture.buffers), tuple(picture.residents),
            frozenset(picture.kept), self._next_uses.predicted(window, kept, picture.bystanders),
        )  # fmt: skip
        return request, picture


def _with_constants(window: TaskBatch, picture: MemorySnapshot) -> tuple[NumberedTask, ...]:
    """Return the tasks of a batch with constants as additional inputs."""
    numbers = {constant: number for number, constant in picture.constants.items()}
    return tuple([
        task if agent is None else
        NumberedTask(
            agent.with_constants,
            (*task.inputs, *map(numbers.__getitem__, agent.constants)),
            task.outputs,
        )
        for task, agent in zip(window.graph.tasks, window.agents, strict=True)
    ])  # fmt: skip


def _foreseen(planned: Planned) -> tuple[float, int]:
    """Return the cost of a plan, including fetching the constants that it evicts again."""
    plan, picture = planned.plan, planned.picture
    left = {r.value for r in plan.final_values if len(r.instances) == 1}
    back = [
        copy_cost(plan.request.machine, *[instance.desc for instance in value.instances[:2]])
        for number, value in (*picture.constants.items(), *picture.bystanders.items())
        if value.is_constant and number in left and len(value.instances) > 1
    ]
    seconds, nbytes = predicted_cost(plan)
    # As in `predicted_cost`: equal times must not differ by rounding.
    seconds = round(seconds + sum(seconds for _, seconds in back), 15)
    return seconds, nbytes + sum(nbytes for nbytes, _ in back)


def _passing(window: TaskBatch, kept: tuple[bool, ...]) -> set[int]:
    """Return the unreferenced sources, which are freed after the run, except those overwritten by
    an output."""
    return {number for number, _ in window.sources if not kept[number]} - window.graph.taken_over()


def _reads_fixed(plan: Plan, window: TaskBatch) -> bool:
    """Return whether the plan may depend on a source being at a required address."""
    inside = {n for n, value in window.sources if not value.is_array or len(value.instances) > 1}
    return any(
        number in inside and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.inputs, task.transformation.inputs, strict=False)
    )

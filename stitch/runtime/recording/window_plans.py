"""Plans for windows: as things are now, or a recording's, placed where things lie now.

A plan is made in a picture in which all leases are occupied and what nobody will refer to stays
where it is, so that running it changes nothing but its results; where that asks for moves or
evictions, or does not fit, it is made in the true picture, and leases give their memory up, least
recently run first. Where a recording of the same work does not run only as things lie elsewhere,
its plan is placed where they lie now (`planner.rebind_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stitch.errors import StitchError
from stitch.planner import Plan, PlanRequest, copy_cost, plan, predicted_cost, rebind_plan
from stitch.program import Space
from stitch.runtime.recording.next_uses import NextUses
from stitch.runtime.recording.recording import Executable
from stitch.runtime.recording.site import Site
from stitch.runtime.recording.task_batch import TaskBatch
from stitch.runtime.values import AnyLease, ConstantRecord, MemorySnapshot, effects_of
from stitch.tasks import NumberedTask


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, the picture that it was made in, and the leases whose spare memory it takes.

    `only_results`: it changes nothing but its results, wherever its sources lie. `is_known`: its
    steps are those of an earlier one, bound to where things lie.
    """

    plan: Plan
    picture: MemorySnapshot
    leases: list[AnyLease]
    only_results: bool
    is_known: bool = False


class WindowPlans:
    """Makes and places the plans of one device's windows."""

    def __init__(self, device: Site, next_uses: NextUses) -> None:
        self._device = device
        self._next_uses = next_uses

    def placed(
        self, variants: Sequence[Executable], window: TaskBatch, kept: tuple[bool, ...]
    ) -> Planned | None:
        """The plan of a recording of the same work, bound to where things lie now; None where none
        finds its places, or constants have lost theirs."""
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
        """The plan for a window's work as things are; raises where there is none.

        Constants keep their places, unless one that it reads has none, there is no other room, or
        what gives way to them costs more than bringing them back does.
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
        """Whether one lies in these spaces, of whichever program, and something may leave DRAM."""
        return self._device.spills and any(
            buffer.holds_constant and buffer.space in spaces
            for buffer in self._device.records.all_buffers().values()
        )

    def _planned_around(
        self, window: TaskBatch, kept: tuple[bool, ...],
        constants: Sequence[ConstantRecord] | None = None,
    ) -> Planned:  # fmt: skip
        """The plan for a window's work; `constants`: those that it reads, where all may leave."""
        records, spills = self._device.records, self._device.spills
        spare = records.spare_leases()
        best: Planned | None = None
        staying = _passing(window, kept) if constants is None else ()
        request, picture = self._request(window, kept, (), staying, constants)
        # Nothing given up, then the older half, then all; where nothing stays that could leave, the
        # first picture is true.
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
            # No name keeps it: its own frames would, and with them all that a caller holds.
            if not to_try:
                raise
        # The first is kept unless more saves time.
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
        without: Collection[AnyLease],
        staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None,
    ) -> tuple[PlanRequest, MemorySnapshot]:
        """What is asked of the planner, and the picture that it is asked in: of these spaces, and
        of what is read later, as predicted (None: of all there is)."""
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
    """The tasks of a window, which read their programs' constants, too."""
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
    """What a plan costs, and bringing back the constants that leave in it."""
    plan, picture = planned.plan, planned.picture
    left = {r.value for r in plan.final_values if len(r.instances) == 1}
    back = [
        copy_cost(plan.request.machine, *[instance.desc for instance in value.instances[:2]])
        for number, value in (*picture.constants.items(), *picture.bystanders.items())
        if value.is_constant and number in left and len(value.instances) > 1
    ]
    seconds, nbytes = predicted_cost(plan)
    # As there: what takes as long must not differ by a rounding.
    seconds = round(seconds + sum(seconds for _, seconds in back), 15)
    return seconds, nbytes + sum(nbytes for nbytes, _ in back)


def _passing(window: TaskBatch, kept: tuple[bool, ...]) -> set[int]:
    """The sources that nobody will refer to: they are freed when the window has run, unless an
    output of its tasks takes their buffer."""
    return {number for number, _ in window.sources if not kept[number]} - window.graph.taken_over()


def _reads_fixed(plan: Plan, window: TaskBatch) -> bool:
    """Whether what it may leave out depends on where a source lies."""
    inside = {n for n, value in window.sources if not value.is_array or len(value.instances) > 1}
    return any(
        number in inside and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.inputs, task.transformation.inputs, strict=False)
    )

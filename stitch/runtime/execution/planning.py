"""Find the executable that runs a batch: a cached one, one whose plan is rebound, or a new one.

A plan is first made against a snapshot in which all output slots are occupied and unreferenced
values stay, so that running it changes nothing but its results. If that would need moves or
evictions, or does not fit, it is made against the actual state, and output slots are revoked, least
recently run first. If only addresses prevent the replay of an executable, its plan is rebound
(`planner.rebind_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stitch.errors import OutOfMemoryError, StitchError, TaskError
from stitch.memory import LENT_ADDRESSES
from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    Copy,
    Free,
    Plan,
    PlanRequest,
    Relocate,
    Step,
    ThreadAssignment,
    assign_threads,
    copy_cost,
    plan,
    predicted_cost,
    rebind_plan,
)
from stitch.program import Space
from stitch.runtime.backends import Agent, BoundPlan, LocalBackend
from stitch.runtime.events import PlanMade
from stitch.runtime.execution.executable import Binding, Executable, sharing
from stitch.runtime.execution.predictions import EvictionPrediction, NextUses
from stitch.runtime.execution.task_batch import TaskBatch
from stitch.runtime.executors import PreparedProgram, least_copy_microseconds
from stitch.runtime.history import Tally
from stitch.runtime.values import (
    ConstantRecord,
    Effects,
    Forms,
    MemorySnapshot,
    OutputSlots,
    Places,
    effects_of,
)
from stitch.tasks import NumberedTask

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, its snapshot, and the output slots whose spare memory it uses.

    `effects`: on the memory records. `only_results`: it changes nothing but its results, for any
    source addresses. `is_known`: its steps are those of an earlier plan, rebound.
    """

    plan: Plan
    effects: Effects
    picture: MemorySnapshot
    slot_sets: list[OutputSlots]
    only_results: bool
    is_known: bool = False


def _with_constants(batch: TaskBatch, picture: MemorySnapshot) -> tuple[NumberedTask, ...]:
    """Return the tasks of a batch with constants as additional inputs."""
    numbers = {constant: number for number, constant in picture.constants.items()}
    return tuple([
        task if agent is None else
        NumberedTask(
            agent.with_constants,
            (*task.inputs, *map(numbers.__getitem__, agent.constants)),
            task.outputs,
        )
        for task, agent in zip(batch.graph.tasks, batch.agents, strict=True)
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


def _passing(batch: TaskBatch, kept: tuple[bool, ...]) -> set[int]:
    """Return the unreferenced sources, which are freed after the run, except those overwritten by
    an output."""
    return {number for number, _ in batch.sources if not kept[number]} - batch.graph.taken_over()


def _reads_fixed(plan: Plan, batch: TaskBatch) -> bool:
    """Return whether the plan may depend on a source being at a required address."""
    inside = {n for n, value in batch.sources if not value.is_array or len(value.instances) > 1}
    return any(
        number in inside and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.inputs, task.transformation.inputs, strict=False)
    )


def assign_threads_for(
    device: RuntimeDevice, plan: Plan, agents: Sequence[Agent | None]
) -> ThreadAssignment:
    """Assign a plan's steps to threads; plans that overwrite values use one thread."""
    if (
        device.inter_op_threads == 1
        or plan.overwrites
        or device.backend.why_single_thread is not None
    ):
        return SINGLE_THREAD
    return assign_threads(
        plan, [_microseconds(step, agents) for step in plan.steps], device.inter_op_threads
    )


def _microseconds(step: Step, agents: Sequence[Agent | None]) -> float | None:
    """Return a lower bound of a step's time; None if nothing may run in parallel with it."""
    if isinstance(step, Allocate | Free):
        return 0.0
    if isinstance(step, Copy):
        return least_copy_microseconds(step.nbytes)
    if isinstance(step, Relocate):
        return None
    agent = agents[step.task]
    assert agent is not None, "copies are no executions"
    return agent.least_microseconds


def on_threads(
    kernels: Sequence[PreparedProgram | None],
    plan: Plan,
    assignment: ThreadAssignment,
    backend: LocalBackend,
) -> list[PreparedProgram | None]:
    """Return the programs of a plan's tasks, prepared for the threads on which they run."""
    own: dict[tuple[int, int], PreparedProgram] = {}
    there = [*kernels]
    for task, thread in assignment.of_tasks(plan).items():
        kernel = kernels[task]
        assert kernel is not None, "host functions run on the caller's thread"
        known = thread, id(kernel)
        if known not in own:
            own[known] = kernel.on_thread(backend.workspace(thread))
        there[task] = own[known]
    return there


#: Limits for the bindings of one set of output slots (LRU); lower for lent sources, which a binding
#: keeps alive.
MAX_BINDINGS = 32
MAX_LENT_BINDINGS = 8


class BatchPlanner:
    """Finds and creates the executables of one device."""

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._next_uses = NextUses()

    def binding(
        self, batch: TaskBatch, kept: tuple[bool, ...], at_most: int | None = None
    ) -> Binding | None:
        """Return the binding that runs a batch now.

        If planning or binding raises, nothing has changed.

        Args:
            batch: The batch.
            kept: Which values were referenced when the batch left the queue.
            at_most: If given, accept only a plan that changes nothing but its results, with at most
                so many copies; otherwise return None.
        """
        device, graph = self._device, batch.graph
        forms, places = batch.forms()
        recent: Executable | None = graph.recent
        if (
            recent is not None
            and recent.generation == device.records.generation
            and recent.kind is not None
            and recent.kind.kept == kept
            and recent.kind.forms == forms
            and not (self._next_uses.is_wanted or at_most is not None)
        ):
            # The steady state: nothing has changed since the last run.
            binding = self._steady(recent, places)
            if binding is not None:
                device.plan_cache.use(recent.kind)
                return binding
        variants = device.plan_cache.of(graph, kept, forms)
        if at_most is not None:
            variants = [v for v in variants if v.places is None and len(v.plan.copies) <= at_most]
        binding = self.again(variants, places, batch)
        if binding is None or self._next_uses.is_wanted:
            self._next_uses.note(batch)
        if binding is None:
            self._next_uses.learn()
            planned = self._rebound(variants, batch, kept)
            try:
                planned = planned or self.planned(batch, kept)
            except StitchError:
                if at_most is None:
                    raise
            # Else it is better planned with later tasks.
            if planned is not None and (
                at_most is None or (planned.only_results and len(planned.plan.copies) <= at_most)
            ):
                binding = self._new(batch, planned, kept, forms, places, at_most is not None)
        if binding is not None and binding.slots is not None:
            graph.recent = binding.executable
        return binding

    def _steady(self, executable: Executable, places: Places) -> Binding | None:
        """Return the binding with code, to the slots to use next, of an executable that may run."""
        device, idle = self._device, executable.idle
        if (
            len(idle) < executable.least_idle
            or device.copies_forbidden
            or (idle[-1].shares and idle[-1].is_blocked)
        ):
            return None
        binding = idle[-1].bindings.get(places)
        straight = None if binding is None else binding.straight
        return binding if straight is not None and straight.observers == device.observers else None

    # -- again -----------------------------------------------------------------------------------

    def again(
        self, variants: Sequence[Executable], places: Places, batch: TaskBatch | None = None
    ) -> Binding | None:
        """Return the binding of a cached executable that may run now.

        Returns None if none may, or if there is no memory for another binding; a new plan then
        frees memory first.

        Args:
            variants: Executables of the work.
            places: Addresses of the sources.
            batch: The batch, if evictions are allowed.
        """
        device = self._device
        if not variants:
            return None
        if variants[0].generation == device.records.generation:
            # Nothing has changed since the last run.
            binding = self._steady(variants[0], places)
            if binding is not None:
                return binding
        try:
            binding = self._again(variants, places, batch)
            if binding is None and len(variants) > 1:
                # The work repeats: spare output slots of other work may be revoked.
                binding = self._again(variants, places, batch, clear=True)
        except OutOfMemoryError:
            return None
        if binding is not None:
            binding.executable.note_peaks(device.records)
        return binding

    def _again(
        self, variants: Sequence[Executable], places: Places, batch: TaskBatch | None, *,
        clear: bool = False,
    ) -> Binding | None:  # fmt: skip
        """As `again`; `clear`: first revoke spare output slots of others in its working regions."""
        device = self._device
        records, shared = device.records, sharing(places)
        for executable in variants:
            if executable.shared != shared or executable.is_dropped:
                continue
            if executable.places is not None and executable.places != places:
                continue
            if device.copies_forbidden and executable.plan.copies:
                continue
            if executable.foresight is not None and not self._holds(executable.foresight, batch):
                continue
            if clear and executable.generation != records.generation:
                executable.evict_conflicting_slots(records)
            if not executable.holds(records):
                continue
            if executable.places is not None:
                # Rebind if an interrupt came before the binding was stored.
                return executable.alone or self._bound(executable, None, places)
            binding = self._at(executable, places)
            if binding is not None:
                return binding
        return None

    def _holds(self, foresight: EvictionPrediction, batch: TaskBatch | None) -> bool:
        """Return whether the evictions are still right; False without a batch."""
        uses = self._next_uses
        return batch is not None and foresight.holds(
            self._device.records, uses.version, partial(uses.next_use, batch)
        )

    def _at(self, executable: Executable, places: Places) -> Binding | None:
        slots = self._slots_of(executable)
        if slots is None:
            return None
        binding = slots.bindings.get(places) or self._bound(executable, slots, places)
        if not binding.serves(self._device.observers):
            # Bind now, before anything has started: the memory reservation may fail.
            _ = binding.bound
        return binding

    def _slots_of(self, executable: Executable) -> OutputSlots | None:
        device = self._device
        return executable.take_places(
            device.records, device.plan_cache.works, device.host_memory.reuse
        )

    # -- planning ---------------------------------------------------------------------------------

    def _rebound(
        self, variants: Sequence[Executable], batch: TaskBatch, kept: tuple[bool, ...]
    ) -> Planned | None:
        """Rebind the plan of an executable of the same work to the current addresses.

        Returns None if no plan fits, or a constant was evicted.
        """
        taken = self._device.records.all_allocators
        requests: dict[tuple[bool, frozenset[Space]], tuple[PlanRequest, MemorySnapshot]] = {}
        for executable in variants if batch.has_constants_placed else ():
            if not executable.may_be_placed:
                continue
            only_results, spaces = asked = executable.places is None, executable.gives_way_in
            if asked not in requests:
                staying = _passing(batch, kept) if only_results else ()
                requests[asked] = self._request(batch, kept, (), staying, spaces=spaces)
            request, picture = requests[asked]
            plan = rebind_plan(executable.plan, request, taken)
            if plan is not None:
                effects = effects_of(plan, self._device.desc_key)
                return Planned(plan, effects, picture, [], only_results, is_known=True)
        return None

    def planned(self, batch: TaskBatch, kept: tuple[bool, ...]) -> Planned:
        """Plan a batch in the current state.

        Constants keep their addresses, unless one that it reads is evicted, memory is short, or
        evicting other values costs more than fetching constants again.
        """
        best: Planned | None = None
        if batch.has_constants_placed:
            try:
                best = self._planned_around(batch, kept)
            except StitchError:
                if not self._constants_may_leave(tuple(Space)):
                    raise
            else:
                if not self._constants_may_leave(best.plan.pressured_spaces):
                    return best
        try:
            other = self._planned_around(batch, kept, batch.constants)
        except (StitchError, MemoryError):
            if best is None:
                raise
            return best
        return other if best is None else min(best, other, key=_foreseen)

    def _constants_may_leave(self, spaces: Collection[Space]) -> bool:
        """Return whether these spaces contain a constant, and eviction is allowed."""
        return self._device.spills and any(
            buffer.holds_constant and buffer.space in spaces
            for buffer in self._device.records.buffers.values()
        )

    def _planned_around(
        self, batch: TaskBatch, kept: tuple[bool, ...],
        constants: Sequence[ConstantRecord] | None = None,
    ) -> Planned:  # fmt: skip
        """Plan a batch; `constants`: those that it reads, if all constants may be evicted."""
        records, spills = self._device.records, self._device.spills
        spare = records.spare_slots()
        best: Planned | None = None
        staying = _passing(batch, kept) if constants is None else ()
        request, picture = self._request(batch, kept, (), staying, constants)
        # Revoke no slots, then the older half, then all; if nothing has to stay, the first snapshot
        # is the actual state.
        counts = dict.fromkeys((0, len(spare) // 2, len(spare)))
        to_try = [count for count in counts if picture.keeps_some or count]
        try:
            first = plan(request, spills=spills)
            effects = effects_of(first, records.desc_key)
            only_results = (
                constants is None
                and first.moves_nothing
                and not _reads_fixed(first, batch)
                and effects.is_simple
            )
            if only_results:
                return Planned(first, effects, picture, [], True)
            if not picture.keeps_some:
                best = Planned(first, effects, picture, [], False)
        except StitchError:
            # Do not store the error: its frames would keep the caller's objects alive.
            if not to_try:
                raise
        # Keep the first plan unless revoking more slots is faster.
        for count in to_try:
            if best is not None and not best.plan.is_pressed:
                break
            slot_sets = spare[:count]
            try:
                request, picture = self._request(batch, kept, slot_sets, (), constants)
                made = plan(request, spills=spills)
                effects = effects_of(made, records.desc_key)
                candidate = Planned(made, effects, picture, slot_sets, False)
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
        batch: TaskBatch,
        kept: tuple[bool, ...],
        without: Collection[OutputSlots],
        staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None,
    ) -> tuple[PlanRequest, MemorySnapshot]:
        """Return a plan request and its snapshot.

        `spaces`: spaces to include, besides values with predicted uses (None: all).
        """
        device, values = self._device, batch.values
        for value in values:
            value.place()
        picture = MemorySnapshot(
            device.records.buffers, batch.sources, len(values), batch.number, without,
            staying, constants, spaces, () if spaces is None else self._next_uses.expected(batch),
        )  # fmt: skip
        tasks = batch.graph.tasks
        if constants is not None:
            tasks = _with_constants(batch, picture)
        picture.kept.update(i for i, alive in enumerate(kept) if alive)
        request = PlanRequest(
            device.machine, tasks, tuple(picture.buffers), tuple(picture.residents),
            frozenset(picture.kept), self._next_uses.predicted(batch, kept, picture.bystanders),
        )  # fmt: skip
        return request, picture

    # -- new -------------------------------------------------------------------------------------

    def _new(
        self, batch: TaskBatch, planned: Planned, kept: tuple[bool, ...], forms: Forms,
        places: Places, alternates: bool,
    ) -> Binding:  # fmt: skip
        """Create an executable.

        `alternates`: this plan runs in turn with others, as the stages of a loop; allocate its
        outputs outside their working regions.
        """
        device = self._device
        plan, only_results = planned.plan, planned.only_results
        if device.copies_forbidden and plan.copies:
            raise TaskError(
                "this work needs a copy, which forbid_copies() forbids",
                where=plan.copies[0].reason,
                remedy="allow copies here, or "
                + ("drop programs, so that there is room for the constants of all"
                   if _fetches_constants(plan) else "compile the programs for matching layouts"),
            )  # fmt: skip
        agents = batch.agents
        assignment = assign_threads_for(device, plan, agents) if only_results else SINGLE_THREAD
        claim = device.host_memory.take(plan, agents, device.make_room, assignment)
        device.records.revoke(
            [slots for slots in planned.slot_sets if id(slots) in device.records.slot_sets]
        )
        kernels = [None if a is None else a.prepared() for a in agents]
        executable = Executable(
            plan, planned.effects, kept,
            [number for number, value in batch.sources if not value.is_array],
            None if only_results else places,
            sharing(places), on_threads(kernels, plan, assignment, device.backend),
            [None if a is None else a.program for a in agents],
            [0 if a is None else a.host_bytes.bound for a in agents],
            _has_fixed_results(plan), batch.constants, assignment,
        )  # fmt: skip
        if not only_results:
            executable.snapshot_neighbours(device.records, planned.picture)
        executable.claim = claim
        device.plan_cache.plans_made += not planned.is_known
        known = device.plan_cache.of(batch.graph, kept, forms)
        if plan.leaving:
            self._next_uses.is_wanted = True
            before = [old.foresight for old in known if old.places == executable.places]
            executable.foresight = EvictionPrediction(plan.request, self._next_uses.version, before)
        executable.makes_way = alternates or bool(known)
        device.plan_cache.add(batch.graph, kept, forms, executable)
        slots = None
        if only_results:
            executable.generation = device.records.generation
            slots = self._slots_of(executable)
            assert slots is not None, "its own places are free"
        executable.note_peaks(device.records)
        return self._bound(executable, slots, places, is_new=not planned.is_known)

    # -- binding ---------------------------------------------------------------------------------

    def _bound(
        self, executable: Executable, slots: OutputSlots | None, places: Places, *,
        is_new: bool = False,
    ) -> Binding:  # fmt: skip
        """Bind a plan to addresses and store the binding. `is_new`: the plan was made for this."""
        device, plan, parts = self._device, executable.plan, executable.parts
        bound: BoundPlan | Callable[[], BoundPlan]
        addresses: Mapping[int, int] = {}
        if slots is None or parts is None:
            bound = device.backend.bind(plan, executable.programs, executable.bodies)
        else:
            addresses = executable.addresses_for(slots, places)
            bound = partial(parts.bound, device.backend, addresses, device.host_memory)
            if not executable.has_code_anywhere(device.observers):
                bound = bound()
        if isinstance(bound, BoundPlan) and executable.each is None:
            executable.on_first_bind(bound)
        assert executable.each is not None, "its code is written once it has run"
        device.plan_cache.bindings_made += 1
        index = device.plan_cache.bindings_made
        tally = Tally(plan, executable.each, addresses, is_new=is_new)
        device.history.add(index, tally)
        binding = Binding(index, executable, bound, slots, addresses, tally)
        if slots is None:
            executable.alone = binding
        else:
            bindings = slots.bindings
            bindings[places] = binding
            if len(bindings) > 1:
                most = MAX_LENT_BINDINGS if _reads_lent(places) else MAX_BINDINGS
                while len(bindings) > most:
                    bindings.pop(next(iter(bindings))).drop()
        if device.events.active:
            device.events.tell(PlanMade(index, binding.plan))
        return binding


def _fetches_constants(plan: Plan) -> bool:
    """Return whether all copies of a plan fetch constants from their files."""
    outside = {b.number for b in plan.request.buffers if b.address is None}
    files = outside - plan.request.entering()
    return all(isinstance(c, Copy) and c.source.buffer in files for c in plan.copies)


def _reads_lent(places: Places) -> bool:
    """Return whether a source is in a lent buffer."""
    return any(a is not None and a >= LENT_ADDRESSES for _, addresses in places for a in addresses)


def _has_fixed_results(plan: Plan) -> bool:
    """Return whether a result has a required address, or overwrites another value."""
    final = {resident.value for resident in plan.final_values}
    own = {instance.buffer for resident in plan.final_values for instance in resident.instances}
    return not own.isdisjoint(plan.fixed) or any(
        number in final and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.outputs, task.transformation.outputs, strict=True)
    )

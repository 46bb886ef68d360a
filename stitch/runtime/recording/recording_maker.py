"""From a window to what runs: a recording of the same work, or a new one.

Comes in: windows. Goes out: bindings that may run now. A plan is made in a
picture in which all leases are occupied and what nobody will refer to stays where it is, so that
running it changes nothing but its results; where that asks for moves or evictions, or does not fit,
it is made in the true picture, and leases give their memory up, least recently run first. Where a
recording of the same work does not run only as things lie elsewhere, its plan is placed where they
lie now (`planner.placed`). Must not know handles, or how a binding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from stitch.errors import OutOfMemoryError, StitchError, TaskError
from stitch.memory import LENT_ADDRESSES
from stitch.planner import ONE_LANE, Copy, Plan, PlanRequest, copy_cost, foreseen_cost, placed, plan
from stitch.program import Space
from stitch.runtime.backends import BoundPlan
from stitch.runtime.events import PlanMade
from stitch.runtime.history import Tally
from stitch.runtime.recording.foresight import Foresight
from stitch.runtime.recording.lane_work import in_lanes, lanes_for
from stitch.runtime.recording.next_uses import NextUses
from stitch.runtime.recording.recorded_work import Site
from stitch.runtime.recording.recording import (
    MAX_BINDINGS,
    MAX_LENT_BINDINGS,
    Binding,
    Recording,
    sharing,
)
from stitch.runtime.recording.window import Window
from stitch.runtime.values import (
    AnyLease,
    ConstantRecord,
    Forms,
    Lease,
    Picture,
    Places,
    effects_of,
)
from stitch.tasks import NumberedTask


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, the picture that it was made in, and the leases whose spare memory it takes.

    `only_results`: it changes nothing but its results, wherever its sources lie. `is_known`: its
    steps are those of an earlier one, bound to where things lie.
    """

    plan: Plan
    picture: Picture
    leases: list[AnyLease]
    only_results: bool
    is_known: bool = False


class RecordingMaker:
    """Finds and makes the recordings of one device."""

    def __init__(self, device: Site) -> None:
        self._device = device
        self._next_uses = NextUses()

    def binding(
        self, window: Window, kept: tuple[bool, ...], at_most: int | None = None
    ) -> Binding | None:
        """What runs a window now; raises what planning and binding raise, with nothing changed.

        `kept`: which values are still wanted, said when the window left the queue. With `at_most`
        only a plan will do that changes nothing but its results, by at most so many copies: None
        where there is none.
        """
        device = self._device
        forms, places = window.forms()
        variants = device.recordings.of(window.graph, kept, forms)
        if at_most is not None:
            variants = [v for v in variants if v.places is None and len(v.plan.copies) <= at_most]
        binding = self.again(variants, places, window)
        if binding is None or self._next_uses.is_wanted:
            self._next_uses.note(window)
        if binding is None:
            self._next_uses.learn()
            planned = self._placed(variants, window, kept)
            planned = planned or self._planned_alone(window, kept, at_most)
            if planned is not None:
                binding = self._new(window, planned, kept, forms, places, at_most is not None)
        return binding

    def _planned_alone(
        self, window: Window, kept: tuple[bool, ...], at_most: int | None
    ) -> Planned | None:
        """The plan for a window; None where `at_most` asks for less: then the window is better
        planned with what comes next."""
        if at_most is None:
            return self.planned(window, kept)
        with suppress(StitchError):
            planned = self.planned(window, kept)
            if planned.only_results and len(planned.plan.copies) <= at_most:
                return planned
        return None

    # -- again -----------------------------------------------------------------------------------

    def again(
        self, variants: Sequence[Recording], places: Places, window: Window | None = None
    ) -> Binding | None:
        """The one of these recordings that may run as things are, on sources at these places, with
        its results where nothing lies; None where none may, or no memory is left to bind it once
        more: then a new plan makes room first. `window`: what is to run, where that may take other
        values' places."""
        device = self._device
        if not variants:
            return None
        recording = variants[0]
        lease = recording.ready()
        if (
            recording.generation == device.records.generation
            and lease is not None
            and not device.copies_forbidden
        ):
            # The steady state: all is as it was when this ran last.
            binding = lease.bindings.get(places)
            straight = None if binding is None else binding.straight
            if straight is not None and straight.observers == device.observers:
                return binding
        try:
            binding = self._again(variants, places, window)
            if binding is None and len(variants) > 1:
                # Not its first time round: what others' leases have to spare may well be taken.
                binding = self._again(variants, places, window, clear=True)
        except OutOfMemoryError:
            return None
        return binding

    def _again(
        self, variants: Sequence[Recording], places: Places, window: Window | None, *,
        clear: bool = False,
    ) -> Binding | None:  # fmt: skip
        """As `again`; `clear`: after spare leases that lie in its way are revoked."""
        device = self._device
        records, shared = device.records, sharing(places)
        for recording in variants:
            if recording.shared != shared or recording.is_dropped:
                continue
            if recording.places is not None and recording.places != places:
                continue
            if device.copies_forbidden and recording.plan.copies:
                continue
            if recording.foresight is not None and not self._holds(recording.foresight, window):
                continue
            if clear and recording.generation != records.generation:
                recording.clear_way(records)
            if not recording.holds(records):
                continue
            if recording.places is not None:
                # An interrupt may have come between what it is and what it is bound to.
                return recording.alone or self._bound(recording, None, places)
            binding = self._at(recording, places)
            if binding is not None:
                return binding
        return None

    def _holds(self, foresight: Foresight, window: Window | None) -> bool:
        """Whether what it makes give way would still be chosen; nobody knows but for a window."""
        uses = self._next_uses
        return window is not None and foresight.holds(
            self._device.records, uses.version, partial(uses.next_use, window)
        )

    def _at(self, recording: Recording, places: Places) -> Binding | None:
        lease = self._lease(recording)
        if lease is None:
            return None
        binding = lease.bindings.get(places) or self._bound(recording, lease, places)
        if not binding.serves(self._device.observers):
            # Now, where nothing has begun: what it takes of the host's memory may be refused.
            _ = binding.bound
        return binding

    def _lease(self, recording: Recording) -> Lease[Binding] | None:
        device = self._device
        return recording.take_places(
            device.records, device.recordings.works, device.host_memory.take_again
        )

    # -- new -------------------------------------------------------------------------------------

    def _new(
        self, window: Window, planned: Planned, kept: tuple[bool, ...], forms: Forms,
        places: Places, is_one_of_many: bool,
    ) -> Binding:  # fmt: skip
        """A new recording; `is_one_of_many`: it alternates with those that there are, as the stages
        of a loop do, so its results lie outside of where these work."""
        device = self._device
        plan, only_results = planned.plan, planned.only_results
        if device.copies_forbidden and plan.copies:
            raise TaskError(
                "a copy would be needed where copies are forbidden",
                where=plan.copies[0].reason,
                remedy="allow copies here, or "
                + ("drop programs, so that there is room for the constants of all"
                   if _fetches_constants(plan) else "compile the programs for matching layouts"),
            )  # fmt: skip
        agents = window.agents
        lanes = lanes_for(device, plan, agents) if only_results else ONE_LANE
        claim = device.host_memory.take(plan, agents, device.make_room, lanes)
        device.records.revoke(
            [lease for lease in planned.leases if id(lease) in device.records.leases]
        )
        kernels = [None if a is None else a.prepared() for a in agents]
        recording = Recording(
            plan, effects_of(plan, device.desc_key), kept, None if only_results else places,
            sharing(places), in_lanes(kernels, plan, lanes, device.backend),
            [None if a is None else a.program for a in agents],
            [0 if a is None else a.host_bytes.bound for a in agents],
            _has_fixed_results(plan), window.constants, lanes,
        )  # fmt: skip
        if not only_results:
            recording.look_around(device.records, planned.picture)
        recording.claim = claim
        device.recordings.plans_made += not planned.is_known
        known = device.recordings.of(window.graph, kept, forms)
        if plan.chooses_who_leaves:
            self._next_uses.is_wanted = True
            before = [old.foresight for old in known if old.places == recording.places]
            recording.foresight = Foresight(plan.request, self._next_uses.version, before)
        recording.makes_way = is_one_of_many or bool(known)
        device.recordings.add(window.graph, kept, forms, recording)
        lease = None
        if only_results:
            recording.generation = device.records.generation
            lease = self._lease(recording)
            assert lease is not None, "its own places are free"
        return self._bound(recording, lease, places, is_new=not planned.is_known)

    def _placed(
        self, variants: Sequence[Recording], window: Window, kept: tuple[bool, ...]
    ) -> Planned | None:
        """The plan of a recording of the same work, bound to where things lie now; None where none
        finds its places, or constants have lost theirs."""
        taken = self._device.records.all_allocators()
        requests: dict[tuple[bool, frozenset[Space]], tuple[PlanRequest, Picture]] = {}
        for recording in variants if window.has_constants_placed else ():
            if not recording.may_be_placed:
                continue
            only_results, spaces = asked = recording.places is None, recording.gives_way_in
            if asked not in requests:
                staying = _passing(window, kept) if only_results else ()
                requests[asked] = self._request(window, kept, (), staying, spaces=spaces)
            request, picture = requests[asked]
            plan = placed(recording.plan, request, taken)
            if plan is not None:
                return Planned(plan, picture, [], only_results, is_known=True)
        return None

    def planned(self, window: Window, kept: tuple[bool, ...]) -> Planned:
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
                if not self._constants_may_leave(best.plan.gives_way_in):
                    return best
        try:
            other = self._planned_around(window, kept, window.constants)
        except StitchError:
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
        self, window: Window, kept: tuple[bool, ...],
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
            except StitchError:
                if best is None and count == to_try[-1]:
                    raise
                continue
            if best is None or _foreseen(candidate) < _foreseen(best):
                best = candidate
        assert best is not None, "the last that failed was raised"
        return best

    def _request(
        self,
        window: Window,
        kept: tuple[bool, ...],
        without: Collection[AnyLease],
        staying: Collection[int],
        constants: Sequence[ConstantRecord] | None = None,
        spaces: Collection[Space] | None = None,
    ) -> tuple[PlanRequest, Picture]:
        """What is asked of the planner, and the picture that it is asked in: of these spaces, and
        of what is read later, as predicted (None: of all there is)."""
        device, values = self._device, window.values
        for value in values:
            value.place()
        picture = Picture(
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

    # -- binding ---------------------------------------------------------------------------------

    def _bound(
        self, recording: Recording, lease: Lease[Binding] | None, places: Places, *,
        is_new: bool = False,
    ) -> Binding:  # fmt: skip
        """Bind a recording's plan to places; kept for the next time. `is_new`: the plan was made
        for this."""
        device, plan, parts = self._device, recording.plan, recording.parts
        bound: BoundPlan | Callable[[], BoundPlan]
        addresses: Mapping[int, int] = {}
        if lease is None or parts is None:
            bound = device.backend.bind(plan, recording.programs, recording.bodies)
        else:
            addresses = recording.addresses_for(lease, places)
            bound = partial(parts.bound, device.backend, addresses, device.host_memory)
            if not recording.has_code_anywhere(device.observers):
                bound = bound()
        if isinstance(bound, BoundPlan) and recording.each is None:
            recording.was_bound(bound)
        assert recording.each is not None, "its code is written once it has run"
        device.recordings.bindings_made += 1
        index = device.recordings.bindings_made
        tally = Tally(plan, recording.each, addresses, is_new=is_new)
        device.history.add(index, tally)
        binding = Binding(index, recording, bound, lease, addresses, tally)
        if lease is None:
            recording.alone = binding
        else:
            bindings = lease.bindings
            bindings[places] = binding
            if len(bindings) > 1:
                most = MAX_LENT_BINDINGS if _reads_lent(places) else MAX_BINDINGS
                while len(bindings) > most:
                    bindings.pop(next(iter(bindings))).drop()
        if device.events.active:
            device.events.tell(PlanMade(index, binding.plan))
        return binding


def _fetches_constants(plan: Plan) -> bool:
    """Whether all its copies bring constants back from their files."""
    outside = {b.number for b in plan.request.buffers if b.address is None}
    files = outside - plan.request.entering()
    return all(isinstance(c, Copy) and c.source.buffer in files for c in plan.copies)


def _with_constants(window: Window, picture: Picture) -> tuple[NumberedTask, ...]:
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
    seconds, nbytes = foreseen_cost(plan)
    # As there: what takes as long must not differ by a rounding.
    seconds = round(seconds + sum(seconds for _, seconds in back), 15)
    return seconds, nbytes + sum(nbytes for nbytes, _ in back)


def _reads_lent(places: Places) -> bool:
    """Whether some of it lies in bytes that somebody else owns."""
    return any(a is not None and a >= LENT_ADDRESSES for _, addresses in places for a in addresses)


def _passing(window: Window, kept: tuple[bool, ...]) -> set[int]:
    """The sources that nobody will refer to: they are freed when the window has run, unless an
    output of its tasks takes their buffer."""
    return {number for number, _ in window.sources if not kept[number]} - window.graph.taken_over()


def _reads_fixed(plan: Plan, window: Window) -> bool:
    """Whether what it may leave out depends on where a source lies."""
    inside = {n for n, value in window.sources if not value.is_array or len(value.instances) > 1}
    return any(
        number in inside and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.inputs, task.transformation.inputs, strict=False)
    )


def _has_fixed_results(plan: Plan) -> bool:
    """Whether a result lies where a task leaves something, be it what the result overwrote, or
    where another must find it."""
    final = {resident.value for resident in plan.final_values}
    own = {instance.buffer for resident in plan.final_values for instance in resident.instances}
    return not own.isdisjoint(plan.fixed) or any(
        number in final and desc.layout.address is not None
        for task in plan.request.tasks
        for number, desc in zip(task.outputs, task.transformation.outputs, strict=True)
    )

"""A recording: one plan for a kind of work, which has been bound and written out, and runs again.

Its guard says whether the plan may run now: what it works in must be free, and what it moves or
frees must lie as it did. Where it moves nothing, the same plan serves values at any places: for
each set of places that it reads from, and each lease that it writes its results to, there is one
binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stitch.budget import Claim
from stitch.errors import OutOfMemoryError
from stitch.planner import (
    SINGLE_THREAD,
    Buffer,
    Plan,
    Region,
    ThreadAssignment,
    is_rebindable,
    needed_regions,
    ranges_of,
)
from stitch.program import Array, Program
from stitch.runtime.backends import BoundPlan
from stitch.runtime.executors import CallKernel, PreparedProgram
from stitch.runtime.history import Tally, Totals, totals_of_steps
from stitch.runtime.recording.bound_parts import BoundParts
from stitch.runtime.recording.code import Code, GeneratedRunner
from stitch.runtime.recording.foresight import EvictionPrediction
from stitch.runtime.recording.forked import overlap
from stitch.runtime.recording.overwriting import OverwritingRun
from stitch.runtime.values import (
    AnyLease,
    BufferRecord,
    ConstantRecord,
    Effects,
    InstanceRecord,
    LeaseHolder,
    MemorySnapshot,
    OutputSlots,
    Place,
    Places,
    Ranges,
    Records,
    ValueRecord,
)

#: Leases of one recording, at most; a result that is held for longer than so many later ones leaves
#: its own. Each is some 2 KB of Python's, and memory that others may have as soon as it is idle.
MAX_LEASES = 2048
#: New ones are made several at a time: at most this part of that.
PART_AT_ONCE = 8
#: Claims the host's memory for buffers of a plan at more addresses.
ClaimPlaces: TypeAlias = "Callable[[Plan, Sequence[tuple[Buffer, Sequence[int]]]], object]"


@dataclass(frozen=True, slots=True)
class AffectedBuffer:
    """A buffer that the plan touches, and all the values that lay in it: whether or not a task of
    the window uses them."""

    place: Place
    users: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Binding:
    """A plan bound to bytes: what runs; `index` numbers the bindings of a device.

    `lease`: where its results go; None where running it makes and frees places (`effects`).
    """

    index: int
    recording: Executable
    #: Or what binds it, for those who need more than its code.
    _bound: BoundPlan | Callable[[], BoundPlan]
    lease: OutputSlots[Binding] | None
    #: Where buffers of sources and results lie that may lie elsewhere in another.
    addresses: Mapping[int, int]
    tally: Tally
    #: Its steps as one function, once it has run a few times: for those who observed it last.
    straight: GeneratedRunner | OverwritingRun | None = None
    #: For each kind of observers that it had; 0: nobody.
    written: dict[int, GeneratedRunner | OverwritingRun] = field(default_factory=dict)

    @property
    def bound(self) -> BoundPlan:
        """Its steps."""
        if not isinstance(self._bound, BoundPlan):
            self._bound = self._bound()
        return self._bound

    def serves(self, observers: int) -> bool:
        """Whether it runs for those who observe now without anything's being bound."""
        straight = self.straight
        is_written = straight is not None and straight.observers == observers
        return (is_written or isinstance(self._bound, BoundPlan)
                or self.recording.has_code_anywhere(observers))  # fmt: skip

    @property
    def plan(self) -> Plan:
        """The plan that this is, with its results in the lease and its sources where they lie."""
        return self.tally.plan

    def drop(self) -> None:
        """It will not run again."""
        self.tally.is_closed = True


class Executable(LeaseHolder["Binding"]):
    """One plan for a kind of work: what it rests on, its leases and bindings."""

    def __init__(
        self,
        plan: Plan,
        effects: Effects,
        kept: Sequence[bool],
        places: Places | None,
        shared: tuple[int, ...],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        bound_nbytes: Sequence[int],
        fixed_results: bool,
        constants: Sequence[ConstantRecord],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> None:
        """`kept`: which of the window's values were still wanted when it left the queue: by now one
        may have been given to a task of the next, which reads it later. `places`: where the sources
        must lie; None where the plan changes only its results. Then these lie in leases, and
        sources lie anywhere, as long as the same ones share buffers (`shared`: see `sharing`).
        `bound_nbytes`: what binding each task's program takes of the host's memory.
        `fixed_results`: whether programs say at which addresses results lie. `constants`: those
        that the tasks read. `assignment`: how it runs on several."""
        super().__init__()
        self.plan, self.effects = plan, effects
        self.may_be_placed = is_rebindable(plan)
        #: Whether it overwrites values that were there before: then it is completed whatever is
        #: raised.
        self.overwrites = plan.overwrites
        #: The spaces of which a picture must tell where its plan is placed.
        self.gives_way_in = frozenset(plan.pressured_spaces | {space for space, _ in plan.leaving})
        #: The numbers of existing values, and of those that are unreferenced after the run.
        self.kept = tuple([number for number, is_kept in enumerate(kept) if is_kept])
        self.passing = tuple([number for number, is_kept in enumerate(kept) if not is_kept])
        self.places, self.shared = places, shared
        self.programs, self.bodies, self.assignment = tuple(programs), tuple(bodies), assignment
        #: By task: where a run puts the call of a host function that it makes.
        self.boxes = tuple([
            (index, kernel.box)
            for index, kernel in enumerate(self.programs)
            if isinstance(kernel, CallKernel)
        ])  # fmt: skip
        #: Where the constants lie that it reads, and what the records counted when they were last
        #: seen there.
        self._constant_places = [(constant, constant.places()) for constant in constants]
        self._constants_seen = -1
        #: They are values of its plan, by number, where they may leave.
        self.constants: Mapping[int, ConstantRecord] = {}
        self.bystanders: tuple[AffectedBuffer, ...] = ()
        #: Where the record of a bystander's value is found: value → (place, position among users).
        self.bystander_values: dict[int, tuple[Place, int]] = {}
        #: The generation of the records at which what it works in was last seen to be free.
        self.generation = -1
        #: How often its steps were called one by one.
        self.runs_unwritten = 0
        #: Its steps written out, for all bindings, by those who observe.
        self.codes: dict[int, Code] = {}
        #: Whether nobody finds it any more, and nothing is kept out of its way.
        self.is_dropped = False
        #: What its first binding took of the host's memory.
        self.claim: Claim | None = None
        #: The binding without a lease.
        self.alone: Binding | None = None
        self.fixed_results = fixed_results
        #: The results that were held when the next run needed a place.
        self.held_results: set[int] = set()
        #: The numbers of the values that its leases hold, in their order.
        self.own = tuple([number for number, _ in effects.own])
        own = [(b.space, b.address or 0, b.size_per_bank) for b, _ in effects.made]
        temporary = needed_regions(plan.temporaries, ())
        #: Whether its results lie in the plan where temporary values of the same run lay before.
        self.lies_inside = any(overlap(a, b) for a in temporary for b in own)
        #: Its results can lie in one place only: inside, or where they must. Then it runs only
        #: while nobody holds them.
        self.has_one_lease = fixed_results or self.lies_inside
        #: Its steps, bound to bytes, where they may be bound to any places.
        self.parts: BoundParts | None = None
        if places is None:
            results = [buffer.number for buffer, _ in effects.made if buffer.address is not None]
            self.parts = BoundParts(
                plan, results, self.programs, self.bodies, bound_nbytes, assignment
            )
        #: Whether something gives way in it.
        self.is_pressed = plan.is_pressed
        #: What one run does; None before it is bound.
        self.each: Totals | None = None
        #: The numbers of the window's values that are host arrays, ascending: a run is given these
        #: arrays in this order, and then those of constants that come from their files; and for
        #: each array that a bound plan asks for its position among them.
        self.arrays: tuple[int, ...] = ()
        self.constant_arrays: list[Array] = []
        self.order: tuple[int, ...] = ()
        #: By which predictions it makes tensors give way, where it does.
        self.foresight: EvictionPrediction | None = None
        self._sources = {
            r.value: tuple([i.buffer for i in r.instances]) for r in plan.request.residents
        }
        #: Where it works, and what of that must be free: all but where its only lease may lie.
        self.works_in: Sequence[Region] = plan.free_regions if places is not None else temporary
        self._beside_results: Sequence[Region] = self.works_in
        if places is None and self.has_one_lease:
            made = [buffer for buffer, _ in effects.made]
            self._beside_results = needed_regions(temporary, made)
        self.work: Sequence[Region] = self._beside_results

    def snapshot_neighbours(self, records: Records, picture: MemorySnapshot) -> None:
        """Note what lies in the buffers that it touches, and where they are."""
        plan, effects, live = self.plan, self.effects, records.all_buffers()
        self.constants = picture.constants
        touched: list[Place] = []
        # Those of the tasks' values too: a view that came since must not be freed with them.
        for number in sorted(plan.touched):
            buffer = plan.request.buffers[number]
            if buffer.address is not None and (buffer.space, buffer.address) in live:
                touched.append((buffer.space, buffer.address))
        wanted = {v for v, _ in effects.changed} | set(effects.gone)
        for number, value in picture.bystanders.items():
            if number in wanted:
                # A host array has its first instance outside the spaces.
                record = next(i.buffer for i in value.instances if i.buffer.address is not None)
                assert record.address is not None
                place = (record.space, record.address)
                self.bystander_values[number] = (place, record.users.index(value))
                touched.append(place)
        self.bystanders = tuple(
            AffectedBuffer(place, tuple(map(_signature, live[place].users)))
            for place in dict.fromkeys(touched)
        )

    def on_first_bind(self, bound: BoundPlan) -> None:
        """Note what is the same wherever it is bound."""
        asked, constants = bound.argument_values, self.constants
        given = sorted(asked)
        self.arrays = tuple([number for number in given if number not in constants])
        self.constant_arrays = [constants[n].host_array() for n in given if n in constants]
        self.order = tuple(map(given.index, asked))
        self.each = replace(
            totals_of_steps(self.plan), staging_nbytes=bound.staging_nbytes,
            beside=sum(len(fork.threads) for fork in self.assignment.forks),
        )  # fmt: skip

    def has_code_anywhere(self, observers: int) -> bool:
        """Whether code is written for those who observe that serves at any places as it is."""
        code = self.codes.get(observers)
        return code is not None and code.placed is not None

    # -- the guard -------------------------------------------------------------------------------

    def holds(self, records: Records) -> bool:
        """Whether what it works in is free, the bystanders are as they were, and the constants that
        it reads lie where they did."""
        if self.bystanders and not self._bystanders_hold(records):
            return False
        if self.generation == records.generation:
            return True
        if self._constants_seen != records.constants_changed and not self._constants_hold(records):
            return False
        for space, address, size in self.work:
            if not records.is_free(space, address, size):
                return False
        self.generation = records.generation
        return True

    def _bystanders_hold(self, records: Records) -> bool:
        live = records.all_buffers()
        for bystander in self.bystanders:
            buffer = live.get(bystander.place)
            if buffer is None or tuple(map(_signature, buffer.users)) != bystander.users:
                return False
        return True

    def _constants_hold(self, records: Records) -> bool:
        for constant, places in self._constant_places:
            if constant.places() != places:
                return False
        self._constants_seen = records.constants_changed
        return True

    def affected_values(self, records: Records) -> dict[int, ValueRecord]:
        """The values that it changes beside its window's, by number."""
        live = records.all_buffers()
        others: dict[int, ValueRecord] = dict(self.constants)
        for number, (place, position) in self.bystander_values.items():
            others[number] = live[place].users[position]
        return others

    def conflicting_slots(self, records: Records) -> list[AnyLease]:
        """The leases of others that have memory to spare where it works."""
        return [
            lease
            for lease in records.spare_leases()
            if lease.holder is not self
            and any(
                overlap((b.space, b.address or 0, b.size_per_bank), region)
                for b in lease.buffers
                if b.is_spare
                for region in self.work
            )
        ]

    def evict_conflicting_slots(self, records: Records) -> None:
        """Take from others what their leases have to spare where it works."""
        leases = self.conflicting_slots(records)
        for lease in leases:
            lease.holder.makes_way = True
        records.revoke(leases)

    # -- places for results ----------------------------------------------------------------------

    def take_places(
        self, records: Records, works: Callable[[], Ranges], claim: ClaimPlaces
    ) -> OutputSlots[Binding] | None:
        """An idle lease, or a new one where memory has it to give; what it works in is free.

        `works`: where all recordings work, itself among them: what is held lies elsewhere while
        there is memory, or it would be in their way. Raises what `claim` raises."""
        if self.makes_way and self.has_one_lease and not self.leases:
            self._move_results_out(records, works, claim)
            if not self.holds(records):
                return None
        while self.idle:
            lease = self.ready()
            if lease is not None:
                return lease
            # What it shares is held: from now on each has a place of its own for that.
            records.end_lease(self.idle[-1])
        results = [buffer for buffer, _ in self.effects.made]
        own = [buffer.address or 0 for buffer in results]
        is_first = not self.leases and all(
            records.is_free(b.space, at, b.size_per_bank)
            for b, at in zip(results, own, strict=True)
        )
        if self.has_one_lease or (is_first and not self.makes_way):
            return self._leased(records, claim, [own]) if is_first else None
        # The last: where memory is short all that can be is shared.
        for spare_places in self._never_held, self._spare_places:
            spare = spare_places()
            wanted = [buffer for buffer, place in zip(results, spare, strict=True) if place is None]
            # As many again as there are.
            most = min(len(self.leases), self._most_leases() // PART_AT_ONCE)
            count = max(1, min(most, records.at_once(wanted)))
            places = self._apart(records, works, wanted, count)
            if places:
                return self._another(records, claim, places, spare)
        if not is_first:
            return None
        if self.lies_inside:
            # Where no memory is left elsewhere: then what is held there keeps it from running.
            self.has_one_lease, self.work, self.generation = True, self._beside_results, -1
        return self._leased(records, claim, [own])

    def _another(
        self, records: Records, claim: ClaimPlaces, places: Sequence[Sequence[int]],
        spare: Sequence[BufferRecord | None],
    ) -> OutputSlots[Binding]:  # fmt: skip
        lease = self._leased(records, claim, places, spare)
        for old in self.leases[: max(0, len(self.leases) - self._most_leases())]:
            # What is held for so long lies there like any other tensor from now on.
            records.end_lease(old)
        return lease

    def _most_leases(self) -> int:
        """Fewer where each binds kernels of its own."""
        if self.parts is None or any(map(self.has_code_anywhere, self.codes)):
            return MAX_LEASES
        return min(MAX_LEASES, self.parts.most)

    def _move_results_out(
        self, records: Records, works: Callable[[], Ranges], claim: ClaimPlaces
    ) -> None:
        """Let results lie outside of what it works in, so that they can be held; where no memory is
        left for that, they stay where they are."""
        if self.fixed_results:
            return
        results = [buffer for buffer, _ in self.effects.made]
        places = self._apart(records, works, results)
        if places:
            self.has_one_lease, self.work, self.generation = False, self.works_in, -1
            self._leased(records, claim, places)

    def _apart(
        self, records: Records, works: Callable[[], Ranges], results: Sequence[Buffer],
        count: int = 1,
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """Free addresses, so many times or fewer, outside of where all recordings work, or at least
        of where it does."""
        places = records.outside_of(works(), results, count)
        return places or records.outside_of(ranges_of(self.works_in), results, count)

    def _never_held(self) -> list[BufferRecord | None]:
        """The place that all leases share, for each result that was never found to be held; one
        that was has a place of its own in each lease from then on. Places that were combined as
        they come free would be bound in each combination."""
        if not self.leases:
            return [None] * len(self.effects.made)
        shared = self.leases[0].buffers
        self.held_results |= {n for n, place in enumerate(shared) if not place.is_spare}
        return [None if n in self.held_results else place for n, place in enumerate(shared)]

    def _spare_places(self) -> list[BufferRecord | None]:
        """For each result a place of a lease in which nothing lies, where there is one."""
        places = [
            [lease.buffers[i] for lease in self.leases] for i in range(len(self.effects.made))
        ]
        return [next((place for place in lying if place.is_spare), None) for lying in places]

    def _leased(
        self, records: Records, claim: ClaimPlaces, places: Sequence[Sequence[int]],
        spare: Sequence[BufferRecord | None] = (),
    ) -> OutputSlots[Binding]:  # fmt: skip
        """Leases at free addresses, the first of them, but for places that they share; outside of
        where it works, so what was free there is."""
        was_free = self.generation == records.generation
        spare = spare or [None] * len(self.effects.made)
        wanted = [
            result for result, place in zip(self.effects.made, spare, strict=True) if place is None
        ]
        buffers = [buffer for buffer, _ in wanted]
        try:
            claimed = claim(self.plan, list(zip(buffers, zip(*places, strict=True), strict=True)))
        except OutOfMemoryError:
            if len(places) == 1:
                raise
            places = places[:1]
            claimed = claim(
                self.plan, [(b, (at,)) for b, at in zip(buffers, places[0], strict=True)]
            )
        leases = []
        for fresh in records.lease(wanted, places):
            own = iter(fresh)
            lying = tuple([next(own) if place is None else place for place in spare])
            instances = tuple(self._instances(lying))
            leases.append(
                OutputSlots(self, lying, instances, claimed, is_lasting=not records.is_debug)
            )
        records.begin_leases(leases)
        self.generation = records.generation if was_free else -1
        return leases[0]

    def _instances(self, buffers: Sequence[BufferRecord]) -> list[tuple[InstanceRecord, ...]]:
        return [
            tuple(
                [InstanceRecord(buffers[r.made], r.offset_nbytes, r.desc, r.desc_key) for r in refs]
            )
            for _, refs in self.effects.own
        ]

    def addresses_for(self, lease: OutputSlots[Binding], places: Places) -> dict[int, int]:
        """Where the buffers of its results and sources lie, by their numbers in the plan."""
        addresses: dict[int, int] = {}
        for (buffer, _), record in zip(self.effects.made, lease.buffers, strict=True):
            if record.address is not None:
                addresses[buffer.number] = record.address
        for number, lying in places:
            numbers = zip(self._sources[number], lying, strict=True)
            addresses |= {buffer: address for buffer, address in numbers if address is not None}
        return addresses


def _signature(value: ValueRecord) -> tuple[object, ...]:
    """What a plan that touches a bystander's buffer depends on."""
    return (value.signature(), value.places(), value.kept)


def sharing(places: Places) -> tuple[int, ...]:
    """Which of a window's sources lie in one buffer, as far as addresses tell; () if none do."""
    if len(places) < 2:
        return ()
    addresses = [address for _, instances in places for address in instances]
    if len(set(addresses)) == len(addresses):
        return ()
    return tuple(map(addresses.index, addresses))

"""Recordings: work that has been planned, bound and written out, and runs again.

A recording is a kind of work (the same tasks on values of the same forms) with one plan. Its guard
says whether the plan may run now: what it works in must be free, and what it moves or frees must
lie as it did. Where it moves nothing, the same plan serves values at any places: for each set of
places that it reads from, and each lease that it writes its results to, there is one binding. Comes
in: plans. Goes out: bindings that may run. Must not know handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from stitch.budget import Claim
from stitch.planner import Buffer, Plan, Region, needed_regions, ranges_of
from stitch.program import Program, Space
from stitch.runtime.backends import BoundPlan
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.history import Tally, Totals, totals_of_steps
from stitch.runtime.recording.bound_parts import BoundParts
from stitch.runtime.recording.code import Code, Straight
from stitch.runtime.values import (
    AnyLease,
    BufferRecord,
    Effects,
    Forms,
    InstanceRecord,
    Lease,
    LeaseHolder,
    Picture,
    Place,
    Places,
    Ranges,
    Records,
    ValueRecord,
)
from stitch.tasks import TaskGraph

#: Kinds of work that are kept, and recordings of one kind (they differ in what was in their way).
MAX_KINDS = 512
MAX_VARIANTS = 64
#: Leases of one recording, at most; a result that is held for longer than so many later ones leaves
#: its own. Each is some 2 KB of Python's, and memory that others may have as soon as it is idle.
MAX_LEASES = 2048
#: Bindings of one lease to the places of what a run reads; the least recently used goes. What is
#: lent at places of its own each time is kept alive by them.
MAX_BINDINGS = 32
MAX_LENT_BINDINGS = 8
#: How often work that makes tensors give way is planned anew because their next uses have changed.
MAX_TRIES = 64


@dataclass(frozen=True, slots=True)
class Bystander:
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
    recording: Recording
    #: Or what binds it, for those who need more than its code.
    _bound: BoundPlan | Callable[[], BoundPlan]
    lease: Lease[Binding] | None
    #: Where buffers of sources and results lie that may lie elsewhere in another.
    addresses: Mapping[int, int]
    tally: Tally
    claim: object
    #: Its steps as one function, once it has run a few times: for those who observed it last.
    straight: Straight | None = None
    #: For each kind of observers that it had; 0: nobody.
    written: dict[int, Straight] = field(default_factory=dict)

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


class Recording(LeaseHolder["Binding"]):
    """One plan for a kind of work: what it rests on, its leases and bindings."""

    def __init__(
        self,
        plan: Plan,
        effects: Effects,
        places: Places | None,
        shared: tuple[int, ...],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        bound_nbytes: Sequence[int],
        fixed_results: bool,
    ) -> None:
        """`places`: where its sources must lie; None where the plan changes only its results. Then
        these lie in leases, and sources lie anywhere, as long as the same ones share buffers
        (`shared`: see `sharing`). `bound_nbytes`: what binding each task's program takes of the
        host's memory. `fixed_results`: whether programs say at which addresses results lie."""
        super().__init__()
        self.plan, self.effects = plan, effects
        self.places, self.shared = places, shared
        self.programs, self.bodies = tuple(programs), tuple(bodies)
        self.bystanders: tuple[Bystander, ...] = ()
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
        #: Its results can lie in one place only: where they must, or where temporary values of the
        #: same run lay before. Then it runs only while nobody holds them.
        self.has_one_lease = fixed_results or any(_overlap(a, b) for a in temporary for b in own)
        #: Its steps, bound to bytes, where they may be bound to any places.
        self.parts: BoundParts | None = None
        if places is None:
            results = [buffer.number for buffer, _ in effects.made if buffer.address is not None]
            self.parts = BoundParts(plan, results, self.programs, self.bodies, bound_nbytes)
        #: What one run does; None before it is bound.
        self.each: Totals | None = None
        #: The numbers of the values that are host arrays, ascending: a run is given these arrays in
        #: this order; and for each array that a bound plan asks for its position among them.
        self.arrays: tuple[int, ...] = ()
        self.order: tuple[int, ...] = ()
        #: Where it makes tensors give way: how much was known of next uses, where what could have
        #: left lay and no task uses, the one read next first, and how often its work may be planned
        #: anew for these.
        self.knowledge: int | None = None
        self.in_order: tuple[Place, ...] = ()
        self.tries = MAX_TRIES
        self._sources = {
            r.value: tuple([i.buffer for i in r.instances]) for r in plan.request.residents
        }
        #: Where it works, and what of that must be free: all but where its only lease may lie.
        self.works_in: Sequence[Region] = plan.free_regions if places is not None else temporary
        self.work: Sequence[Region] = self.works_in
        if places is None and self.has_one_lease:
            self.work = needed_regions(temporary, [buffer for buffer, _ in effects.made])

    def look_ahead(self, knowledge: int, known: Sequence[Recording]) -> None:
        """Note by which predictions it makes tensors give way (`knowledge`: their version);
        `known`: the recordings of its work so far."""
        self.knowledge = knowledge
        before = [old.tries for old in known if old.places == self.places]
        self.tries = max(0, min([self.tries, *before]) - 1)
        request = self.plan.request
        used = {value for task in request.tasks for value in task.inputs}
        later = {value: use for value, use in request.later if value not in used}
        # What lies elsewhere cannot leave.
        places = {b.number: (b.space, b.address) for b in request.buffers
                  if b.space is Space.L1 and b.address is not None and not b.pinned}  # fmt: skip
        uses = [
            (later[resident.value], places[instance.buffer])
            for resident in request.residents
            if resident.value in later
            for instance in resident.instances
            if instance.buffer in places
        ]
        uses.sort(key=itemgetter(0))
        self.in_order = tuple(dict.fromkeys([place for _, place in uses]))

    def chooses_well(
        self, records: Records, knowledge: int, next_use: Callable[[ValueRecord], float]
    ) -> bool:
        """Whether what gives way would still be chosen, as far as the order tells in which the
        others are read next, as predicted."""
        if self.knowledge is None or not self.tries:
            return True
        if self.knowledge != knowledge:
            return False
        live, last = records.all_buffers(), 0.0
        for place in self.in_order:
            buffer = live.get(place)
            if buffer is None or not buffer.users:
                return False
            use = min(map(next_use, buffer.users))
            if use < last:
                return False
            last = use
        return True

    def look_around(self, records: Records, picture: Picture) -> None:
        """Note what lies in the buffers that it touches, and where they are."""
        plan, effects, live = self.plan, self.effects, records.all_buffers()
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
            Bystander(place, tuple(map(_signature, live[place].users)))
            for place in dict.fromkeys(touched)
        )

    def was_bound(self, bound: BoundPlan) -> None:
        """Note what is the same wherever it is bound."""
        asked = bound.argument_values
        self.arrays = tuple(sorted(asked))
        self.order = tuple([self.arrays.index(number) for number in asked])
        self.each = replace(totals_of_steps(self.plan), staging_nbytes=bound.staging_nbytes)

    def has_code_anywhere(self, observers: int) -> bool:
        """Whether code is written for those who observe that serves at any places as it is."""
        code = self.codes.get(observers)
        return code is not None and code.placed is not None

    # -- the guard -------------------------------------------------------------------------------

    def holds(self, records: Records) -> bool:
        """Whether what it works in is free, and the bystanders are as they were."""
        if self.bystanders and not self._bystanders_hold(records):
            return False
        if self.generation == records.generation:
            return True
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

    def found_bystanders(self, records: Records) -> dict[int, ValueRecord]:
        """The values that it changes and no task uses, by number."""
        live = records.all_buffers()
        return {
            number: live[place].users[position]
            for number, (place, position) in self.bystander_values.items()
        }

    def in_the_way(self, records: Records) -> list[AnyLease]:
        """The leases of others that have memory to spare where it works."""
        return [
            lease
            for lease in records.spare_leases()
            if lease.holder is not self
            and any(
                _overlap((b.space, b.address or 0, b.size_per_bank), region)
                for b in lease.buffers
                if b.is_spare
                for region in self.work
            )
        ]

    def clear_way(self, records: Records) -> None:
        """Take from others what their leases have to spare where it works."""
        leases = self.in_the_way(records)
        for lease in leases:
            lease.holder.makes_way = True
        records.revoke(leases)

    # -- places for results ----------------------------------------------------------------------

    def take_places(self, records: Records, works: Callable[[], Ranges]) -> Lease[Binding] | None:
        """An idle lease, or a new one where memory has it to give; what it works in is free.

        `works`: where all recordings work, itself among them: what is held lies elsewhere while
        there is memory, or it would be in their way."""
        if self.makes_way and self.has_one_lease and not self.leases:
            self._move_results_out(records, works)
            if not self.holds(records):
                return None
        if self.idle:
            return self.idle[-1]
        results = [buffer for buffer, _ in self.effects.made]
        own = [buffer.address or 0 for buffer in results]
        is_first = not self.leases and all(
            records.is_free(b.space, at, b.size_per_bank)
            for b, at in zip(results, own, strict=True)
        )
        if self.has_one_lease or (is_first and not self.makes_way):
            return self._leased(records, own) if is_first else None
        # The last: where memory is short all that can be is shared.
        for spare_places in self._never_held, self._spare_places:
            spare = spare_places()
            wanted = [buffer for buffer, place in zip(results, spare, strict=True) if place is None]
            addresses = self._apart(records, works, wanted)
            if addresses is not None:
                return self._another(records, addresses, spare)
        return self._leased(records, own) if is_first else None

    def _another(
        self, records: Records, addresses: Sequence[int], spare: Sequence[BufferRecord | None]
    ) -> Lease[Binding]:
        lease = self._leased(records, addresses, spare)
        if len(self.leases) > self._most_leases():
            # What is held for so long lies there like any other tensor from now on.
            records.end_lease(self.leases[0])
        return lease

    def _most_leases(self) -> int:
        """Fewer where each binds kernels of its own."""
        if self.parts is None or any(map(self.has_code_anywhere, self.codes)):
            return MAX_LEASES
        return min(MAX_LEASES, self.parts.most)

    def _move_results_out(self, records: Records, works: Callable[[], Ranges]) -> None:
        """Let results lie outside of what it works in, so that they can be held; where no memory is
        left for that, they stay where they are."""
        if self.fixed_results:
            return
        results = [buffer for buffer, _ in self.effects.made]
        addresses = self._apart(records, works, results)
        if addresses is not None:
            self.has_one_lease, self.work, self.generation = False, self.works_in, -1
            self._leased(records, addresses)

    def _apart(
        self, records: Records, works: Callable[[], Ranges], results: Sequence[Buffer]
    ) -> list[int] | None:
        """Free addresses outside of where all recordings work, or at least of where it does."""
        addresses = records.outside_of(works(), results)
        return addresses or records.outside_of(ranges_of(self.works_in), results)

    def _never_held(self) -> list[BufferRecord | None]:
        """The place that all leases share, for each result that was never found to be held; one
        that was has a place of its own in each lease from then on. Places that were combined as
        they come free would be bound in each combination."""
        for number in range(len(self.effects.made)):
            if number not in self.held_results and not all(
                lease.buffers[number].is_spare for lease in self.leases
            ):
                self.held_results.add(number)
        return [
            None
            if not self.leases or number in self.held_results
            else self.leases[0].buffers[number]
            for number in range(len(self.effects.made))
        ]

    def _spare_places(self) -> list[BufferRecord | None]:
        """For each result a place of a lease in which nothing lies, where there is one."""
        places = [
            [lease.buffers[i] for lease in self.leases] for i in range(len(self.effects.made))
        ]
        return [next((place for place in lying if place.is_spare), None) for lying in places]

    def _leased(
        self, records: Records, addresses: Sequence[int],
        spare: Sequence[BufferRecord | None] = (),
    ) -> Lease[Binding]:  # fmt: skip
        """A lease at free addresses, but for places that it shares; outside of where it works, so
        what was free there is."""
        was_free = self.generation == records.generation
        spare = spare or [None] * len(self.effects.made)
        wanted = [
            result for result, place in zip(self.effects.made, spare, strict=True) if place is None
        ]
        fresh = iter(records.lease(wanted, addresses))
        buffers = tuple([next(fresh) if place is None else place for place in spare])
        instances = tuple(self._instances(buffers))
        lease = Lease(self, buffers, instances, is_lasting=not records.is_debug)
        records.begin_lease(lease)
        self.generation = records.generation if was_free else -1
        return lease

    def _instances(self, buffers: Sequence[BufferRecord]) -> list[tuple[InstanceRecord, ...]]:
        return [
            tuple(
                [InstanceRecord(buffers[r.made], r.offset_nbytes, r.desc, r.desc_key) for r in refs]
            )
            for _, refs in self.effects.own
        ]

    def addresses_for(self, lease: Lease[Binding], places: Places) -> dict[int, int]:
        """Where the buffers of its results and sources lie, by their numbers in the plan."""
        addresses: dict[int, int] = {}
        for (buffer, _), record in zip(self.effects.made, lease.buffers, strict=True):
            if record.address is not None:
                addresses[buffer.number] = record.address
        for number, lying in places:
            numbers = zip(self._sources[number], lying, strict=True)
            addresses |= {buffer: address for buffer, address in numbers if address is not None}
        return addresses


@dataclass(slots=True, eq=False)
class KindOfWork:
    """A kind of work: tasks, which values are kept, the sources' forms; and the recordings of it,
    the last one made first."""

    graph: TaskGraph
    kept: tuple[bool, ...]
    forms: Forms
    recordings: list[Recording]
    #: When it was last asked for.
    last_used: int = 0


class Recordings:
    """The recordings of a device by the work that they do; kinds least recently used go first."""

    def __init__(self, records: Records) -> None:
        self._records = records
        #: By their tasks: graphs are compared by identity, and one has few kinds of work.
        self._kinds: dict[TaskGraph, list[KindOfWork]] = {}
        #: How often one was asked for.
        self._now = 0
        #: Where they work, once somebody has asked.
        self._works: Ranges | None = None
        #: How many plans, recordings and bindings were made; in the steady state all stand still.
        self.plans_made = self.made = self.bindings_made = 0

    @property
    def kinds(self) -> int:
        """How many kinds of work there are recordings of."""
        return sum(map(len, self._kinds.values()))

    def of(self, graph: TaskGraph, kept: tuple[bool, ...], forms: Forms) -> Sequence[Recording]:
        """The recordings of a kind of work, the last one made first."""
        self._now += 1
        for kind in self._kinds.get(graph, ()):
            if kind.kept == kept and kind.forms == forms:
                kind.last_used = self._now
                return kind.recordings
        return ()

    def works(self) -> Ranges:
        """Where all of them work."""
        if self._works is None:
            recordings = [recording for kind in self._all() for recording in kind.recordings]
            self._works = ranges_of(part for each in recordings for part in each.works_in)
        return self._works

    def add(
        self, graph: TaskGraph, kept: tuple[bool, ...], forms: Forms, recording: Recording
    ) -> None:
        """Keep a recording for the next time."""
        self._works = None
        kinds = self._kinds.setdefault(graph, [])
        kind = next((k for k in kinds if k.kept == kept and k.forms == forms), None)
        if kind is None:
            kind = KindOfWork(graph, kept, forms, [], self._now)
            kinds.append(kind)
        kind.recordings.insert(0, recording)
        self.made += 1
        for old in kind.recordings[MAX_VARIANTS:]:
            self._drop(old)
        del kind.recordings[MAX_VARIANTS:]
        if self.kinds > MAX_KINDS:
            self._forget([min(self._all(), key=lambda kind: kind.last_used)])

    def _all(self) -> list[KindOfWork]:
        """A list of its own: a collection in between may finish what uses the device."""
        return [kind for kinds in list(self._kinds.values()) for kind in kinds]

    def forget(self, transformation: int) -> None:
        """Drop what runs a transformation whose agent is gone."""
        self._forget([kind for kind in self._all() if kind.graph.has(transformation)])

    def clear(self) -> None:
        """Drop all recordings."""
        self._forget(self._all())

    def _forget(self, kinds: Iterable[KindOfWork]) -> None:
        for kind in kinds:
            for recording in kind.recordings:
                self._drop(recording)
            # Only now: what an interrupt leaves is found the next time.
            left = [other for other in self._kinds.get(kind.graph, ()) if other is not kind]
            if left:
                self._kinds[kind.graph] = left
            else:
                self._kinds.pop(kind.graph, None)

    def _drop(self, recording: Recording) -> None:
        self._works = None
        recording.is_dropped, recording.generation = True, -1
        # A pipeline may remember the recording for some time yet.
        recording.claim = None
        if recording.parts is not None:
            recording.parts.clear()
        recording.codes.clear()
        if recording.alone is not None:
            recording.alone.drop()
            recording.alone = None
        for lease in tuple(recording.leases):
            self._records.end_lease(lease)


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


def _overlap(a: Region, b: Region) -> bool:
    return a[0] is b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]

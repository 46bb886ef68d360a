"""`Executable`: a plan for one kind of work that is bound, compiled to Python, and replayed.

`PlanCache` caches executables by the work that they do.

The guard of an executable tells whether it may run now: its working regions must be free, and what
it moves or frees must be at the same addresses. A plan that moves nothing serves any addresses:
there is one binding per set of source addresses and output slots.
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
    memory_rise,
    needed_regions,
    ranges_of,
)
from stitch.program import Array, Program
from stitch.runtime.backends import BoundPlan
from stitch.runtime.execution.bound_parts import BoundParts
from stitch.runtime.execution.generated_code import Code, GeneratedRunner
from stitch.runtime.execution.overwriting import OverwritingRun
from stitch.runtime.execution.predictions import EvictionPrediction
from stitch.runtime.executors import CallKernel, PreparedProgram
from stitch.runtime.history import Tally, Totals, totals_of_steps
from stitch.runtime.values import (
    BufferRecord,
    ConstantRecord,
    Effects,
    Forms,
    InstanceRecord,
    MemorySnapshot,
    OutputSlots,
    Place,
    Places,
    Ranges,
    Records,
    ValueRecord,
)
from stitch.tasks import TaskSequence

#: Limit for the output slots of one executable; a result held longer than so many later runs leaves
#: its slots. Each costs about 2 KB, and device memory that others can use while it is idle.
MAX_SLOT_SETS = 2048
#: New slots are created in groups of at most this fraction.
PART_AT_ONCE = 8
#: Reserves host memory for a plan's buffers at more addresses.
ClaimPlaces: TypeAlias = "Callable[[Plan, Sequence[tuple[Buffer, Sequence[int]]]], object]"


@dataclass(frozen=True, slots=True)
class AffectedBuffer:
    """A buffer that a plan changes, with the signatures of all values in it."""

    place: Place
    users: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Binding:
    """A plan bound to addresses; `index` numbers the bindings of a device.

    `slots`: its output slots; None if running it allocates and frees (`effects`).
    """

    index: int
    executable: Executable
    #: The bound plan, or a function that binds it when more than the code is needed.
    _bound: BoundPlan | Callable[[], BoundPlan]
    slots: OutputSlots | None
    #: Addresses of source and result buffers, which differ between bindings.
    addresses: Mapping[int, int]
    tally: Tally
    #: The generated code for the last observers, after a few runs.
    straight: GeneratedRunner | OverwritingRun | None = None
    #: Generated code by observer bits (0: none).
    written: dict[int, GeneratedRunner | OverwritingRun] = field(default_factory=dict)

    @property
    def bound(self) -> BoundPlan:
        """The bound plan."""
        if not isinstance(self._bound, BoundPlan):
            self._bound = self._bound()
        return self._bound

    def serves(self, observers: int) -> bool:
        """Return whether it can run for these observers without binding anything."""
        straight = self.straight
        is_written = straight is not None and straight.observers == observers
        return (is_written or isinstance(self._bound, BoundPlan)
                or self.executable.has_code_anywhere(observers))  # fmt: skip

    @property
    def plan(self) -> Plan:
        """The plan with the actual addresses of sources and results."""
        return self.tally.plan

    def drop(self) -> None:
        """Mark it as never run again."""
        self.tally.is_closed = True
        self.executable.captured.discard(self.index)


@dataclass(slots=True, eq=False)
class PlanKey:
    """A kind of work (tasks, kept values, source signatures) and its executables, newest first."""

    graph: TaskSequence
    kept: tuple[bool, ...]
    forms: Forms
    executables: list[Executable]
    #: Clock value of its last lookup.
    last_used: int = 0


class Executable:
    """One plan for a kind of work, with its guard, output slots and bindings.

    `slot_sets` are all its output slots, `idle` those without live results. `idle` is a stack: the
    slots released last are used next, since they may still be cached.
    """

    def __init__(
        self,
        plan: Plan,
        effects: Effects,
        kept: tuple[bool, ...],
        existing: Sequence[int],
        places: Places | None,
        shared: tuple[int, ...],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        bound_nbytes: Sequence[int],
        fixed_results: bool,
        constants: Sequence[ConstantRecord],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> None:
        """Initialize.

        Args:
            plan: The plan.
            effects: Its effects on the memory records.
            kept: Which values of the batch were referenced when it left the queue (a later task may
                have taken one since).
            existing: Numbers of the values that were there before, without the arrays of calls.
            places: Required addresses of the sources; None if the plan changes only its results,
                which then go to output slots, with sources at any addresses.
            shared: Which sources share buffers; see `sharing`.
            programs: Prepared program per task.
            bodies: Program per task, for hooks.
            bound_nbytes: Host memory to bind each task's program.
            fixed_results: Whether programs require addresses for results.
            constants: Constants that the tasks read.
            assignment: Threads of the steps.
        """
        self.slot_sets: list[OutputSlots] = []
        self.idle: list[OutputSlots] = []
        #: Whether this work alternates with other work that revoked its slots. New slots are then
        #: placed outside all working regions, or both would revoke each other forever.
        self.makes_way = False
        self.plan, self.effects = plan, effects
        self.may_be_placed = is_rebindable(plan)
        #: What a run needs beyond the memory in use, and the fewest idle slots (at least one) with
        #: which the peaks were noted since memory changed.
        self.rise, self.least_idle = memory_rise(plan), 1
        #: The most of its output slots that were in use when peaks were noted.
        self.most_held = 0
        #: Whether it overwrites existing values: such a run is completed even if an exception is
        #: raised.
        self.overwrites = plan.overwrites
        #: The spaces that a snapshot must include to rebind the plan.
        self.gives_way_in = frozenset(plan.pressured_spaces | {space for space, _ in plan.leaving})
        #: The kind of work that it is cached for; set by the cache.
        self.kind: PlanKey | None = None
        #: The numbers of existing values, and of those that are unreferenced after the run.
        self.kept = tuple([number for number in existing if kept[number]])
        self.passing = tuple([number for number in existing if not kept[number]])
        #: All values that are unreferenced after the run: a failed one may leave some in memory.
        self.unreferenced = tuple([number for number, is_kept in enumerate(kept) if not is_kept])
        self.places, self.shared = places, shared
        self.programs, self.bodies, self.assignment = tuple(programs), tuple(bodies), assignment
        #: By task: holder for the host function call of a run.
        self.boxes = tuple([
            (index, kernel.box)
            for index, kernel in enumerate(self.programs)
            if isinstance(kernel, CallKernel)
        ])  # fmt: skip
        #: Addresses of its constants, and `constants_changed` when they were last checked.
        self._constant_places = [(constant, constant.places()) for constant in constants]
        self._constants_seen = -1
        #: Constants that are values of the plan, since they may be evicted.
        self.constants: Mapping[int, ConstantRecord] = {}
        self.bystanders: tuple[AffectedBuffer, ...] = ()
        #: Affected value → (place, position among the buffer's users).
        self.bystander_values: dict[int, tuple[Place, int]] = {}
        #: Records generation at which its working regions were last found free.
        self.generation = -1
        #: Number of runs without generated code.
        self.runs_unwritten = 0
        #: Generated code for all bindings, by observers.
        self.codes: dict[int, Code] = {}
        #: The bindings, by index, whose launches were captured or could not be captured.
        self.captured: set[int] = set()
        #: Whether it was evicted from the cache.
        self.is_dropped = False
        #: Host memory reservation of the first binding.
        self.claim: Claim | None = None
        #: The binding without output slots.
        self.alone: Binding | None = None
        self.fixed_results = fixed_results
        #: Results that were still referenced when the next run needed slots.
        self.held_results: set[int] = set()
        #: Numbers of the values in its output slots, in order.
        self.own = tuple([number for number, _ in effects.own])
        own = [(b.space, b.address or 0, b.size_per_bank) for b, _ in effects.made]
        temporary = needed_regions(plan.temporaries, ())
        #: Whether results overlap temporary values of the same run.
        self.lies_inside = any(overlap(a, b) for a in temporary for b in own)
        #: Whether results have one possible address (overlapping or required): then it runs only
        #: while they are unreferenced.
        self.has_one_set = fixed_results or self.lies_inside
        #: Its bound steps, if it can be bound to any addresses.
        self.parts: BoundParts | None = None
        if places is None:
            results = [buffer.number for buffer, _ in effects.made if buffer.address is not None]
            self.parts = BoundParts(
                plan, results, self.programs, self.bodies, bound_nbytes, assignment
            )
        #: Totals of one run; None before it is bound.
        self.each: Totals | None = None
        #: Numbers of the batch's host arrays, ascending: the arguments of a run, followed by
        #: constants from files; `order` maps the bound plan's argument positions to them.
        self.arrays: tuple[int, ...] = ()
        self.constant_arrays: list[Array] = []
        self.order: tuple[int, ...] = ()
        #: The predictions on which its evictions are based.
        self.foresight: EvictionPrediction | None = None
        self._sources = {
            r.value: tuple([i.buffer for i in r.instances]) for r in plan.request.residents
        }
        #: Its working regions, and those that must be free (all except those of its only output
        #: slots).
        self.works_in: Sequence[Region] = plan.free_regions if places is not None else temporary
        self._beside_results: Sequence[Region] = self.works_in
        if places is None and self.has_one_set:
            made = [buffer for buffer, _ in effects.made]
            self._beside_results = needed_regions(temporary, made)
        self.work: Sequence[Region] = self._beside_results

    def ready(self) -> OutputSlots | None:
        """Return the idle slots to use next; None if there are none, they are blocked, or a run in
        them may need more memory than was noted."""
        idle = self.idle
        if len(idle) < self.least_idle or (idle[-1].shares and idle[-1].is_blocked):
            return None
        return idle[-1]

    def note_peaks(self, records: Records) -> None:
        """Note the memory that the next run needs.

        If more of its results are held than ever, the other executables note their next runs too.
        """
        records.note_peaks(self.rise)
        self.least_idle = max(1, len(self.idle))
        held = len(self.slot_sets) - len(self.idle)
        if held > self.most_held:
            self.most_held, is_current = held, self.generation == records.generation
            records.generation += 1
            self.generation = records.generation if is_current else -1

    def snapshot_neighbours(self, records: Records, picture: MemorySnapshot) -> None:
        """Record the contents of the buffers that it changes."""
        plan, effects, live = self.plan, self.effects, records.buffers
        self.constants = picture.constants
        touched: list[Place] = []
        # Also buffers of the tasks' values: a newer view must not be freed with them.
        for number in sorted(plan.touched):
            buffer = plan.request.buffers[number]
            if buffer.address is not None and (buffer.space, buffer.address) in live:
                touched.append((buffer.space, buffer.address))
        wanted = {v for v, _ in effects.changed} | set(effects.gone)
        for number, value in picture.bystanders.items():
            if number in wanted:
                # The first instance of a host array has no address.
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
        """Record what is the same for all bindings."""
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
        """Return whether generated code for these observers works at any addresses."""
        code = self.codes.get(observers)
        return code is not None and code.placed is not None

    # -- the guard -------------------------------------------------------------------------------

    def holds(self, records: Records) -> bool:
        """Return whether its guard holds: working regions free, affected buffers and constants
        unchanged."""
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
        live = records.buffers
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
        """Return the values outside the batch that it changes, by number."""
        live = records.buffers
        others: dict[int, ValueRecord] = dict(self.constants)
        for number, (place, position) in self.bystander_values.items():
            others[number] = live[place].users[position]
        return others

    def evict_conflicting_slots(self, records: Records) -> None:
        """Revoke output slots of other executables with spare memory in its working regions, and
        let their owners allocate new slots elsewhere."""
        slot_sets = [
            slots
            for slots in records.spare_slots()
            if slots.holder is not self
            and any(
                overlap((b.space, b.address or 0, b.size_per_bank), region)
                for b in slots.buffers
                if b.is_spare
                for region in self.work
            )
        ]
        for slots in slot_sets:
            slots.holder.makes_way = True
        records.revoke(slot_sets)

    # -- places for results ----------------------------------------------------------------------

    def take_places(
        self, records: Records, works: Callable[[], Ranges], claim: ClaimPlaces
    ) -> OutputSlots | None:
        """Return idle output slots, or new ones if memory is free; None otherwise.

        `works`: returns the working regions of all executables; held results are placed outside of
        these while possible. Raises what `claim` raises.
        """
        self.least_idle = 1
        if self.makes_way and self.has_one_set and not self.slot_sets:
            self._move_results_out(records, works, claim)
            if not self.holds(records):
                return None
        while self.idle:
            slots = self.ready()
            if slots is not None:
                return slots
            # A shared buffer is held: dispose of the slots; new ones get a separate buffer for it.
            records.end_slots(self.idle[-1])
        results = [buffer for buffer, _ in self.effects.made]
        own = [buffer.address or 0 for buffer in results]
        is_first = not self.slot_sets and all(
            records.is_free(b.space, at, b.size_per_bank)
            for b, at in zip(results, own, strict=True)
        )
        if self.has_one_set or (is_first and not self.makes_way):
            return self._new_slots(records, claim, [own]) if is_first else None
        # The second option shares as much as possible, for short memory.
        for spare_places in self._never_held, self._spare_places:
            spare = spare_places()
            wanted = [buffer for buffer, place in zip(results, spare, strict=True) if place is None]
            # Double the number of slots.
            most = min(len(self.slot_sets), self._most_sets() // PART_AT_ONCE)
            count = max(1, min(most, records.at_once(wanted)))
            places = self._apart(records, works, wanted, count)
            if places:
                slots = self._new_slots(records, claim, places, spare)
                for old in self.slot_sets[: max(0, len(self.slot_sets) - self._most_sets())]:
                    # Results held for so long become ordinary tensors.
                    records.end_slots(old)
                return slots
        if not is_first:
            return None
        if self.lies_inside:
            # No memory elsewhere: results overlap the working regions and block runs while held.
            self.has_one_set, self.work, self.generation = True, self._beside_results, -1
        return self._new_slots(records, claim, [own])

    def _most_sets(self) -> int:
        """Return the limit of slots; lower if each binds kernels of its own."""
        if self.parts is None or any(map(self.has_code_anywhere, self.codes)):
            return MAX_SLOT_SETS
        return min(MAX_SLOT_SETS, self.parts.most)

    def _move_results_out(
        self, records: Records, works: Callable[[], Ranges], claim: ClaimPlaces
    ) -> None:
        """Place results outside the working regions, so that they can be held; no change without
        free memory."""
        if self.fixed_results:
            return
        results = [buffer for buffer, _ in self.effects.made]
        places = self._apart(records, works, results)
        if places:
            self.has_one_set, self.work, self.generation = False, self.works_in, -1
            self._new_slots(records, claim, places)

    def _apart(
        self, records: Records, works: Callable[[], Ranges], results: Sequence[Buffer],
        count: int = 1,
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """Return free addresses for up to `count` sets, outside all working regions or at least its
        own."""
        places = records.outside_of(works(), results, count)
        return places or records.outside_of(ranges_of(self.works_in), results, count)

    def _never_held(self) -> list[BufferRecord | None]:
        """Return for each result the buffer to share between slots, or None if it was ever held.

        A result that was held has a separate buffer in each set from then on. Combining free
        buffers freely would need a binding per combination.
        """
        if not self.slot_sets:
            return [None] * len(self.effects.made)
        shared = self.slot_sets[0].buffers
        self.held_results |= {n for n, place in enumerate(shared) if not place.is_spare}
        return [None if n in self.held_results else place for n, place in enumerate(shared)]

    def _spare_places(self) -> list[BufferRecord | None]:
        """Return for each result an unused buffer of some slots, or None."""
        places = [
            [slots.buffers[i] for slots in self.slot_sets] for i in range(len(self.effects.made))
        ]
        return [next((place for place in lying if place.is_spare), None) for lying in places]

    def _new_slots(
        self, records: Records, claim: ClaimPlaces, places: Sequence[Sequence[int]],
        spare: Sequence[BufferRecord | None] = (),
    ) -> OutputSlots:  # fmt: skip
        """Create output slots at free addresses, with some shared buffers; returns the first.

        They are outside the working regions, so the guard stays valid.
        """
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
        slot_sets = []
        for fresh in records.allocate_slots(wanted, places):
            own = iter(fresh)
            lying = tuple([next(own) if place is None else place for place in spare])
            instances = tuple(self._instances(lying))
            slot_sets.append(
                OutputSlots(self, lying, instances, claimed, is_lasting=not records.is_debug)
            )
        records.begin_slots(slot_sets)
        self.generation = records.generation if was_free else -1
        return slot_sets[0]

    def _instances(self, buffers: Sequence[BufferRecord]) -> list[tuple[InstanceRecord, ...]]:
        return [
            tuple(
                [InstanceRecord(buffers[r.made], r.offset_nbytes, r.desc, r.desc_key) for r in refs]
            )
            for _, refs in self.effects.own
        ]

    def addresses_for(self, slots: OutputSlots, places: Places) -> dict[int, int]:
        """Return the addresses of result and source buffers, by their numbers in the plan."""
        addresses: dict[int, int] = {}
        for (buffer, _), record in zip(self.effects.made, slots.buffers, strict=True):
            if record.address is not None:
                addresses[buffer.number] = record.address
        for number, lying in places:
            numbers = zip(self._sources[number], lying, strict=True)
            addresses |= {buffer: address for buffer, address in numbers if address is not None}
        return addresses


def _signature(value: ValueRecord) -> tuple[object, ...]:
    """Return what a plan that changes an affected buffer depends on."""
    return (value.signature(), value.places(), value.kept)


def sharing(places: Places) -> tuple[int, ...]:
    """Return which sources share an address; () if none do."""
    if len(places) < 2:
        return ()
    addresses = [address for _, instances in places for address in instances]
    if len(set(addresses)) == len(addresses):
        return ()
    return tuple(map(addresses.index, addresses))


#: Limits for cached keys, and for executables per key.
MAX_KINDS = 512
MAX_VARIANTS = 64


class PlanCache:
    """The executables of a device by key; the least recently used key is evicted first."""

    def __init__(self, records: Records) -> None:
        self._records = records
        #: By task sequence: few keys share one.
        self._kinds: dict[TaskSequence, tuple[PlanKey, ...]] = {}
        #: Counts lookups.
        self._now = 0
        #: Cached working regions of all executables.
        self._works: Ranges | None = None
        #: Counters; constant in the steady state.
        self.plans_made = self.made = self.bindings_made = 0

    @property
    def kinds(self) -> int:
        """The number of keys."""
        return len(self._all())

    def _all(self) -> list[PlanKey]:
        """Return a copy as a list: a garbage collection may run finalizers that use the device."""
        return [kind for kinds in list(self._kinds.values()) for kind in kinds]

    def use(self, kind: PlanKey) -> None:
        """Count a use of a kind of work."""
        kind.last_used = self._now = self._now + 1

    def of(self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms) -> Sequence[Executable]:
        """Return the executables of a key, newest first."""
        for kind in self._kinds.get(graph, ()):
            if kind.kept == kept and kind.forms == forms:
                self.use(kind)
                return kind.executables
        return ()

    def works(self) -> Ranges:
        """Return the working regions of all executables."""
        if self._works is None:
            executables = [executable for kind in self._all() for executable in kind.executables]
            self._works = ranges_of(part for each in executables for part in each.works_in)
        return self._works

    def add(
        self, graph: TaskSequence, kept: tuple[bool, ...], forms: Forms, executable: Executable
    ) -> None:
        """Cache an executable."""
        self._works = None
        kinds = self._kinds.get(graph, ())
        kind = next((k for k in kinds if k.kept == kept and k.forms == forms), None)
        if kind is None:
            kind = PlanKey(graph, kept, forms, [], self._now)
            self._kinds[graph] = (*kinds, kind)
        executable.kind = kind
        kind.executables.insert(0, executable)
        self.made += 1
        for old in kind.executables[MAX_VARIANTS:]:
            self._drop(old)
        del kind.executables[MAX_VARIANTS:]
        if self.kinds > MAX_KINDS:
            self._forget([min(self._all(), key=lambda kind: kind.last_used)])

    def forget(self, transformation: int) -> None:
        """Drop the executables that run an unloaded transformation."""
        self._forget([kind for kind in self._all() if kind.graph.has(transformation)])

    def clear(self) -> None:
        """Drop all executables."""
        self._forget(self._all())

    def _forget(self, kinds: Sequence[PlanKey]) -> None:
        for kind in kinds:
            for executable in kind.executables:
                self._drop(executable)
            # Last: an interrupted call can be repeated.
            others = tuple([k for k in self._kinds.get(kind.graph, ()) if k is not kind])
            if others:
                self._kinds[kind.graph] = others
            else:
                self._kinds.pop(kind.graph, None)

    def _drop(self, executable: Executable) -> None:
        self._works = None
        executable.is_dropped, executable.generation = True, -1
        if executable.kind is not None and executable.kind.graph.recent is executable:
            executable.kind.graph.recent = None
        # Free its parts: a pipeline may still refer to the executable.
        executable.claim = None
        if executable.parts is not None:
            executable.parts.clear()
        executable.codes.clear()
        if executable.alone is not None:
            executable.alone.drop()
            executable.alone = None
        for slots in tuple(executable.slot_sets):
            self._records.end_slots(slots)


def overlap(a: Region, b: Region) -> bool:
    """Return whether two regions share bytes."""
    return a[0] is b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]

"""The chain: when tensors are wanted in L1, and what it costs if they are elsewhere in between.

A *stay* is the time between two uses of a tensor in L1. If the tensor leaves, its bytes are free in
between; it has to be brought back for the next use, and, if it lies nowhere else, to be written to
DRAM first: once, as values never change. So residency is a covering problem: at every task at least
so many bytes must be away, at the least cost (allocation theory; exact is an integer program).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from stitch.errors import LayoutError
from stitch.machine import room_per_bank, round_up
from stitch.planner.copy_cost import copy_cost
from stitch.planner.plan import Instance, PlanRequest, waiting_desc
from stitch.program import DataType, Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

#: How far after a request's tasks predicted uses are looked at.
MAX_LATER = 256


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor is in L1, and idle, during the tasks `[first, end)`; `end` reads it, or is the end.

    `holder` numbers what it lies in; `nbytes` are per bank. `back_seconds`: to bring it back.
    `is_dirty`: it lies nowhere else, so it must be written first, once for all stays of its holder.
    """

    holder: int
    first: int
    end: int
    nbytes: int
    back_seconds: float
    is_dirty: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """What leaves as a whole: a resident buffer, or a value in one layout. `write_seconds`: to
    write it to DRAM."""

    values: frozenset[int]
    desc: TensorDesc
    write_seconds: float


@dataclass(frozen=True, slots=True)
class StayChain:
    """Stays over tasks; at task t `excess[t]` bytes per bank of those that span it must be away,
    none where it is not above 0. After the tasks of a request come those that read, as predicted,
    what it leaves: as crowded as its own.

    `first_seconds`: what copies take that every plan makes. `is_whole`: no plan takes less than
    these and a cover; untrue where parts of a buffer, or one of several copies, can come back.
    """

    holders: tuple[Holder, ...]
    stays: tuple[Stay, ...]
    excess: tuple[int, ...]
    first_seconds: float = 0.0
    is_whole: bool = True

    def spanning(self) -> dict[int, list[int]]:
        """The stays over each task at which something must be away, by their numbers."""
        over: dict[int, list[int]] = {t: [] for t, n in enumerate(self.excess) if n > 0}
        for number, stay in enumerate(self.stays):
            for task in range(stay.first, stay.end):
                if task in over:
                    over[task].append(number)
        return over


def chain_of(request: PlanRequest) -> StayChain:
    """The chain of L1 that a request asks for; no stays where the machine has none."""
    if Space.L1 not in request.machine.shape.spaces or request.machine.shape.dram is None:
        return StayChain((), (), (0,) * len(request.tasks))
    return _Reading(request).chain()


@dataclass(slots=True)
class _Open:
    """A holder while tasks are read: since when it is idle, and whether it lies elsewhere too."""

    number: int
    size: int
    idle_since: int
    is_dirty: bool


@dataclass(slots=True)
class _Reading:
    """Reads the tasks in order."""

    request: PlanRequest
    holders: list[Holder] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    #: What is in L1, by value and descriptor; what is pinned there; values that were in either; the
    #: values of shared buffers.
    open: dict[tuple[int, TensorDesc], _Open] = field(default_factory=dict)
    pinned: set[tuple[int, TensorDesc]] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    #: How values lie outside of L1 too, in forms that have lost nothing.
    lossless_outside: dict[int, list[TensorDesc]] = field(default_factory=dict)
    #: What lies in a space outside of L1, by value and descriptor; in which types values were made.
    lying_outside: set[tuple[int, TensorDesc]] = field(default_factory=set)
    made_in: dict[int, DataType] = field(default_factory=dict)
    first_seconds: float = 0.0
    is_whole: bool = True

    def chain(self) -> StayChain:
        request = self.request
        shape = request.machine.shape.space(Space.L1)
        room = shape.capacity - self._read_residents()
        last_use = {v: t for t, task in enumerate(request.tasks) for v in task.inputs}
        last_use |= dict.fromkeys(request.kept, len(request.tasks))
        busy = [0] * len(request.tasks)
        for t, task in enumerate(request.tasks):
            busy[t] = self._read_task(t, last_use)
            for value in {*task.inputs, *task.outputs}:
                if last_use.get(value, -1) <= t:
                    self._end(value, t + 1)
        later = {value: max(use, len(busy)) for value, use in request.later}
        end = max([len(busy), *(use + 1 for use in later.values())])
        end = min(end, len(busy) + MAX_LATER)
        busy += [max(busy, default=0)] * (end - len(busy))
        for held in {id(o): o for o in self.open.values()}.values():
            uses = [later[v] for v in self.holders[held.number].values if later.get(v, end) < end]
            after = 0.0
            if uses:
                back, use = self._back_seconds(held), min(uses)
                self._stay(held, use, back)
                held.idle_since = use + 1
                # It is wanted once more at an unknown time: the later, the longer it can be away.
                after = back * (end - use - 1) / (end - len(request.tasks))
            self._stay(held, end, after)
        idle = [0] * (end + 1)
        for stay in self.stays:
            idle[stay.first] += stay.nbytes
            idle[stay.end] -= stay.nbytes
        excess, lying = [], 0
        for t in range(end):
            lying += idle[t]
            excess.append(busy[t] + lying - room)
        return StayChain(
            tuple(self.holders), tuple(self.stays), tuple(excess), self.first_seconds, self.is_whole
        )

    def _read_residents(self) -> int:
        """Opens what lies in L1 at the start; the bytes that cannot leave."""
        request, stuck = self.request, 0
        users: dict[int, list[tuple[int, Instance]]] = {}
        places = {b.number: b for b in request.buffers}
        for resident in request.residents:
            origin = self.made_in[resident.value] = resident.instances[0].desc.layout.data_type
            for instance in resident.instances:
                users.setdefault(instance.buffer, []).append((resident.value, instance))
                buffer = places[instance.buffer]
                if buffer.space is Space.L1:
                    continue
                if buffer.address is not None:
                    self.lying_outside.add((resident.value, instance.desc))
                if instance.desc.layout.data_type is origin:
                    self.lossless_outside.setdefault(resident.value, []).append(instance.desc)
        for buffer in request.buffers:
            inside = users.get(buffer.number, [])
            if buffer.space is not Space.L1 or buffer.address is None:
                # Views may come together, in their block.
                self.is_whole &= len(inside) <= 1
                continue
            stays = buffer.pinned or not inside
            values = frozenset(value for value, _ in inside)
            if len(inside) > 1:
                self.shared |= values
            # A view can come back without the rest of its block.
            self.is_whole &= [instance.desc for _, instance in inside] in ([], [buffer.desc])
            if stays:
                stuck += buffer.size_per_bank
                self.pinned |= {(value, instance.desc) for value, instance in inside}
                self.inside |= values
                continue
            held = self._new(values, buffer.desc, buffer.size_per_bank, 0)
            for value, instance in inside:
                self._open(value, instance.desc, held)
        return stuck

    def _open(self, value: int, desc: TensorDesc, held: _Open) -> None:
        """A value lies in L1 from now on; one in several forms can come back from any."""
        if value in self.inside:
            self.is_whole = False
        self.inside.add(value)
        self.open[value, desc] = held

    def _new(self, values: frozenset[int], desc: TensorDesc, size: int, since: int) -> _Open:
        self.holders.append(Holder(values, desc, self._seconds(desc, waiting_desc(desc))))
        return _Open(len(self.holders) - 1, size, since, not values <= self.lossless_outside.keys())

    def _seconds(self, source: TensorDesc, target: TensorDesc) -> float:
        return copy_cost(self.request.machine, source, target)[1]

    def _back_seconds(self, held: _Open) -> float:
        """To bring back what waits in DRAM, or what is dropped for a copy outside."""
        holder = self.holders[held.number]
        sources = [d for value in holder.values for d in self.lossless_outside.get(value, ())]
        if held.is_dirty or not sources or len(holder.values) > 1:
            sources = [waiting_desc(holder.desc)]
        return min(self._seconds(source, holder.desc) for source in sources)

    def _read_task(self, t: int, last_use: Mapping[int, int]) -> int:
        """Ends the stays of what a task reads; the bytes that it needs in L1 meanwhile."""
        task = self.request.tasks[t]
        what = task.transformation
        used: dict[int, _Open] = {}
        need = 0
        if what.scratch is not None and what.scratch.space is Space.L1:
            need += round_up(what.scratch.size_per_bank, self._granule)
        given = {i for _, i in what.aliases}
        for i, (value, desc) in enumerate(zip(task.inputs, what.inputs, strict=False)):
            bare = desc.without_address()
            held = self.open.get((value, bare))
            if i in given and not self._gives(task, value, bare, t, last_use):
                # What is overwritten is a copy that is made for it, and wanted only here; but other
                # inputs of this task may be copied from it.
                if desc.layout.space is Space.L1:
                    need += self._size(bare)
                self._copy(value, bare)
                self.is_whole &= task.inputs.count(value) == 1
            elif held is not None:
                used[id(held)] = held
            elif (value, bare) in self.pinned:
                pass
            elif desc.layout.space is not Space.L1:
                self._is_wanted_outside(value, bare)
            else:
                held = self._copied(value, bare, t)
                used[id(held)] = held
        for held in used.values():
            self._stay(held, t, self._back_seconds(held))
            held.idle_since = t + 1
            need += held.size
        for i in given:
            if self._gives(task, task.inputs[i], what.inputs[i], t, last_use):
                self._end(task.inputs[i], t + 1)
        if what.kind is TransformationKind.COPY:
            self._copy(task.inputs[0], what.outputs[0])
        taken = dict(what.aliases)
        for o, (value, desc) in enumerate(zip(task.outputs, what.outputs, strict=True)):
            bare = desc.without_address()
            self.made_in[value] = bare.layout.data_type
            if desc.layout.space is not Space.L1:
                self.lossless_outside.setdefault(value, []).append(bare)
                self.lying_outside.add((value, bare))
                continue
            size = self._size(bare)
            self._open(value, bare, self._new(frozenset({value}), bare, size, t + 1))
            if o not in taken:
                need += size
        return need

    def _gives(
        self, task: NumberedTask, value: int, desc: TensorDesc, t: int, last_use: Mapping[int, int]
    ) -> bool:
        """Whether an output may lie where this input lies: nobody else reads it."""
        bare = desc.without_address()
        return (
            last_use[value] <= t
            and task.inputs.count(value) == 1
            and value not in self.shared
            and (value, bare) not in self.pinned
        )

    @property
    def _granule(self) -> int:
        return self.request.machine.shape.space(Space.L1).granule

    def _size(self, desc: TensorDesc) -> int:
        return room_per_bank(desc, self.request.machine.shape)

    def _copied(self, value: int, desc: TensorDesc, t: int) -> _Open:
        """A copy in L1 that a task wants; another one has been before, so it can be dropped."""
        made = self._new(frozenset({value}), desc, self._size(desc), t)
        made.is_dirty = False
        self._copy(value, desc)
        self._open(value, desc, made)
        return made

    def _copy(self, value: int, desc: TensorDesc) -> None:
        """A copy that every plan makes, from wherever it takes least."""
        lying = [d for other, d in (*self.open, *self.pinned) if other == value]
        sources = {*self.lossless_outside.get(value, ()), *lying, *self._left_as(value)}
        seconds = []
        for source in sources:
            # Where nothing can come from, it does not.
            with suppress(LayoutError):
                seconds.append(self._seconds(source, desc))
        self.first_seconds += min(seconds, default=0.0)

    def _left_as(self, value: int) -> set[TensorDesc]:
        """How a value may come to lie where it has left a space."""
        inside = [desc for other, desc in self.open if other == value]
        outside = [
            d for d in self.lossless_outside.get(value, ()) if (value, d) in self.lying_outside
        ]
        left = {waiting_desc(desc) for desc in inside}
        return left | {waiting_desc(desc, Space.HOST) for desc in (*inside, *outside)}

    def _is_wanted_outside(self, value: int, desc: TensorDesc) -> None:
        """A task reads a value in another space: every plan copies it there, once, unless it lies
        there or comes there when it leaves; it survives in the copy, if that has lost nothing."""
        kind = desc.layout.data_type
        if (value, desc) not in self.lying_outside:
            if desc not in self._left_as(value):
                self._copy(value, desc)
            self.lying_outside.add((value, desc))
        inside = [(d.layout.data_type, held) for (v, d), held in self.open.items() if v == value]
        if kind is self.made_in.get(value) or any(other is kind for other, _ in inside):
            self.lossless_outside.setdefault(value, []).append(desc)
        for other, held in inside:
            if other is kind and held.is_dirty:
                held.is_dirty = not self._is_clean_by(held)

    def _is_clean_by(self, held: _Open) -> bool:
        """Whether what was written nowhere goes for nothing now, as copies lie outside of L1 and
        are not so dear to bring back that it is better written to DRAM as it is."""
        holder = self.holders[held.number]
        if not holder.values <= self.lossless_outside.keys():
            return False
        outside = [d for value in holder.values for d in self.lossless_outside[value]]
        dear = min(self._seconds(source, holder.desc) for source in outside)
        waiting = self._seconds(waiting_desc(holder.desc), holder.desc)
        if waiting < dear <= holder.write_seconds + waiting:
            # Which is better depends on how often it comes back.
            self.is_whole = False
        return dear <= holder.write_seconds + waiting

    def _stay(self, held: _Open, end: int, back_seconds: float) -> None:
        if held.idle_since < end and held.size:
            self.stays.append(
                Stay(held.number, held.idle_since, end, held.size, back_seconds, held.is_dirty)
            )

    def _end(self, value: int, end: int) -> None:
        """Nobody reads a value any more: what only it lies in is free."""
        for key in [key for key in self.open if key[0] == value]:
            held = self.open.pop(key)
            if all(other is not held for other in self.open.values()):
                self._stay(held, end, 0.0)

"""The chain: when tensors are wanted in L1, and what it costs if they are elsewhere in between.

Comes in: a `PlanRequest`. Goes out: a `StayChain` of stays. Must not know: addresses, rules, steps.

A *stay* is the time between two uses of a tensor in L1. If the tensor leaves, its bytes are free in
between; it has to be brought back for the next use, and, if it lies nowhere else, to be written to
DRAM first: once, as values never change. So residency is a covering problem: at every task at least
so many bytes must be away, at the least cost (allocation theory; exact is an integer program).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stitch.machine import footprint, round_up
from stitch.planner.copy_cost import copy_cost
from stitch.planner.plan import Instance, PlanRequest, waiting_desc
from stitch.program import Space, TensorDesc


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
    none where it is not above 0."""

    holders: tuple[Holder, ...]
    stays: tuple[Stay, ...]
    excess: tuple[int, ...]

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
    back_seconds: float
    idle_since: int
    is_dirty: bool


@dataclass(slots=True)
class _Reading:
    """Reads the tasks in order."""

    request: PlanRequest
    holders: list[Holder] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    #: What is in L1: by value and descriptor, and by resident buffer.
    open: dict[tuple[int, TensorDesc], _Open] = field(default_factory=dict)
    of_buffer: dict[int, _Open] = field(default_factory=dict)
    #: Values that lie outside of L1 too, in a form that has lost nothing.
    outside: set[int] = field(default_factory=set)

    def chain(self) -> StayChain:
        request = self.request
        shape = request.machine.shape.space(Space.L1)
        room = shape.capacity - self._read_residents()
        last_use = {v: t for t, task in enumerate(request.tasks) for v in task.inputs}
        busy = [0] * len(request.tasks)
        for t, task in enumerate(request.tasks):
            busy[t] = self._read_task(t)
            for value in {*task.inputs, *task.outputs}:
                if value not in request.kept and last_use.get(value, -1) <= t:
                    self._end(value)
        for held in {id(o): o for o in (*self.open.values(), *self.of_buffer.values())}.values():
            self._stay(held, len(request.tasks), 0.0)
        idle = [0] * (len(request.tasks) + 1)
        for stay in self.stays:
            idle[stay.first] += stay.nbytes
            idle[stay.end] -= stay.nbytes
        excess, lying = [], 0
        for t in range(len(request.tasks)):
            lying += idle[t]
            excess.append(busy[t] + lying - room)
        return StayChain(tuple(self.holders), tuple(self.stays), tuple(excess))

    def _read_residents(self) -> int:
        """Opens what lies in L1 at the start; the bytes that cannot leave."""
        request, stuck = self.request, 0
        users: dict[int, list[tuple[int, Instance]]] = {}
        places = {b.number: b for b in request.buffers}
        for resident in request.residents:
            origin = resident.instances[0].desc.layout.data_type
            for instance in resident.instances:
                users.setdefault(instance.buffer, []).append((resident.value, instance))
                buffer = places[instance.buffer]
                if buffer.space is not Space.L1 and instance.desc.layout.data_type is origin:
                    self.outside.add(resident.value)
        for buffer in request.buffers:
            if buffer.space is not Space.L1 or buffer.address is None:
                continue
            inside = users.get(buffer.number, [])
            if buffer.pinned or not inside:
                stuck += buffer.size_per_bank
                continue
            values = frozenset(value for value, _ in inside)
            held = self._new(values, buffer.desc, buffer.size_per_bank, 0)
            self.of_buffer[buffer.number] = held
            for value, instance in inside:
                self.open[value, instance.desc] = held
        return stuck

    def _new(self, values: frozenset[int], desc: TensorDesc, size: int, since: int) -> _Open:
        machine = self.request.machine
        waiting = waiting_desc(desc)
        write, back = (copy_cost(machine, *way)[1] for way in ((desc, waiting), (waiting, desc)))
        number = len(self.holders)
        self.holders.append(Holder(values, desc, write))
        return _Open(number, size, back, since, not values <= self.outside)

    def _read_task(self, t: int) -> int:
        """Ends the stays of what a task reads; the bytes that it needs in L1 meanwhile."""
        task = self.request.tasks[t]
        what = task.transformation
        used: dict[int, _Open] = {}
        need = 0
        if what.scratch is not None and what.scratch.space is Space.L1:
            need += round_up(what.scratch.size_per_bank, self._alignment)
        taken = dict(what.aliases)
        for value, desc in zip(task.inputs, what.inputs, strict=False):
            held = self._held(value, desc)
            if held is not None:
                used[id(held)] = held
            elif desc.layout.space is not Space.L1:
                # A copy that is made outside; the value survives in it, if it has lost nothing.
                self._is_outside(value, desc)
            else:
                held = self._copied(value, desc, t)
                used[id(held)] = held
        for o, (value, desc) in enumerate(zip(task.outputs, what.outputs, strict=True)):
            if desc.layout.space is not Space.L1:
                self.outside.add(value)
                continue
            bare = TensorDesc(desc.shape, desc.layout.without_address())
            size = self._size(bare)
            made = self._new(frozenset({value}), bare, size, t + 1)
            self.open[value, bare] = made
            if o not in taken:
                need += size
        for held in used.values():
            self._stay(held, t, held.back_seconds)
            held.idle_since = t + 1
            need += held.size
        for i in taken.values():
            self._end(task.inputs[i])
        return need

    @property
    def _alignment(self) -> int:
        return self.request.machine.shape.space(Space.L1).alignment

    def _size(self, desc: TensorDesc) -> int:
        nbytes = footprint(desc, self.request.machine.shape).size_per_bank
        return round_up(max(1, nbytes), self._alignment)

    def _held(self, value: int, desc: TensorDesc) -> _Open | None:
        """What serves an input from L1; a given address is met by moving it there."""
        return self.open.get((value, TensorDesc(desc.shape, desc.layout.without_address())))

    def _copied(self, value: int, desc: TensorDesc, t: int) -> _Open:
        bare = TensorDesc(desc.shape, desc.layout.without_address())
        made = self._new(frozenset({value}), bare, self._size(bare), t)
        # Another instance has been there before; what is copied can be dropped.
        made.is_dirty = False
        self.open[value, bare] = made
        return made

    def _is_outside(self, value: int, desc: TensorDesc) -> None:
        for (other, lying), held in self.open.items():
            if other == value and lying.layout.data_type is desc.layout.data_type:
                self.outside.add(value)
                if self.holders[held.number].values <= self.outside:
                    held.is_dirty = False

    def _stay(self, held: _Open, end: int, back_seconds: float) -> None:
        if held.idle_since < end and held.size:
            self.stays.append(
                Stay(held.number, held.idle_since, end, held.size, back_seconds, held.is_dirty)
            )

    def _end(self, value: int) -> None:
        """Nobody reads a value any more: what only it lies in is free."""
        for key in [key for key in self.open if key[0] == value]:
            held = self.open.pop(key)
            if any(other is held for other in self.open.values()):
                continue
            for buffer in [b for b, o in self.of_buffer.items() if o is held]:
                del self.of_buffer[buffer]

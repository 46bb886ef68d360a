"""What is where while a plan is being made: buffers, values, free regions, next uses.

This is the planner's own picture of the device. It is built from a frozen request, changed step by
step, and thrown away; the real memory is untouched until a finished plan runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from stitch.machine import MachineShape, SpaceShape, room_per_bank, round_up
from stitch.memory import LENT_ADDRESSES, Allocator
from stitch.packing import Span, minus, union
from stitch.planner.plan import (
    Allocate,
    Buffer,
    Free,
    Instance,
    PlanRequest,
    Region,
    Resident,
    Step,
)
from stitch.program import Scratch, Space, TensorDesc

#: "Not used again in this window": later than any task.
NEVER = 1 << 60


#: Which buffer leaves first: the one whose next use is farthest; one that was chosen with the whole
#: chain in view; the cheapest that makes room alone; or the cheapest for the time that it stays
#: away. Where things lie is not known to the choice, so no rule is best for every chain, and all
#: are tried where it matters.
Rule: TypeAlias = Literal["farthest", "chosen", "sufficient", "cheapest"]
RULES: tuple[Rule, ...] = ("farthest", "chosen", "sufficient", "cheapest")


#: (value, joins): a task reads a view not where it lies. It is copied out, so that its block may
#: go; or, if it joins, its copies go, and the block serves.
OtherWay: TypeAlias = tuple[int, bool]


class PlanState:
    """The planner's picture of buffers, values and free regions; every change appends a step."""

    def __init__(
        self,
        request: PlanRequest,
        rule: Rule = "farthest",
        away: frozenset[tuple[int, int]] = frozenset(),
        *,
        spills: bool = True,
        slack_seconds: float = 0.0,
    ) -> None:
        self.request = request
        self.rule = rule
        #: So much longer may moves take together that stay inside their space, where bytes could
        #: leave it.
        self.slack_seconds = slack_seconds
        #: Views that the current task does not read where they lie, and how others could be read.
        self.otherwise: frozenset[OtherWay] = frozenset()
        self.views: frozenset[OtherWay] = frozenset()
        spaces = {s for s in request.machine.shape.spaces if spills or s is not Space.HOST}
        self._outlets = {
            Space.L1: tuple([s for s in (Space.DRAM, Space.HOST) if s in spaces]),
            Space.DRAM: tuple([s for s in (Space.HOST,) if s in spaces]),
        }
        #: Values that were chosen to leave before their use by a task (the number of tasks: before
        #: the end).
        self.away = away
        #: Whether anything had to leave a space, so that the rule made a difference.
        self.pressed = False
        #: Whether a buffer lies where it does because of what later tasks name.
        self.foresaw = False
        self.machine = request.machine
        self.steps: list[Step] = []
        self.task = 0
        self.reading: frozenset[int] = frozenset()
        self.buffers: dict[int, Buffer] = {buffer.number: buffer for buffer in request.buffers}
        # What can be taken back is never changed in place, so that a copy of it is shallow.
        self.values: dict[int, tuple[Instance, ...]] = {}
        self.idle = {resident.value: resident.idle for resident in request.residents}
        self.touched: set[int] = set()
        #: Buffers that the current task reads where they are: they stay in their space.
        self.locked: set[int] = set()
        self.claimed: list[tuple[Space, int, int]] = []
        self._resident = frozenset(self.buffers)
        self._next_buffer = max(self.buffers, default=-1) + 1
        #: The task that made a buffer.
        self.made: dict[int, int] = {}
        self.allocators = taken_in(request)
        # A block may have thousands of views: its set is built once, not once for each.
        users: dict[int, set[int]] = {number: set() for number in self.buffers}
        for resident in request.residents:
            known = self.values.get(resident.value, ())
            self.values[resident.value] = (*known, *resident.instances)
            for instance in resident.instances:
                users[instance.buffer].add(resident.value)
        self.users = {number: frozenset(values) for number, values in users.items()}
        self._uses = _uses(request)
        end = len(request.tasks)
        self._later = {v: max(end, use) for v, use in request.later if v in request.kept}

    def shape(self, space: Space) -> SpaceShape:
        return self.machine.shape.space(space)

    def outlets(self, space: Space) -> tuple[Space, ...]:
        """Where the tensors of a space can wait, the nearest first."""
        return self._outlets.get(space, ())

    def attempt(self) -> Callable[[], None]:
        """Gives what takes back all changes from now on, once."""
        steps, claimed, following = len(self.steps), len(self.claimed), self._next_buffer
        buffers, made, touched = dict(self.buffers), dict(self.made), set(self.touched)
        values, users, slack = dict(self.values), dict(self.users), self.slack_seconds
        allocators = {space: allocator.clone() for space, allocator in self.allocators.items()}

        def take_back() -> None:
            del self.steps[steps:], self.claimed[claimed:]
            self._next_buffer, self.buffers, self.made = following, buffers, made
            self.touched, self.values, self.users = touched, values, users
            self.allocators, self.slack_seconds = allocators, slack

        return take_back

    # -- values ---------------------------------------------------------------------------------

    def attach(self, value: int, instance: Instance) -> None:
        """A further instance of a value (the first one becomes its primary)."""
        self.values[value] = (*self.values.get(value, ()), instance)
        self.users[instance.buffer] |= {value}

    def begin(self, task: int, otherwise: frozenset[OtherWay] = frozenset()) -> None:
        """The plan now comes to this task, which reads some views not where they lie."""
        self.task, self.otherwise = task, otherwise
        self.views = frozenset()
        self.reading = frozenset(self.request.tasks[task].inputs)
        self.locked.clear()

    def surrender(self, value: int, buffer: int, heir: int) -> None:
        """An output has overwritten this buffer: the donated value no longer lies there."""
        self.values[value] = tuple([i for i in self.values[value] if i.buffer != buffer])
        self.users[buffer] = frozenset((heir,))

    def next_use(self, value: int, space: Space) -> int:
        """The next task after the current one that reads a value, or is predicted to where this is
        asked for L1; `NEVER` if none in sight."""
        uses = self._uses.get(value, ())
        at = bisect_right(uses, self.task)
        if at < len(uses):
            return uses[at]
        return self._later.get(value, NEVER) if space is Space.L1 else NEVER

    def is_needed(self, value: int) -> bool:
        """Whether anything can still read a value after the current task."""
        return value in self.request.kept or self.next_use(value, Space.L1) != NEVER

    def find(self, value: int, desc: TensorDesc, address: int | None) -> Instance | None:
        """An instance of a value in a layout, at an address if one is asked for.

        A host array outside the spaces is none: programs read what lies in a space.
        """
        for instance in self.values[value]:
            at = self.buffers[instance.buffer].address
            if (
                instance.desc == desc
                and at is not None
                and (address is None or (at == address and not instance.offset_nbytes))
            ):
                return instance
        return None

    def is_spare(self, value: int, instance: Instance) -> bool:
        """Whether the value survives without this instance: another holds the same numbers."""
        origin = self.values[value][0].desc.layout.data_type
        return any(
            other is not instance
            and other.buffer != instance.buffer
            and other.desc.layout.data_type is origin
            for other in self.values[value]
        )

    def detach(self, value: int, instance: Instance) -> None:
        """Forget an instance; its buffer is freed when no value uses it any more, but if pinned."""
        instances = list(self.values[value])
        origin = instances[0].desc.layout.data_type
        instances.remove(instance)
        # The primary instance is one that has lost nothing; the order stays otherwise.
        instances.sort(key=lambda i: i.desc.layout.data_type is not origin)
        self.values[value] = tuple(instances)
        buffer = instance.buffer
        if all(other.buffer != buffer for other in instances):
            self.users[buffer] -= {value}
        if not self.users[buffer] and not self.buffers[buffer].pinned:
            self.free(buffer)

    def drop(self, value: int) -> None:
        """A value is dead: forget all of its instances."""
        for instance in self.values[value]:
            self.detach(value, instance)
        del self.values[value]

    # -- buffers ---------------------------------------------------------------------------------

    def touch(self, buffer: int) -> None:
        """The plan depends on this resident buffer being where it is."""
        if buffer in self._resident:
            self.touched.add(buffer)

    def allocate(self, space: Space, address: int, size: int, desc: TensorDesc, origin: str) -> int:
        """A new buffer at an address that is free now."""
        self.allocators[space].alloc_at(address, size)
        number = self._next_buffer
        self._next_buffer += 1
        buffer = Buffer(number, space, address, size, desc, origin)
        self.buffers[number] = buffer
        self.users[number] = frozenset()
        self.made[number] = self.task
        self.claimed.append((space, address, size))
        self.steps.append(Allocate(buffer))
        return number

    def rename(self, buffer: int, origin: str) -> None:
        """A buffer now holds something else (an output that took its input's place)."""
        self.buffers[buffer] = replace(self.buffers[buffer], origin=origin)

    def free(self, buffer: int) -> None:
        """Give a buffer's region back (a host array outside the spaces is merely forgotten)."""
        self.touch(buffer)
        gone = self.buffers.pop(buffer)
        del self.users[buffer]
        self.made.pop(buffer, None)
        if gone.address is not None:
            self.allocators[gone.space].free(gone.address)
            self.steps.append(Free(buffer))

    def moved(self, targets: dict[int, int]) -> None:
        """Buffers of one space now lie at new addresses (the caller has recorded the step)."""
        for buffer in targets:
            self.touch(buffer)
            moving = self.buffers[buffer]
            assert moving.address is not None
            self.allocators[moving.space].free(moving.address)
        for buffer, address in targets.items():
            moving = self.buffers[buffer]
            self.allocators[moving.space].alloc_at(address, moving.size_per_bank)
            self.claimed.append((moving.space, address, moving.size_per_bank))
            self.buffers[buffer] = replace(moving, address=address)

    def in_space(self, space: Space) -> list[Buffer]:
        """The buffers that lie in a space, by address."""
        there = [
            b
            for b in self.buffers.values()
            if b.space is space and b.address is not None and b.address < LENT_ADDRESSES
        ]
        return sorted(there, key=lambda b: b.address or 0)

    def size_of(self, desc: TensorDesc) -> int:
        """Bytes per bank that a descriptor takes on this machine."""
        return room_per_bank(desc, self.machine.shape)

    # -- the end --------------------------------------------------------------------------------

    def free_regions(self) -> tuple[tuple[Space, int, int], ...]:
        """What must be free at the start: all regions claimed, less those of touched residents."""
        holders = [b for b in self.request.buffers if b.number in self.touched]
        return needed_regions(self.claimed, holders)

    def final_values(self) -> tuple[Resident, ...]:
        """The values alive, with their instances."""
        return tuple(Resident(value, instances) for value, instances in sorted(self.values.items()))

    def soonest(self, value: int, space: Space) -> int:
        """The task that needs a value where it is next: the current one, if it reads it there."""
        otherwise = (value, False) in self.otherwise
        return self.task if value in self.reading and not otherwise else self.next_use(value, space)

    def lifetime(self, buffer: Buffer) -> str:
        """Which task made a buffer, which queued task reads it next, and who holds it, in words."""
        made = self.made.get(buffer.number)
        words = ["there before" if made is None else f"made by task {made}"]
        users = self.users[buffer.number]
        use = min((self.soonest(value, buffer.space) for value in users), default=NEVER)
        if use < len(self.request.tasks):
            words.append(f"read by queued task {use}")
        if users & self.request.kept:
            words.append("held by a handle")
        if buffer.pinned:
            program = "" if users else " or a loaded program"
            words.append(f"pinned by an exported array{program}")
        return ", ".join(words)


def taken_in(request: PlanRequest) -> dict[Space, Allocator]:
    """What lies in each space of a request's machine."""
    allocators: dict[Space, Allocator] = {}
    for space in request.machine.shape.spaces:
        shape = request.machine.shape.space(space)
        allocators[space] = Allocator.of(shape)
    for buffer in request.buffers:
        # Lent bytes lie beyond the end of their space, where nothing is allocated.
        if buffer.address is not None and buffer.address < LENT_ADDRESSES:
            allocators[buffer.space].alloc_at(buffer.address, buffer.size_per_bank)
    return allocators


def _uses(request: PlanRequest) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for index, task in enumerate(request.tasks):
        for value in task.inputs:
            readers = uses.setdefault(value, [])
            if not readers or readers[-1] != index:
                readers.append(index)
    return uses


def scratch_in_l1(scratch: Scratch | None, shape: MachineShape) -> Region | None:
    """The bytes that a program's scratch in L1 is promised, at the bottom; None for any other."""
    if scratch is None or scratch.space is not Space.L1 or not scratch.size_per_bank:
        return None
    l1 = shape.space(Space.L1)
    return Space.L1, l1.base, round_up(scratch.size_per_bank, l1.granule)


def needed_regions(claimed: Iterable[Region], holders: Sequence[Buffer]) -> tuple[Region, ...]:
    """The regions claimed, less those of buffers that are there at the start."""
    held = ranges_of(
        (b.space, b.address, b.size_per_bank) for b in holders if b.address is not None
    )
    return tuple(
        [
            (space, start, end - start)
            for space, spans in ranges_of(claimed).items()
            for start, end in minus(spans, held.get(space, ()))
        ]
    )


def ranges_of(regions: Iterable[Region]) -> dict[Space, list[Span]]:
    """The same bytes as spans of each space, in order and apart."""
    spans: dict[Space, list[Span]] = {}
    for space, start, size in sorted(regions, key=lambda region: region[0].value):
        if size:
            spans.setdefault(space, []).append((start, start + size))
    return {space: union(those) for space, those in spans.items()}

"""The planner's model of device memory: buffers, values, free regions and next uses.

It is built from a request, changed step by step, and discarded; the device is not touched until a
finished plan runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

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

#: Next use of a value that no task of the batch reads: later than any task.
NEVER = 1 << 60

#: Rules that rank buffers for eviction: the farthest next use (Belady); the choice made over the
#: whole chain (`residency`); the cheapest buffer that is sufficient alone; the least cost per task
#: of absence. The best one depends on fragmentation, so all are tried if something must be evicted.
#: A machine may name a plugin's rule (`Machine.residency`), which is then the only one.
RULES = ("farthest", "chosen", "sufficient", "cheapest")

#: (value, joins): how to read a view: from a copy of its own, so that its block can be evicted, or
#: (`joins`) from its block, after dropping its own copies.
ViewOption: TypeAlias = tuple[int, bool]


class RepeatedPlan(Exception):
    """The rule has made all decisions of an earlier plan, so the rest would be the same."""


class PlanState:
    """Buffers, values and free regions during planning; every change appends a step.

    Args:
        request: The state before the plan.
        spills: Whether tensors may be evicted to the host.
    """

    def __init__(self, request: PlanRequest, *, spills: bool = True) -> None:
        self.request = request
        #: Options in effect for the views that the current task reads, and further ones to try.
        self.chosen_views: frozenset[ViewOption] = frozenset()
        self.views: frozenset[ViewOption] = frozenset()
        spaces = {s for s in request.machine.shape.spaces if spills or s is not Space.HOST}
        #: The spaces that tensors of a space can be evicted to, nearest first.
        self.outlets = {
            Space.L1: tuple([s for s in (Space.DRAM, Space.HOST) if s in spaces]),
            Space.DRAM: tuple([s for s in (Space.HOST,) if s in spaces]),
            Space.HOST: (),
        }
        self.machine = request.machine
        self.slack_seconds = 0.0
        self.steps: list[Step] = []
        self.task = 0
        self.reading: frozenset[int] = frozenset()
        self.buffers: dict[int, Buffer] = {buffer.number: buffer for buffer in request.buffers}
        # Immutable values, so that `checkpoint` can copy the dict.
        self.values: dict[int, tuple[Instance, ...]] = {}
        self.idle = {resident.value: resident.idle for resident in request.residents}
        self.touched: set[int] = set()
        #: Buffers that the current task reads in place: they must stay in their space.
        self.locked: set[int] = set()
        self.claimed: list[tuple[Space, int, int]] = []
        self._resident = frozenset(self.buffers)
        self._next_buffer = max(self.buffers, default=-1) + 1
        #: The task that allocated a buffer.
        self.made: dict[int, int] = {}
        self.allocators = allocators_of(request)
        # A block may have thousands of views: build its set once.
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
        self.begin_plan()

    def begin_plan(
        self,
        rule: str = "farthest",
        away: frozenset[tuple[int, int]] = frozenset(),
        slack_seconds: float = 0.0,
        known: Collection[list[int]] = (),
    ) -> Callable[[], None]:
        """Set the rule for the plan that follows; return a function that undoes the plan.

        Args:
            rule: Ranks buffers for eviction.
            away: For rule `chosen`: (value, task) pairs to evict before that use; the number of
                tasks stands for the end.
            slack_seconds: Total extra time allowed for moves inside a space instead of staging
                outside.
            known: The decisions of earlier plans that differ in the rule only.
        """
        undo = self.checkpoint()
        self.rule, self.away, self.slack_seconds = rule, away, slack_seconds
        #: Whether something was evicted, so that the rule mattered.
        self.pressed = False
        #: Whether an address was chosen because of a later task.
        self.used_lookahead = False
        #: The buffers that the rule has chosen, in order, whether or not that was undone.
        self.decisions: list[int] = []
        self._known_decisions = known
        return undo

    def shape(self, space: Space) -> SpaceShape:
        return self.machine.shape.space(space)

    def checkpoint(self) -> Callable[[], None]:
        """Return a function that undoes all changes from now on; call it at most once."""
        steps, claimed, following = len(self.steps), len(self.claimed), self._next_buffer
        buffers, made, touched = dict(self.buffers), dict(self.made), set(self.touched)
        values, users, slack = dict(self.values), dict(self.users), self.slack_seconds
        allocators = {space: allocator.clone() for space, allocator in self.allocators.items()}

        def undo() -> None:
            del self.steps[steps:], self.claimed[claimed:]
            self._next_buffer, self.buffers, self.made = following, buffers, made
            self.touched, self.values, self.users = touched, values, users
            self.allocators, self.slack_seconds = allocators, slack

        return undo

    def attach(self, value: int, instance: Instance) -> None:
        """Add an instance of a value; the first one becomes its primary."""
        self.values[value] = (*self.values.get(value, ()), instance)
        self.users[instance.buffer] |= {value}

    def decide(self, buffer: int) -> None:
        """Note which buffer the rule has chosen; raises `RepeatedPlan`."""
        self.decisions.append(buffer)
        if self.decisions in self._known_decisions:
            raise RepeatedPlan

    def begin(self, task: int, chosen_views: frozenset[ViewOption] = frozenset()) -> None:
        """Advance to a task, and set how it reads its views."""
        self.task, self.chosen_views = task, chosen_views
        self.views = frozenset()
        self.reading = frozenset(self.request.tasks[task].inputs)
        self.locked.clear()

    def replace_donated(self, value: int, buffer: int, heir: int) -> None:
        """Replace a donated value in a buffer by the output that overwrites it."""
        self.values[value] = tuple([i for i in self.values[value] if i.buffer != buffer])
        self.users[buffer] = frozenset((heir,))

    def next_use(self, value: int, space: Space) -> int:
        """Return the next task that reads a value, else its predicted use in L1, else `NEVER`."""
        uses = self._uses.get(value, ())
        at = bisect_right(uses, self.task)
        if at < len(uses):
            return uses[at]
        return self._later.get(value, NEVER) if space is Space.L1 else NEVER

    def is_needed(self, value: int) -> bool:
        """Whether a value is read after the current task or still referenced."""
        return value in self.request.kept or self.next_use(value, Space.L1) != NEVER

    def find(self, value: int, desc: TensorDesc, address: int | None) -> Instance | None:
        """Return an instance of a value in a space, in a layout, at `address` if given."""
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
        """Whether another buffer holds the value without loss of precision."""
        origin = self.values[value][0].desc.layout.data_type
        return any(
            other is not instance
            and other.buffer != instance.buffer
            and other.desc.layout.data_type is origin
            for other in self.values[value]
        )

    def detach(self, value: int, instance: Instance) -> None:
        """Remove an instance; free its buffer if no value uses it and it is not pinned."""
        instances = list(self.values[value])
        origin = instances[0].desc.layout.data_type
        instances.remove(instance)
        # Keep an exact instance first; the sort is stable.
        instances.sort(key=lambda i: i.desc.layout.data_type is not origin)
        self.values[value] = tuple(instances)
        buffer = instance.buffer
        if all(other.buffer != buffer for other in instances):
            self.users[buffer] -= {value}
        if not self.users[buffer] and not self.buffers[buffer].pinned:
            self.free(buffer)

    def drop(self, value: int) -> None:
        """Remove all instances of a dead value."""
        for instance in self.values[value]:
            self.detach(value, instance)
        del self.values[value]

    def touch(self, buffer: int) -> None:
        """Note that the plan depends on this resident buffer."""
        if buffer in self._resident:
            self.touched.add(buffer)

    def allocate(self, space: Space, address: int, size: int, desc: TensorDesc, origin: str) -> int:
        """Allocate a buffer at a free address; return its number."""
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
        """Set the origin of a buffer that an output took over."""
        self.buffers[buffer] = replace(self.buffers[buffer], origin=origin)

    def free(self, buffer: int) -> None:
        """Free a buffer; host arrays outside the spaces are only forgotten."""
        self.touch(buffer)
        gone = self.buffers.pop(buffer)
        del self.users[buffer]
        self.made.pop(buffer, None)
        if gone.address is not None:
            self.allocators[gone.space].free(gone.address)
            self.steps.append(Free(buffer))

    def moved(self, targets: dict[int, int]) -> None:
        """Set new addresses of buffers of one space; the caller appends the step."""
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
        """Return the buffers of a space, by address."""
        there = [
            b
            for b in self.buffers.values()
            if b.space is space and b.address is not None and b.address < LENT_ADDRESSES
        ]
        return sorted(there, key=lambda b: b.address or 0)

    def size_of(self, desc: TensorDesc) -> int:
        """Return the bytes per bank that a buffer for a descriptor takes."""
        return room_per_bank(desc, self.machine.shape)

    def free_regions(self) -> tuple[tuple[Space, int, int], ...]:
        """Return the regions that must be free at the start."""
        holders = [b for b in self.request.buffers if b.number in self.touched]
        return needed_regions(self.claimed, holders)

    def final_values(self) -> tuple[Resident, ...]:
        """Return the live values with their instances."""
        return tuple(Resident(value, instances) for value, instances in sorted(self.values.items()))

    def soonest(self, value: int, space: Space) -> int:
        """Return the task that reads a value next, or the current one if it reads it in place."""
        chosen_views = (value, False) in self.chosen_views
        return (
            self.task if value in self.reading and not chosen_views else self.next_use(value, space)
        )

    def lifetime(self, buffer: Buffer) -> str:
        """Describe a buffer's maker, next reader, and what keeps it alive, for errors."""
        made = self.made.get(buffer.number)
        words = ["allocated before" if made is None else f"made by task {made}"]
        users = self.users[buffer.number]
        use = min((self.soonest(value, buffer.space) for value in users), default=NEVER)
        if use < len(self.request.tasks):
            words.append(f"read by queued task {use}")
        if users & self.request.kept:
            words.append("referenced by a handle")
        if buffer.pinned:
            program = "" if users else " or a loaded program"
            words.append(f"pinned by an exported array{program}")
        return ", ".join(words)


def allocators_of(request: PlanRequest) -> dict[Space, Allocator]:
    """Return an allocator per space with the buffers of a request."""
    allocators: dict[Space, Allocator] = {}
    for space in request.machine.shape.spaces:
        shape = request.machine.shape.space(space)
        allocators[space] = Allocator.of(shape)
    for buffer in request.buffers:
        # Lent buffers have addresses beyond the end of the space.
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
    """Return the region at the bottom of L1 for a program's scratch; None if it uses none there."""
    if scratch is None or scratch.space is not Space.L1 or not scratch.size_per_bank:
        return None
    l1 = shape.space(Space.L1)
    return Space.L1, l1.base, round_up(scratch.size_per_bank, l1.granule)


def needed_regions(claimed: Iterable[Region], holders: Sequence[Buffer]) -> tuple[Region, ...]:
    """Return the claimed regions minus those of buffers present at the start."""
    held = ranges_of(
        (b.space, b.address, b.size_per_bank) for b in holders if b.address is not None
    )
    return tuple([
        (space, start, end - start)
        for space, spans in ranges_of(claimed).items()
        for start, end in minus(spans, held.get(space, ()))
    ])  # fmt: skip


def ranges_of(regions: Iterable[Region]) -> dict[Space, list[Span]]:
    """Return the regions of each space as sorted, disjoint spans."""
    spans: dict[Space, list[Span]] = {}
    for space, start, size in sorted(regions, key=lambda region: region[0].value):
        if size:
            spans.setdefault(space, []).append((start, start + size))
    return {space: union(those) for space, those in spans.items()}

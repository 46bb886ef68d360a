"""Choose the addresses of what a task allocates, and free memory for it.

In this order: the address that the program requires; the address that a later task requires, if
that costs no more than a move at that task; else the best fit, away from addresses that later tasks
require. With a `StaticLayout`, the layout decides instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import MachineShape, room_per_bank
from stitch.packing import Span, union
from stitch.planner.eviction import SpaceDemand, find_addresses
from stitch.planner.plan import PlanRequest
from stitch.planner.plan_state import PlanState, scratch_in_l1
from stitch.planner.static_layout import StaticLayout
from stitch.program import Space, TensorDesc
from stitch.tasks import NumberedTask, Transformation

#: Addresses that a program requires: inputs (slot, layout, address), and the spans of its slots and
#: its scratch.
_Names = tuple[list[tuple[int, TensorDesc, int]], list[tuple[Space, Span]]]
#: Tasks in order, by space and span.
_Tasks = dict[Space, dict[Span, list[int]]]


class RequiredAddresses:
    """Addresses that programs require, and regions of scratch in L1; false if there are none."""

    def __init__(self, request: PlanRequest) -> None:
        #: By value: (task that reads it, layout, address), in order.
        self._wanted: dict[int, list[tuple[int, TensorDesc, int]]] = {}
        #: By value: the task whose output overwrites it, and that output.
        self._overwritten_by: dict[int, tuple[int, int]] = {}
        #: Tasks that require a span, and tasks that make a value which a later task requires there.
        self._required_by: _Tasks = {}
        self._made_by: _Tasks = {}
        self._until = {v: t for t, task in enumerate(request.tasks) for v in task.inputs}
        self._until |= dict.fromkeys(request.kept, len(request.tasks))
        names: dict[int, _Names] = {}
        for t, task in enumerate(request.tasks):
            what = task.transformation
            if what.key not in names:
                names[what.key] = _requirements(what, request.machine.shape)
            self._read(t, task, names[what.key])
        for value, (_, heir) in reversed(self._overwritten_by.items()):
            self._until[value] = self._until.get(heir, -1)
        self._find_producers(request)

    def __bool__(self) -> bool:
        return bool(self._required_by)

    def preferred_address(
        self, state: PlanState, value: int, desc: TensorDesc, size: int
    ) -> int | None:
        """Return the address that a later task requires for a value of the current task; None if
        the span is not available until then.

        A buffer in the span counts as available if it must be moved or freed by then anyway.
        """
        following = self._next(value, desc, state.task)
        if following is None or not size:
            return None
        task, address = following
        space, span = desc.layout.space, (address, address + size)
        if _meets(span, _spans(self._required_by, space, state.task, task - 1)):
            return None
        shape = state.shape(space)
        if address < shape.base or span[1] > shape.limit or address % shape.granule:
            return None
        if not state.allocators[space].is_free(address, size):
            for buffer in state.in_space(space):
                at = buffer.address or 0
                if _meets(span, [(at, at + buffer.size_per_bank)]) and (
                    buffer.pinned
                    or all(self._until.get(v, -1) < task for v in state.users[buffer.number])
                ):
                    return None
        return address

    def choose_address(
        self, state: PlanState, value: int, desc: TensorDesc, span: Span, taken: Iterable[Span]
    ) -> int:
        """Return `span`, or a free address elsewhere if a later task requires bytes of `span`."""
        (address, end), space = span, desc.layout.space
        following = self._next(value, desc, state.task)
        if following is not None and following[1] == address:
            return address
        until = self._until.get(value, -1) if following is None else following[0]
        named = _spans(self._required_by, space, state.task + 1, until)
        named += _spans(self._made_by, space, state.task + 1, until)
        if not _meets(span, named):
            return address
        size, outside = end - address, union([*named, *taken])
        apart = state.allocators[space].gaps(outside, size).take(size)
        if not apart:
            return address
        state.used_lookahead = True
        return apart[0]

    def _read(self, t: int, task: NumberedTask, names: _Names) -> None:
        inputs, regions = names
        given = {}
        for o, i in task.transformation.aliases:
            value = task.inputs[i]
            # A value that is read later is copied before it is overwritten.
            given[i] = self._until[value] == t and task.inputs.count(value) == 1
            if given[i]:
                self._overwritten_by[value] = t, task.outputs[o]
        for slot, form, address in inputs:
            if given.get(slot, True):
                self._wanted.setdefault(task.inputs[slot], []).append((t, form, address))
        for space, span in regions:
            tasks = self._required_by.setdefault(space, {}).setdefault(span, [])
            if not tasks or tasks[-1] != t:
                tasks.append(t)

    def _next(self, value: int, desc: TensorDesc, task: int) -> tuple[int, int] | None:
        """Return (task, address) of the next requirement for a value or its overwriting outputs."""
        while True:
            reads = self._wanted.get(value, ())
            for at, form, address in reads[bisect_right(reads, task, key=itemgetter(0)) :]:
                if form == desc:
                    return at, address
            if value not in self._overwritten_by:
                return None
            task, value = self._overwritten_by[value]

    def _find_producers(self, request: PlanRequest) -> None:
        for t, task in enumerate(request.tasks if self._wanted else ()):
            what, taken = task.transformation, dict(task.transformation.aliases)
            for o, (value, desc) in enumerate(zip(task.outputs, what.outputs, strict=True)):
                following = None if o in taken else self._next(value, desc, t)
                if following is not None:
                    size = room_per_bank(desc, request.machine.shape)
                    span = following[1], following[1] + size
                    makers = self._made_by.setdefault(desc.layout.space, {})
                    makers.setdefault(span, []).append(t)


def _spans(tasks: _Tasks, space: Space, first: int, last: int) -> list[Span]:
    """Return the spans for which there is a task from `first` to `last`."""
    spans = []
    for span, those in tasks.get(space, {}).items():
        at = bisect_left(those, first)
        if at < len(those) and those[at] <= last:
            spans.append(span)
    return spans


def _requirements(what: Transformation, shape: MachineShape) -> _Names:
    inputs: list[tuple[int, TensorDesc, int]] = []
    regions: list[tuple[Space, Span]] = []
    for slot, desc in enumerate((*what.inputs, *what.outputs)):
        address, form = desc.layout.address, desc.without_address()
        if address is not None:
            size = room_per_bank(form, shape)
            regions.append((form.layout.space, (address, address + size)))
            if slot < len(what.inputs):
                inputs.append((slot, form, address))
    promised = scratch_in_l1(what.scratch, shape)
    if promised is not None:
        _, base, size = promised
        regions.append((Space.L1, (base, base + size)))
    return inputs, regions


def _meets(span: Span, others: Sequence[Span]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in others)


#: L1 first: evictions from L1 need memory in DRAM.
SPACE_ORDER = (Space.L1, Space.DRAM, Space.HOST)


@dataclass(slots=True)
class NewBuffer:
    """A buffer to allocate for a task: the copy of an input, a block that is brought back, or an
    output.

    `becomes`: the value stored in it after the task.
    """

    what: str
    origin: str
    desc: TensorDesc
    address: int | None
    size: int
    value: int
    becomes: int
    buffer: int = -1

    @property
    def span(self) -> Span:
        """The address range, once assigned."""
        assert self.address is not None
        return self.address, self.address + self.size

    @classmethod
    def of(
        cls, state: PlanState, what: str, desc: TensorDesc, value: int, becomes: int | None = None
    ) -> NewBuffer:
        """Create it for a slot's descriptor; `becomes` defaults to `value`."""
        bare, address, size = desc.without_address(), desc.layout.address, state.size_of(desc)
        origin = f"{what} of {state.request.tasks[state.task].transformation.name!r}"
        return cls(what, origin, bare, address, size, value, value if becomes is None else becomes)


def allocate(
    state: PlanState,
    demands: Mapping[Space, SpaceDemand],
    wants: Sequence[NewBuffer],
    required: RequiredAddresses | None,
    static_layout: StaticLayout | None = None,
) -> None:
    """Allocate the buffers of a task; raises what `find_addresses` raises."""
    for space in SPACE_ORDER:
        demand = demands.get(space)
        mine = [w for w in wants if w.desc.layout.space is space]
        if demand is None:
            if mine:
                state.shape(space)  # raises: the machine has no such space
            continue
        if (
            static_layout is None
            or static_layout.space is not space
            or (not _apply_layout(state, demand, mine, static_layout))
        ):
            _place(state, demand, mine, required)
        for w in mine:
            w.buffer = state.allocate(space, w.span[0], w.size, w.desc, w.origin)


def _place(
    state: PlanState,
    demand: SpaceDemand,
    wants: Sequence[NewBuffer],
    required: RequiredAddresses | None,
) -> None:
    fixed = [w for w in wants if w.address is not None]
    loose = [w for w in wants if w.address is None]
    demand.fixed += [(w.address or 0, w.size, w.origin) for w in fixed]
    addresses = (
        _at_preferred_addresses(state, demand, loose, required) if required is not None else None
    )
    if addresses is None:
        demand.floating += [(w.size, w.what) for w in loose]
        addresses = find_addresses(state, demand)
    for w, address in zip(loose, addresses, strict=True):
        w.address = address
    if required is not None:
        scratch = [(address, address + size) for address, size, _ in demand.fixed]
        for w in loose:
            taken = [*scratch, *(other.span for other in wants if other is not w)]
            w.address = required.choose_address(state, w.becomes, w.desc, w.span, taken)


def _apply_layout(
    state: PlanState, demand: SpaceDemand, wants: Sequence[NewBuffer], static_layout: StaticLayout
) -> bool:
    """Assign the static layout's addresses and make its moves; False if that evicts something."""
    relocate = dict(demand.relocate)
    for number, was, now in static_layout.moves.get(state.task, ()):
        buffer = state.buffers.get(number)
        if buffer is not None and buffer.space is demand.space and buffer.address == was:
            relocate.setdefault(number, now)
    chosen = [
        static_layout.allocations.get((state.task, k)) if w.address is None else w.address
        for k, w in enumerate(wants)
    ]
    addresses = _without_eviction(state, replace(demand, relocate=relocate), wants, chosen)
    for w, address in zip(wants, addresses or (), strict=False):
        w.address = address
    return addresses is not None


def _at_preferred_addresses(
    state: PlanState, demand: SpaceDemand, wants: Sequence[NewBuffer], required: RequiredAddresses
) -> list[int] | None:
    """Return addresses that later tasks require, if that evicts nothing; else None."""
    named = [required.preferred_address(state, w.becomes, w.desc, w.size) for w in wants]
    if all(address is None for address in named):
        return None
    addresses = _without_eviction(state, demand, wants, named)
    state.used_lookahead |= addresses is not None
    return addresses


def _without_eviction(
    state: PlanState, demand: SpaceDemand, wants: Sequence[NewBuffer], chosen: Sequence[int | None]
) -> list[int] | None:
    """Free memory at the chosen addresses (None: any) by moves only; None if that fails."""
    places = list(zip(wants, chosen, strict=True))
    fixed = [(address, w.size, w.origin) for w, address in places if address is not None]
    loose = [(w.size, w.what) for w, address in places if address is None]
    undo = state.checkpoint()
    try:
        found = iter(find_addresses(
            state, replace(demand, fixed=demand.fixed + fixed, floating=loose, evicts=False)
        ))  # fmt: skip
    except (LayoutError, OutOfMemoryError):
        undo()
        return None
    return [next(found) if address is None else address for address in chosen]

"""Addresses: where what a task needs made comes to lie, and room for it.

Three choices, in this order: where a program names the address, there; where a later task names
one, there at once, if that costs no more than to move it then (it is *born* there); else the best
fit among what lies there, beside what later tasks name. A plan that is made again says where
instead, and what moves for that (`StaticLayout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.packing import Span
from stitch.planner.lifetimes import StaticLayout
from stitch.planner.making_room import RoomDemand, make_room
from stitch.planner.named_places import NamedPlaces
from stitch.planner.plan_state import PlanState
from stitch.program import Space, TensorDesc

#: L1 first: what it evicts needs room in DRAM before DRAM is dealt out.
SPACE_ORDER = (Space.L1, Space.DRAM, Space.HOST)


@dataclass(slots=True)
class Want:
    """A buffer that a task needs made: for an input to be copied into, for a block that comes back,
    or for an output.

    `becomes`: the value that lies in it after the task.
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
        """Its bytes, once it has an address."""
        assert self.address is not None
        return self.address, self.address + self.size

    @classmethod
    def of(
        cls, state: PlanState, what: str, desc: TensorDesc, value: int, becomes: int | None = None
    ) -> Want:
        """As a slot's descriptor says; `becomes`: where not the value itself."""
        bare, address, size = desc.without_address(), desc.layout.address, state.size_of(desc)
        origin = f"{what} of {state.request.tasks[state.task].transformation.name!r}"
        return cls(what, origin, bare, address, size, value, value if becomes is None else becomes)


def allocate(
    state: PlanState,
    demands: Mapping[Space, RoomDemand],
    wants: Sequence[Want],
    ahead: NamedPlaces | None,
    standing: StaticLayout | None = None,
) -> None:
    """Buffers for all that a task wants, in room that each space's demand makes. Raises what
    `make_room` raises."""
    for space in SPACE_ORDER:
        demand = demands.get(space)
        mine = [w for w in wants if w.desc.layout.space is space]
        if demand is None:
            if mine:
                state.shape(space)  # raises: the machine has no such space
            continue
        chosen = standing if standing is not None and standing.space is space else None
        if chosen is None or not _stood(state, demand, mine, chosen):
            _place(state, demand, mine, ahead)
        for w in mine:
            w.buffer = state.allocate(space, w.span[0], w.size, w.desc, w.origin)


def _place(
    state: PlanState, demand: RoomDemand, wants: Sequence[Want], ahead: NamedPlaces | None
) -> None:
    """Gives the wants of a space their addresses, with room made for them."""
    fixed = [w for w in wants if w.address is not None]
    loose = [w for w in wants if w.address is None]
    demand.fixed += [(w.address or 0, w.size, w.origin) for w in fixed]
    addresses = _born(state, demand, loose, ahead) if ahead is not None else None
    if addresses is None:
        demand.floating += [(w.size, w.what) for w in loose]
        addresses = make_room(state, demand)
    for w, address in zip(loose, addresses, strict=True):
        w.address = address
    if ahead is not None:
        scratch = [(address, address + size) for address, size, _ in demand.fixed]
        for w in loose:
            taken = [*scratch, *(other.span for other in wants if other is not w)]
            w.address = ahead.beside(state, w.becomes, w.desc, w.span, taken)


def _stood(
    state: PlanState, demand: RoomDemand, wants: Sequence[Want], standing: StaticLayout
) -> bool:
    """Gives the wants of a space the addresses that were chosen for them, and moves what was to
    move; False, and nothing is done, where something would have to leave the space for that."""
    relocate = dict(demand.relocate)
    for number, was, now in standing.moves.get(state.task, ()):
        buffer = state.buffers.get(number)
        if buffer is not None and buffer.space is demand.space and buffer.address == was:
            relocate.setdefault(number, now)
    chosen = [
        standing.allocations.get((state.task, k)) if w.address is None else w.address
        for k, w in enumerate(wants)
    ]
    places = list(zip(wants, chosen, strict=True))
    fixed = [(address, w.size, w.origin) for w, address in places if address is not None]
    loose = [(w.size, w.what) for w, address in places if address is None]
    take_back = state.attempt()
    try:
        found = iter(make_room(state, replace(
            demand, fixed=demand.fixed + fixed, floating=loose, relocate=relocate, evicts=False
        )))  # fmt: skip
    except (LayoutError, OutOfMemoryError):
        take_back()
        return False
    for w, address in places:
        w.address = next(found) if address is None else address
    return True


def _born(
    state: PlanState, demand: RoomDemand, wants: Sequence[Want], ahead: NamedPlaces
) -> list[int] | None:
    """Addresses of wants where some are born, with room made for them; None where none can be
    without anything leaving the space."""
    named = [ahead.birthplace(state, w.becomes, w.desc, w.size) for w in wants]
    if all(address is None for address in named):
        return None
    places = list(zip(wants, named, strict=True))
    fixed = [(address, w.size, w.what) for w, address in places if address is not None]
    loose = [(w.size, w.what) for w, address in places if address is None]
    take_back = state.attempt()
    try:
        found = iter(make_room(
            state, replace(demand, fixed=demand.fixed + fixed, floating=loose, evicts=False)
        ))  # fmt: skip
    except OutOfMemoryError:
        take_back()
        return None
    state.foresaw = True
    return [next(found) if address is None else address for address in named]

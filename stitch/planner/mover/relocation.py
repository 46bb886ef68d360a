"""Make the step that moves buffers to new addresses of their space at the least cost found.

Bytes leave the space only if necessary (the moves form a cycle and no byte is free, or there is no
path inside) or if that is cheaper; each such step has a certificate. Staged bytes leave once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import footprint, round_up
from stitch.packing import gaps_between
from stitch.planner.mover.cycles import break_cycles
from stitch.planner.mover.order import STAGED, Move, Prices, order_moves
from stitch.planner.plan import Certificate, CostCertificate, Relocate, Transfer
from stitch.planner.plan_state import PlanState
from stitch.program import Space

#: Allocates bytes per bank in a space and returns the address.
TakeRoom = Callable[[Space, int], int]
#: New addresses of buffers, by number.
Targets = dict[int, int]


def relocation(
    state: PlanState,
    space: Space,
    targets: Targets,
    purpose: str,
    take_room: TakeRoom,
    in_order: Callable[[], Targets | None] = lambda: None,
) -> Relocate:
    """Return the step that moves buffers of a space to `targets`; state changes only by
    `take_room`.

    Args:
        state: The planner's state.
        space: The space.
        targets: New addresses by buffer.
        purpose: For the reason of the step.
        take_room: Allocates staging memory in another space.
        in_order: Returns alternative targets whose moves form no cycle; called only if the first
            ones do. The cheaper are used.

    Raises:
        LayoutError: The machine has no path inside the space nor through another.
        OutOfMemoryError: Staging memory does not fit in any space.
    """
    refused: OutOfMemoryError | None = None
    for beside in _staging_spaces(state, space):
        chosen = _Relocation(state, space, targets, beside)
        others = in_order() if chosen.core else None
        if others is not None:
            chosen = _preferred(chosen, _Relocation(state, space, others, beside))
        elif chosen.core:
            chosen.break_cycles(float("inf"))
        try:
            return chosen.step(purpose, take_room)
        except OutOfMemoryError as error:
            refused = refused or error
    assert refused is not None
    try:
        raise refused
    finally:
        del refused  # Break the reference cycle with the traceback.


class _Relocation:
    """The moves, the free memory around them, and their cost."""

    def __init__(self, state: PlanState, space: Space, targets: Targets, beside: Space) -> None:
        self.state, self.space, self.targets = state, space, targets
        self.shape = state.shape(space)
        self.prices = Prices(state.machine, space, beside)
        self.beside = state.shape(self.prices.beside)
        moving = [state.buffers[number] for number in sorted(targets)]
        self.moves = [Move(b.address or 0, targets[b.number], b.size_per_bank) for b in moving]
        self.first, self.core, self.last = order_moves(self.moves)
        self.unused = state.allocators[space].free_nbytes
        #: The moves on cycles in execution order, and why bytes leave the space.
        self.broken: list[Move] = []
        self.certificate: Certificate | CostCertificate | None = None
        #: Extra seconds of moves that stay inside the space.
        self.longer = 0.0

    @property
    def seconds(self) -> float:
        return self.prices.seconds([*self.first, *self.broken, *self.last])

    def step(self, purpose: str, take_room: TakeRoom) -> Relocate:
        state, prices, done, certificate = self.state, self.prices, self.broken, self.certificate
        if prices.bounces:
            certificate = Certificate("no_path", tuple(move.size for move in self.moves))
        ordered = [*self.first, *done, *self.last]
        ordered, passing, slots = self._staged(ordered)
        size = passing + sum(slots.values())
        stage = (take_room(prices.beside, size), size) if size else None
        state.slack_seconds -= self.longer
        state.claimed += [(self.space, m.target, m.size) for m in done if m.target < STAGED]
        transfers = tuple(self._transfers(ordered, passing, slots, stage[0] if stage else 0))
        seconds = sum(
            prices.transfer(t.source_space, t.target_space, t.nbytes // prices.banks)
            for t in transfers
        )
        machine, buffers = state.machine.shape, state.buffers
        nbytes = sum(footprint(buffers[n].desc, machine).own_nbytes for n in self.targets)
        named = ", ".join(buffers[n].origin for n in sorted(self.targets)[:3])
        reason = f"room for {purpose}: {named} moved"
        reason += f" through {prices.beside.value}" if stage else ""
        return Relocate(
            self.space, tuple(sorted(self.targets.items())), transfers, nbytes, seconds, reason,
            stage, certificate if stage else None, prices.beside if stage else Space.DRAM,
        )  # fmt: skip

    def break_cycles(self, most: float) -> bool:
        """Order the moves on cycles; return False if all moves cost at least `most` seconds."""
        prices = self.prices
        free = [] if prices.bounces else self._free_while_cycling()
        least = 0 if self.unused and not prices.bounces else self.shape.granule
        outside, granule = self._outside(least), self.shape.granule
        most -= self.seconds
        done = break_cycles(self.core, free, outside, prices, granule, most=most)
        if not done:
            return False
        self.broken, pieces = done, _staged_sizes(done)
        if not pieces or prices.bounces:
            return True
        if self.unused and (slack := self.state.slack_seconds) > 0:
            inside = break_cycles(self.core, free, outside, prices, granule, slack=slack, most=most)
            longer = prices.seconds(inside) - prices.seconds(done)
            if inside and not _staged_sizes(inside) and longer <= slack:
                self.broken, self.longer = inside, longer
                return True
        self.certificate = Certificate("cycle", pieces, (0,))
        if self.unused:
            nbytes = sum(move.size for move in self.core)
            self.certificate = CostCertificate(nbytes, self.unused, prices.seconds(done), pieces)
        return True

    def _free_while_cycling(self) -> list[tuple[int, int]]:
        """Return the regions unused after the first moves and before the last ones."""
        busy = [(b.address or 0, b.size_per_bank) for b in self.state.in_space(self.space)
                if b.number not in self.targets]  # fmt: skip
        busy += [(m.target, m.size) for m in (*self.first, *self.core)]
        busy += [(m.source, m.size) for m in (*self.core, *self.last)]
        gaps = gaps_between(busy, self.shape.base, self.shape.limit)
        return [(address, address + size) for address, size in gaps]

    def _outside(self, least: int) -> int:
        """Return the bytes per bank that can be staged beside this space, at least `least`."""
        hole = self.state.allocators[self.prices.beside].largest_hole
        if self.prices.bounces:
            hole //= 2
        # Each staged part starts at a multiple of the other space's granule.
        hole -= (len(self.core) + 4) * self.beside.granule
        granule = self.shape.granule
        return max(least, hole * self.beside.banks // self.prices.banks // granule * granule)

    def _slot(self, size: int) -> int:
        """Return the bytes per bank of the space beside for `size` bytes per bank of this one."""
        return round_up(-(-size * self.prices.banks // self.beside.banks), self.beside.granule)

    def _staged(self, ordered: list[Move]) -> tuple[list[Move], int, dict[int, int]]:
        """Cut moves to bounces that fit; return them, and the sizes of bounce and staged parts."""
        slots = {m.target: self._slot(m.size) for m in ordered if m.target >= STAGED}
        if not self.prices.bounces:
            return ordered, 0, slots
        most = max(move.size for move in ordered)
        hole = self.state.allocators[self.prices.beside].largest_hole - sum(slots.values())
        if self._slot(most) > hole:
            granule = self.shape.granule
            fits = hole // self.beside.granule * self.beside.granule * self.beside.banks
            most = max(granule, fits // self.prices.banks // granule * granule)
        cut = [piece for move in ordered for piece in _pieces(move, most)]
        return cut, self._slot(most), slots

    def _transfers(
        self, ordered: list[Move], passing: int, slots: dict[int, int], stage: int
    ) -> Iterator[Transfer]:
        here, there, banks = self.space, self.prices.beside, self.prices.banks
        places, at = {}, stage + passing
        for address, size in slots.items():
            places[address], at = at, at + size
        for move in ordered:
            nbytes = move.size * banks
            if move.target >= STAGED:
                yield Transfer(here, move.source, there, places[move.target], nbytes)
            elif move.source >= STAGED:
                yield Transfer(there, places[move.source], here, move.target, nbytes)
            elif passing:
                yield Transfer(here, move.source, there, stage, nbytes)
                yield Transfer(there, stage, here, move.target, nbytes)
            else:
                yield Transfer(here, move.source, here, move.target, nbytes)


def _preferred(cyclic: _Relocation, in_order: _Relocation) -> _Relocation:
    """Return the cheaper one; within the slack, the one whose bytes stay in the space."""
    if not cyclic.break_cycles(in_order.seconds):
        return in_order
    in_order.longer = max(0.0, in_order.seconds - (cyclic.seconds - cyclic.longer))
    hardly = cyclic.certificate is not None and in_order.longer <= cyclic.state.slack_seconds
    return in_order if hardly or in_order.seconds <= cyclic.seconds else cyclic


def _staged_sizes(moves: list[Move]) -> tuple[int, ...]:
    return tuple(move.size for move in moves if move.target >= STAGED)


def _pieces(move: Move, most: int) -> Iterator[Move]:
    """Cut a move into pieces of at most `most` bytes, in memmove order."""
    if move.size <= most or max(move.source, move.target) >= STAGED:
        yield move
        return
    starts = range(0, move.size, most)
    for at in starts if move.target < move.source else reversed(starts):
        yield Move(move.source + at, move.target + at, min(most, move.size - at))


def _staging_spaces(state: PlanState, space: Space) -> list[Space]:
    """Return the spaces to stage in: the nearest connected one, then those for evictions."""
    machine = state.machine
    others = [s for s in (Space.DRAM, Space.HOST, Space.L1)
              if s is not space and s in machine.shape.spaces]  # fmt: skip
    if not others:
        raise LayoutError(
            f"machine {machine.name!r} cannot move tensors inside {space.value}",
            remedy="describe a path inside the space, or another space",
        )
    connected = [s for s in others if machine.path(space, s) and machine.path(s, space)]
    farther = [s for s in state.outlets[space] if s in connected[1:]]
    return [*connected[:1], *farther] or others[:1]

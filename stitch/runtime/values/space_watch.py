"""Polls memory-space contents after each run, for event listeners."""

from __future__ import annotations

from typing import NamedTuple, final

from stitch.memory import LENT_ADDRESSES
from stitch.program import Space
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import BufferRecord


class Lying(NamedTuple):
    """A buffer that lies in a space; address and size are per bank, `origin` says what made it."""

    space: Space
    address: int
    size: int
    origin: str

    @property
    def place(self) -> tuple[Space, int]:
        """Its space and address."""
        return self.space, self.address


@final
class SpaceWatch:
    """Gives what lies in the spaces now, without what leases have to spare. What was dropped is
    there until the next run lets go of it."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._generation = -1
        self._buffers: list[tuple[Lying, BufferRecord]] = []
        self._last: tuple[Lying, ...] = ()

    def now(self) -> tuple[Lying, ...]:
        """Runs nothing, changes nothing, waits for nobody."""
        records = self._records
        if records.generation != self._generation:
            # First, as another thread may change it meanwhile.
            self._generation = records.generation
            self._buffers = [
                (Lying(b.space, b.address, b.size_per_bank, b.origin), b)
                for b in list(records.all_buffers().values())
                if b.address is not None and b.address < LENT_ADDRESSES
            ]
        # As `is_spare` says, which takes twice as long to be asked.
        lying = tuple([
            each for each, b in self._buffers if b.lease is None or b.users or b.pins
        ])  # fmt: skip
        if lying != self._last:
            self._last = lying
        return self._last

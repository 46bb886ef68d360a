"""Polls memory-space contents after each run, for event listeners."""

from __future__ import annotations

from typing import NamedTuple, final

from stitch.memory import LENT_ADDRESSES
from stitch.program import Space
from stitch.runtime.values.records import Records
from stitch.runtime.values.state import BufferRecord


class Lying(NamedTuple):
    """A buffer in a space; address and size are in bytes per bank, `origin` names its producer."""

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
    """Reports the buffers in the spaces, without spare output slots.

    Dropped tensors are included until the next run releases them.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._generation = -1
        self._buffers: list[tuple[Lying, BufferRecord]] = []
        self._last: tuple[Lying, ...] = ()

    def now(self) -> tuple[Lying, ...]:
        """Return the current buffers; takes no lock and runs nothing."""
        records = self._records
        if records.generation != self._generation:
            # Read the generation first: another thread may change the records meanwhile.
            self._generation = records.generation
            self._buffers = [
                (Lying(b.space, b.address, b.size_per_bank, b.origin), b)
                for b in list(records.all_buffers().values())
                if b.address is not None and b.address < LENT_ADDRESSES
            ]
        # `not b.is_spare`, inlined: half the time.
        lying = tuple([
            each for each, b in self._buffers if b.lease is None or b.users or b.pins
        ])  # fmt: skip
        if lying != self._last:
            self._last = lying
        return self._last

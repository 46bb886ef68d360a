"""What a space holds at one moment, as data for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """Buffers (address, size, what made them) and holes of a space, in bytes per bank.

    What leases have to spare counts as free; `leased_nbytes` says how much of the free that is.
    """

    buffers: tuple[tuple[int, int, str], ...]
    holes: tuple[tuple[int, int], ...]
    used_nbytes: int
    free_nbytes: int
    largest_hole: int
    leased_nbytes: int

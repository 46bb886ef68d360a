"""The contents of a space at one moment, as data for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """Buffers (address, size, producer) and holes of a space, in bytes per bank.

    Spare output slots count as free; `leased_nbytes` is their part of the free memory.
    """

    buffers: tuple[tuple[int, int, str], ...]
    holes: tuple[tuple[int, int], ...]
    used_nbytes: int
    free_nbytes: int
    largest_hole: int
    leased_nbytes: int

"""Certificates: why bytes left a space or find no room in it, as data that a stranger can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CertificateKind: TypeAlias = Literal["capacity", "packing", "cycle", "no_path"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why bytes had to leave a space, or find no room in it, as data that a stranger can check.

    `capacity`: the pieces that had to lie in the gaps add up to more than the gaps.
    `packing`: they add up to less, but no assignment of pieces to gaps exists.
    `cycle`: the moves form a cycle and no granule of the space was free.
    `no_path`: the machine has no path inside the space (from L1 to L1).
    Sizes are bytes per bank.
    """

    kind: CertificateKind
    pieces: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CostCertificate:
    """Why bytes left their space although a few bytes of it were free: it takes less time.

    `cyclic_size` bytes per bank move in cycles and `free_size` are free: no move inside the space
    fills more than what is free, so `inside_seconds` is the least that such moves take;
    `through_seconds` is what those take that were chosen instead.
    """

    cyclic_size: int
    free_size: int
    inside_seconds: float
    through_seconds: float

    @property
    def kind(self) -> str:
        return "cost"

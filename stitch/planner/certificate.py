"""Certificates: why bytes left a space or find no room in it, as data that a stranger can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CertificateKind: TypeAlias = Literal["capacity", "packing", "undecided", "cycle", "no_path"]


@dataclass(frozen=True, slots=True)
class Branches:
    """The search that found no packing, branch by branch, so that it can be replayed.

    Pieces go in, largest first; a letter of `steps` is about those left over and what each gap can
    hold of them: the largest sum of such pieces, up to its room. `f`: the sums add up to less than
    the pieces. `k`: the same was refuted before. `b`: what follows refutes the next piece in each
    gap that holds it, one of every sum, smallest first; only there where the piece alone is the
    sum. Without `by_sums` a gap holds its room, or nothing where no piece fits.
    """

    steps: str
    by_sums: bool = True


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why bytes had to leave a space, or find no room in it. Sizes are bytes per bank.

    All evictions that one need takes are justified at once. For each, `pieces` are what would have
    to lie in the `gaps` if only it stayed, so none of them could have stayed.
    `capacity`: the pieces add up to more than the gaps.
    `packing`: they add up to less, but no assignment of pieces to gaps exists, as `branches` shows.
    `undecided`: the search ended before it found either.
    `cycle`: moves form a cycle and not a byte of the space was free; `pieces` are set aside, which
    takes less time than a smaller part would.
    `no_path`: the machine has no path inside the space (from L1 to L1); `pieces` are what moves.
    """

    kind: CertificateKind
    pieces: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    branches: Branches | None = None


@dataclass(frozen=True, slots=True)
class CostCertificate:
    """Why bytes left their space although a few bytes of it were free: it takes less time.

    `cyclic_size` bytes per bank move in cycles and `free_size` are free; `through_seconds` is what
    the moves take that were chosen, with `pieces` set aside. That moves inside the space take
    longer is no figure here: the checker searches for moves inside by itself and compares.
    """

    cyclic_size: int
    free_size: int
    through_seconds: float
    pieces: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "cost"

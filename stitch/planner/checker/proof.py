"""Verify certificates of capacity and packing independently of the search that issued them.

Work is bounded; what exceeds the bound is reported as undecided, never as confirmed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from stitch.planner.plan import Branches, Certificate

#: Work limit of the searches, in gaps visited.
WORK_LIMIT = 4_000_000
#: Limit of the bits of all subset sums in a replay.
SUMS_LIMIT = 1 << 28
LISTED = 8


def packs(pieces: Sequence[int], gaps: Sequence[int]) -> bool | None:
    """Whether pieces fit side by side into gaps; None if the search reached its limit.

    A state is (next piece, free size of each gap, sorted); failed states are remembered.

    >>> packs([4, 3, 3], [6, 4]), packs([3, 3, 3], [5, 5])
    (True, False)
    """
    order = sorted(pieces, reverse=True)
    left = [*accumulate(reversed(order), initial=0)][::-1]
    failed: set[tuple[int, ...]] = set()
    stack: list[tuple[int, ...]] = [(0, *sorted(gaps))]
    work = 0
    while stack:
        position = stack.pop()
        if position in failed:
            continue
        failed.add(position)
        index, *capacities = position
        work += len(position)
        if index == len(order):
            return True
        usable = capacities[bisect_right(capacities, order[-1] - 1) :]
        if left[index] > sum(usable):
            continue
        size = order[index]
        for i, capacity in enumerate(usable):
            if capacity >= size and (i == 0 or usable[i - 1] != capacity):
                work += len(usable)
                if work > WORK_LIMIT:
                    return None
                after = [*usable[:i], *usable[i + 1 :], capacity - size]
                stack.append((index + 1, *sorted(after)))
    return False


def replays(pieces: Sequence[int], gaps: Sequence[int], branches: Branches) -> bool | None:
    """Whether the branches prove that the pieces do not fit; None if that is too much work.

    >>> replays([3, 3, 3], [5, 5], Branches("f")), replays([4, 3, 3], [6, 4], Branches("f"))
    (True, False)
    """
    unit = math.gcd(*pieces) or 1
    sizes = sorted((piece // unit for piece in pieces), reverse=True)
    if not sizes or sizes[-1] < 0:
        return False
    left = [*accumulate(reversed(sizes), initial=0)][::-1]
    held = tuple(gap // unit for gap in gaps)
    most = min(left[0], max(held, default=0)) + 1
    sums: list[int] = []
    if branches.by_sums:
        if most * len(left) > SUMS_LIMIT:
            return None
        sums = [1]
        for size in reversed(sizes):
            sums.append((sums[-1] | sums[-1] << size) & ((1 << most) - 1))
        sums.reverse()

    def hold(depth: int, capacity: int) -> int:
        if sums:
            return (sums[depth] & ((1 << min(capacity, most) + 1) - 1)).bit_length() - 1
        return capacity if capacity >= sizes[-1] else 0

    refuted: set[tuple[int, ...]] = set()
    #: By depth: gap capacities, state, and the capacities still to try, the next one last.
    path: list[tuple[tuple[int, ...], tuple[int, ...], list[int]]] = []
    steps, work = iter(branches.steps), 0
    while True:
        depth, step = len(path), next(steps, "")
        work += len(held) + 1
        if work > WORK_LIMIT:
            return None
        held = tuple([hold(depth, capacity) for capacity in held])
        position = (depth, *sorted(held))
        if step == "b" and depth < len(sizes):
            size = sizes[depth]
            into = (
                [size]
                if size in held
                else sorted({capacity for capacity in held if capacity > size})
            )
            path.append((held, position, into[::-1]))
        elif (step == "f" and sum(held) < left[depth]) or (step == "k" and position in refuted):
            refuted.add(position)
        else:
            return False
        while path and not path[-1][2]:
            refuted.add(path.pop()[1])
        if not path:
            return next(steps, "") == ""
        before, _, untried = path[-1]
        capacity = untried.pop()
        gap = before.index(capacity)
        held = (*before[:gap], capacity - sizes[len(path) - 1], *before[gap + 1 :])


#: Kind of problem (`certificate` or `undecided`), and detail.
Defect = tuple[str, str]


def certificate_defect(
    certificate: Certificate, pieces: Sequence[int], gaps: Sequence[int]
) -> Defect | None:
    """Return what is wrong with a certificate of capacity or packing; None if it is confirmed.

    `pieces` and `gaps` are the actual ones at that moment.
    """
    for what, said, true in (
        ("pieces", certificate.pieces, pieces), ("gaps", certificate.gaps, gaps)
    ):  # fmt: skip
        if sorted(said) != sorted(true):
            return "certificate", f"it lists {what} {listed(said)}, expected {listed(true)}"
    over = sum(pieces) > sum(gaps)
    if certificate.kind == "capacity":
        return None if over else ("certificate", f"{sum(pieces)} B fit into {sum(gaps)} B")
    if certificate.kind not in ("packing", "undecided"):
        return "certificate", f"{certificate.kind!r} is no reason to evict"
    if certificate.branches is not None:
        proved = replays(pieces, gaps, certificate.branches)
        if proved is False:
            return "certificate", "its branches do not prove that the pieces do not fit"
    else:
        # `undecided` certificates, and old records, have no branches.
        fits = packs(pieces, gaps)
        if fits:
            return "certificate", "the pieces can be packed into the gaps"
        proved = fits is False
    return None if proved else ("undecided", f"whether {listed(pieces)} fit into {listed(gaps)}")


def check_certificate(certificate: Certificate) -> Defect | None:
    """Return what is wrong with a certificate by itself, as in an error; None if it is a proof.

    >>> check_certificate(Certificate("capacity", (3, 3), (5,)))
    >>> check_certificate(Certificate("capacity", (3, 2), (5,)))
    ('certificate', '5 B fit into 5 B')
    """
    if min(certificate.pieces, default=1) < 1 or min(certificate.gaps, default=0) < 0:
        return "certificate", "a size is negative, or a piece is empty"
    return certificate_defect(certificate, certificate.pieces, certificate.gaps)


def listed(sizes: Sequence[int]) -> str:
    """Format sizes for a message, the largest first, at most `LISTED`."""
    shown = ", ".join(map(str, sorted(sizes, reverse=True)[:LISTED]))
    return f"[{shown}]" if len(sizes) <= LISTED else f"[{shown}, …; {len(sizes)} in all]"

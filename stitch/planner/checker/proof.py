"""Whether the certificates of a plan are true: the arithmetic of capacity and packing, anew.

Comes in: a certificate, and what the checker saw at that moment. Goes out: what is wrong with it,
or None. Shares no code with the search that issued the certificate.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.planner.certificate import Certificate

#: Positions that the search looks at before it admits that it cannot tell.
POSITION_LIMIT = 400_000


def packs(pieces: Sequence[int], gaps: Sequence[int]) -> bool | None:
    """Whether pieces can be put side by side into gaps; None where the search gave up.

    Positions are (next piece, room left in each gap, sorted); those that failed are remembered.

    >>> packs([4, 3, 3], [6, 4]), packs([3, 3, 3], [5, 5])
    (True, False)
    """
    order = sorted(pieces, reverse=True)
    left = [0] * (len(order) + 1)
    for i in range(len(order) - 1, -1, -1):
        left[i] = left[i + 1] + order[i]
    failed: set[tuple[int, ...]] = set()
    stack: list[tuple[int, ...]] = [(0, *sorted(gaps))]
    while stack:
        position = stack.pop()
        if position in failed:
            continue
        failed.add(position)
        if len(failed) > POSITION_LIMIT:
            return None
        index, *rooms = position
        if index == len(order):
            return True
        usable = [room for room in rooms if room >= order[-1]]
        if left[index] > sum(usable):
            continue
        size = order[index]
        for i, room in enumerate(usable):
            if room >= size and (i == 0 or usable[i - 1] != room):
                after = [*usable[:i], *usable[i + 1 :], room - size]
                stack.append((index + 1, *sorted(after)))
    return False


def certificate_defect(
    certificate: Certificate, pieces: Sequence[int], gaps: Sequence[int]
) -> str | None:
    """What is wrong with a certificate of capacity or packing; None where it is confirmed.

    `pieces` and `gaps` are what really had to lie where at that moment.
    """
    if sorted(certificate.pieces) != sorted(pieces):
        return f"it speaks of pieces {sorted(certificate.pieces)}, there are {sorted(pieces)}"
    if sorted(certificate.gaps) != sorted(gaps):
        return f"it speaks of gaps {sorted(certificate.gaps)}, there are {sorted(gaps)}"
    over = sum(pieces) > sum(gaps)
    if certificate.kind == "capacity":
        return None if over else f"{sum(pieces)} B fit into {sum(gaps)} B"
    if certificate.kind == "packing":
        # Too much for all the gaps together is too much for each assignment as well.
        return "the pieces can be packed into the gaps" if packs(pieces, gaps) else None
    return f"{certificate.kind!r} is no reason to evict"

"""The seams of a program that was linked: which operations are whose, and what each part gave.

Comes in: the list of all operations, where its parts begin, and which of them are left. Goes out:
the seams of what is left. Must not know: programs, wires.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

from stitch.program import ABSENT, OperationList, Seam


def seams_of(
    whole: OperationList,
    firsts: Sequence[int],
    given: Collection[int],
    live: Sequence[int],
    numbers: Mapping[int, int],
) -> tuple[Seam, ...]:
    """The seams of what is left of a list: `live` operations, values under their new `numbers`.

    `firsts`: where parts begin in the whole list, rising, the first at 0; `given`: the values that
    were outputs of a part, or were held by one. What another part reads was given, too. A part
    without operations is gone; one part that holds nothing is no seam.
    """
    parts = [bisect_right(firsts, index) - 1 for index in range(len(whole.operations))]
    made = {
        v: parts[index]
        for index, operation in enumerate(whole.operations)
        for v in operation.outputs
        if v != ABSENT
    }
    alive = frozenset(live)
    gave = set(given)
    gives = {slot.value for slot in whole.outputs}
    for index, operation in enumerate(whole.operations):
        for v in operation.inputs:
            if v in made and made[v] != parts[index]:
                gave.add(v)
                if index in alive:
                    gives.add(v)
            elif v in made and index not in alive:
                gave.add(v)
    held: dict[int, list[int]] = {}
    for v in sorted(gave - gives):
        if v in made and v in numbers:
            held.setdefault(made[v], []).append(numbers[v])
    begins: dict[int, int] = {}
    for now, index in enumerate(live):
        begins.setdefault(parts[index], now)
    seams = [Seam(first, tuple(held.get(part, ()))) for part, first in begins.items()]
    return tuple(seams) if len(seams) > 1 or any(seam.held for seam in seams) else ()

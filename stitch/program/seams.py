"""Seams: where the parts of a linked program begin, so that each can be computed as before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.errors import Problem
from stitch.program.operation import Operation


@dataclass(frozen=True, slots=True)
class Seam:
    """Where a part of a linked program begins: the index of its first operation.

    The part ends where the next begins. It gives what later parts read and what is an output of
    the whole; `held` names the values that it gave beside these when its program was apart, in
    rising order: outputs that nobody reads any more, and what operations read that linking has
    dropped. An executor that fuses operations fuses other ones where it does not know of them.
    """

    first: int
    held: tuple[int, ...] = ()


def part_ranges(seams: Sequence[Seam], count: int) -> tuple[range, ...]:
    """The operations of each part, of `count` in all; one part where there are no seams.

    >>> part_ranges([Seam(0), Seam(2)], 5)
    (range(0, 2), range(2, 5))
    """
    if not seams:
        return (range(count),)
    return tuple([range(a, b) for a, b in pairwise([*(seam.first for seam in seams), count])])


def seam_problems(
    seams: Sequence[Seam], operations: Sequence[Operation], values: int
) -> Iterator[Problem]:
    """Every way in which seams do not fit a list of operations and a number of values."""
    before = -1
    for i, seam in enumerate(seams):
        if (i == 0 and seam.first) or not before < seam.first < len(operations):
            wanted = f"behind {before}" if i else "0"
            detail = f"begins at operation {seam.first} of {len(operations)}, expected {wanted}"
            yield Problem("bad_seam", f"seam {i}", detail)
            return  # Which operations the parts have cannot be told.
        before = seam.first
    for i, seam in enumerate(seams):
        if not seam.held:
            continue
        part = range(seam.first, seams[i + 1].first if i + 1 < len(seams) else len(operations))
        made = {v for index in part for v in operations[index].outputs}
        for value in seam.held:
            if not 0 <= value < values or value not in made:
                detail = f"value {value} of {values} is not made in its operations"
                yield Problem("bad_seam", f"seam {i}", f"{detail} {part.start} to {part.stop - 1}")
        if any(a >= b for a, b in pairwise(seam.held)):
            yield Problem("bad_seam", f"seam {i}", "the values that it holds do not rise")

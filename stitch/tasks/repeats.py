"""Stretches that repeat, cut into equal ones: what serves one of these serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.tasks.task_sequence import NumberedTask, TaskSequence, least_period

#: Tasks that equal pieces have, at most, unless a period has more.
PIECE = 64
#: So many equal pieces there are at least: of fewer none would be planned less.
LEAST_PIECES = 3
#: What is shorter than this is not cut.
SHORTEST = LEAST_PIECES * PIECE


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The tasks `[start, stop)` of a stretch as one that starts from nothing.

    `numbers`: for each of its values the number in the whole. `read_later`: whether a task after it
    reads that value.
    """

    graph: TaskSequence
    start: int
    stop: int
    numbers: tuple[int, ...]
    read_later: tuple[bool, ...]


def cuts_of(graph: TaskSequence, nothing: TaskSequence) -> tuple[Cut, ...]:
    """The pieces of a stretch that repeats; () of one that does not, or is shorter than `SHORTEST`.

    `nothing`: the stretch without tasks that it comes after, as its pieces do.
    """
    if graph.length < SHORTEST:
        return ()
    tasks = graph.tasks
    start, stop, size = _repetition(_alike(tasks))
    if not size:
        return ()
    last_read = {number: at for at, task in enumerate(tasks) for number in task.inputs}
    cuts = dict.fromkeys([0, *range(start, stop + 1, size), len(tasks)])
    return tuple([_piece(tasks, *ends, nothing, last_read) for ends in pairwise(cuts)])


def _alike(tasks: Sequence[NumberedTask]) -> list[int]:
    """For each task a number, the same for tasks that do the same to values in the same relation:
    each last read or made by the same slot of a task so many tasks before."""
    numbers: dict[object, int] = {}
    touched: dict[int, tuple[int, int]] = {}
    alike = []
    for at, (what, inputs, outputs) in enumerate(tasks):
        relation: list[object] = [what.key]
        for slot, number in enumerate(inputs):
            before = touched.get(number)
            relation.append(None if before is None else (at - before[0], before[1]))
            touched[number] = at, slot
        for slot, number in enumerate(outputs):
            touched[number] = at, ~slot
        alike.append(numbers.setdefault(tuple(relation), len(numbers)))
    return alike


def _repetition(items: Sequence[int]) -> tuple[int, int, int]:
    """Where items around the middle begin and end to repeat, in pieces of a length; a length of 0:
    they do not, or there would be too few pieces.

    >>> _repetition([7] + 99 * [1, 2, 3] + [8])
    (1, 298, 57)
    >>> _repetition([*range(300)])[2]
    0
    """
    start, stop = len(items) // 4, len(items) - len(items) // 4
    period = least_period(items[start:stop])
    if not period:
        return 0, 0, 0
    while start and items[start - 1] == items[start - 1 + period]:
        start -= 1
    while stop < len(items) and items[stop] == items[stop - period]:
        stop += 1
    length = stop - start
    sizes = range(max(1, PIECE // period) * period, PIECE * 3 // 4, -period)
    # What is left over is planned for itself.
    size = min(sizes or (period,), key=lambda size: length % size)
    return (start, stop, size) if length // size >= LEAST_PIECES else (0, 0, 0)


def _piece(
    tasks: Sequence[NumberedTask], start: int, stop: int, nothing: TaskSequence,
    last_read: dict[int, int],
) -> Cut:  # fmt: skip
    graph = nothing
    at: dict[int, int] = {}
    for what, inputs, outputs in tasks[start:stop]:
        fresh = [number for number in dict.fromkeys(inputs) if number not in at]
        for number in fresh:
            at[number] = len(at)
        graph = graph.after(what, tuple([at[number] for number in inputs]), len(fresh))
        for number in outputs:
            at[number] = len(at)
    read_later = tuple([last_read.get(number, -1) >= stop for number in at])
    return Cut(graph, start, stop, tuple(at), read_later)

"""Split long, repetitive batches into pieces that share one plan and its code.

A batch that may not fit in free memory is planned as a whole, which gives better evictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stitch.machine import MachineShape, room_per_bank
from stitch.program import Space, TensorDesc
from stitch.runtime.recording import TaskBatch
from stitch.runtime.values import Records
from stitch.tasks import SHORTEST, Cut, TaskSequence, cuts_of

#: Size of the LRU cache of split decisions.
MAX_STRETCHES = 16
#: Split only if peak memory is at most this fraction of free memory (allows for fragmentation).
PART_OF_FREE = 0.5


class BatchSplitter:
    """Decides how the long batches of one device are split."""

    def __init__(self, records: Records, machine: MachineShape) -> None:
        """`records`: the device's memory records; `machine`: sizes of its spaces."""
        self._records, self._machine = records, machine
        self._cuts: dict[TaskSequence, tuple[Cut, ...]] = {}

    def cuts(self, window: TaskBatch, kept: Sequence[bool]) -> tuple[Cut, ...]:
        """Return the pieces of a batch, or () to run it as a whole.

        Args:
            window: The batch.
            kept: For each value of the batch, whether it is still referenced afterwards.
        """
        graph = window.graph
        if graph.length < SHORTEST:
            return ()
        cuts = self._cuts.get(graph)
        if cuts is None:
            cuts = cuts_of(graph, window.nothing)
            if cuts and not self._has_room(window, kept):
                cuts = ()
            self._cuts[graph] = cuts
            while len(self._cuts) > MAX_STRETCHES:
                del self._cuts[next(iter(self._cuts))]
        return cuts

    def _has_room(self, window: TaskBatch, kept: Sequence[bool]) -> bool:
        """Return whether the peak memory of a batch fits easily in free memory."""
        for space, nbytes in _most_at_once(window.graph, kept, self._machine).items():
            allocator = self._records.allocators[space]
            if nbytes > allocator.free_nbytes * PART_OF_FREE:
                return False
        return True


def _most_at_once(
    graph: TaskSequence, kept: Sequence[bool], machine: MachineShape
) -> Mapping[Space, int]:
    """Return an upper bound of a sequence's peak memory, in bytes per bank of each space.

    Counts every value in every layout that a task reads or writes, from the first such task to the
    last (to the end if it is kept), and the largest scratch.
    """
    tasks = graph.tasks
    lives: dict[tuple[int, int], tuple[int, int]] = {}
    descs: dict[int, TensorDesc] = {}
    scratch: Counter[Space] = Counter()
    for at, (what, inputs, outputs) in enumerate(tasks):
        if what.scratch is not None:
            scratch |= Counter({what.scratch.space: what.scratch.size_per_bank})
        read, made = zip(inputs, what.inputs, strict=False), zip(outputs, what.outputs, strict=True)
        for number, desc in (*read, *made):
            descs[id(desc)] = desc
            first, _ = lives.get((number, id(desc)), (at, at))
            lives[number, id(desc)] = first, len(tasks) if kept[number] else at
    rooms = {key: room_per_bank(desc, machine) for key, desc in descs.items()}
    changes: list[Counter[Space]] = [Counter() for _ in range(len(tasks) + 2)]
    for (_, key), (first, last) in lives.items():
        changes[first][descs[key].layout.space] += rooms[key]
        changes[last + 1][descs[key].layout.space] -= rooms[key]
    most, now = scratch.copy(), scratch
    for change in changes:
        now.update(change)
        most |= now
    return most

"""The predictions of next uses on which a plan's evictions are based, and their validity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter

from stitch.planner import PlanRequest
from stitch.program import Space
from stitch.runtime.values import Place, Records, ValueRecord

#: Limit for replanning the same work because predictions have changed.
MAX_TRIES = 64


class EvictionPrediction:
    """The unused L1 buffers that could have been evicted, in order of predicted next use.

    The number of replans because of changed predictions is limited.
    """

    __slots__ = ("_in_order", "_knowledge", "_tries")
    _tries: int

    def __init__(
        self, request: PlanRequest, knowledge: int, before: Iterable[EvictionPrediction | None]
    ) -> None:
        """`knowledge`: version of the predictions; `before`: predictions of earlier executables of
        the same work."""
        self._knowledge = knowledge
        tries = [foresight._tries for foresight in before if foresight is not None]
        self._tries = max(0, min([MAX_TRIES, *tries]) - 1)
        used = {value for task in request.tasks for value in task.inputs}
        later = {value: use for value, use in request.later if value not in used}
        # Only unpinned L1 buffers can be evicted.
        places = {b.number: (b.space, b.address) for b in request.buffers
                  if b.space is Space.L1 and b.address is not None and not b.pinned}  # fmt: skip
        uses = [
            (later[resident.value], places[instance.buffer])
            for resident in request.residents
            if resident.value in later
            for instance in resident.instances
            if instance.buffer in places
        ]
        uses.sort(key=itemgetter(0))
        self._in_order: tuple[Place, ...] = tuple(dict.fromkeys([place for _, place in uses]))

    def holds(
        self, records: Records, knowledge: int, next_use: Callable[[ValueRecord], float]
    ) -> bool:
        """Return whether the evictions are still right: the predicted order of uses is
        unchanged."""
        if not self._tries:
            return True
        if self._knowledge != knowledge:
            return False
        live, last = records.all_buffers(), 0.0
        for place in self._in_order:
            buffer = live.get(place)
            if buffer is None or not buffer.users:
                return False
            use = min(map(next_use, buffer.users))
            if use < last:
                return False
            last = use
        return True

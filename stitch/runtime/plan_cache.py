"""Cache of executables by call arguments, so that repeated work runs without the queue.

While the memory records are unchanged, the same values find their executable by identity; other
values find it by signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from stitch.memory import LENT_ADDRESSES
from stitch.program import Array
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.queue import invalidate_stale_copies
from stitch.runtime.recording import Binding, Executable
from stitch.runtime.values import Places, Status, ValueRecord

READY = Status.READY
#: Size of the cache by signatures, and of the cache by values.
MAX_FORMS = 8
#: Arguments of a run; None stands for a host array.
Entries: TypeAlias = "tuple[ValueRecord | None, ...]"
#: Data that the caller stores with an executable.
D = TypeVar("D")


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded(Generic[D]):
    """The executable for values of some signature, and the numbers of these values in it."""

    recording: Executable
    numbers: tuple[int, ...]
    details: D


class CachedPlan(Generic[D]):
    """The executable for specific values, and its binding to their addresses.

    Valid while the memory records and outside references to these values are unchanged.
    """

    __slots__ = (
        "details", "exports", "exposed", "generation", "is_in_order", "numbers", "places",
        "recording",
    )  # fmt: skip

    def __init__(self, recorded: _Recorded[D], generation: int, entries: Entries) -> None:
        self.recording, self.details = recorded.recording, recorded.details
        self.generation, self.numbers = generation, recorded.numbers
        self.places: Places = tuple([
            (number, value.places())
            for number, value in zip(recorded.numbers, entries, strict=True)
            if value is not None
        ])  # fmt: skip
        read = self.recording.arrays
        #: Whether a run takes the arrays of the call in their order.
        self.is_in_order = tuple(n for n, v in zip(self.numbers, entries, strict=True)
                                 if v is None) == tuple(read)  # fmt: skip
        buffers = [v.instances[0].buffer for v in entries if v is not None and v.is_exposed]
        self.exposed = len(buffers)
        #: Only other buffers can become pinned or unpinned: host arrays and lent buffers never
        #: change.
        self.exports = tuple([
            (buffer, buffer.pins > 0)
            for buffer in buffers
            if buffer.address is not None and buffer.address < LENT_ADDRESSES
        ])  # fmt: skip

    def holds(self, generation: int, exposed: int) -> bool:
        """Return whether everything that selected the executable is unchanged."""
        if self.generation != generation or self.exposed != exposed:
            return False
        # No `all`: each generator step costs as much as the comparison.
        for buffer, pinned in self.exports:  # noqa: SIM110
            if (buffer.pins > 0) is not pinned:
                return False
        return True

    def binding(self, device: RuntimeDevice) -> Binding | None:
        """Return the binding to idle output slots and these addresses, if the executable is
        valid."""
        return device.maker.again((self.recording,), self.places)

    def arrays(self, entries: Entries, arguments: Sequence[Any]) -> list[Array]:
        """Return the arrays that a run copies in, in its order.

        These are the call's arrays, and values outside the spaces for which no copy fit.
        """
        arrays = {
            number: argument if value is None else value.host_array()
            for number, value, argument in zip(self.numbers, entries, arguments, strict=True)
            if number in self.recording.arrays
        }
        return [arrays[number] for number in self.recording.arrays]


class PlanCache(Generic[D]):
    """Cached executables for one kind of work.

    `details`: how the caller returns the results of each.
    """

    __slots__ = ("_device", "_known", "_recorded")

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._recorded: dict[tuple[object, ...], _Recorded[D]] = {}
        self._known: dict[Entries, CachedPlan[D]] = {}

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def forms(self, entries: Entries) -> tuple[object, ...]:
        """Return what plans on such values depend on, except addresses."""
        return tuple([v if v is None else (v.desc_key, v.signature()) for v in entries])

    def remember(
        self, binding: Binding, forms: tuple[object, ...], numbers: Sequence[int], details: D
    ) -> None:
        """Cache the executable that has just run for values of these signatures.

        Not if it changes more than its results, or one value was passed twice. `numbers`: the
        numbers of the values in it.
        """
        if binding.lease is None or len(set(numbers)) < len(numbers):
            return
        self._known.clear()
        self._recorded.pop(forms, None)
        self._recorded[forms] = _Recorded(binding.recording, tuple(numbers), details)
        if len(self._recorded) > MAX_FORMS:
            del self._recorded[next(iter(self._recorded))]

    def find(self, entries: Entries, exposed: int) -> CachedPlan[D] | None:
        """Return the cached plan for these values, `exposed` of which are externally writable."""
        generation = self._device.records.generation
        known = self._known.get(entries)
        if known is None or not known.holds(generation, exposed):
            recorded = self._recorded.get(self.forms(entries))
            if recorded is None:
                return None
            while len(self._known) >= MAX_FORMS:
                del self._known[next(iter(self._known))]
            known = self._known[entries] = CachedPlan(recorded, generation, entries)
        return known

    def count_exposed(self, entries: Entries) -> int | None:
        """Return the number of externally writable values, after invalidating stale copies.

        Returns None if a value is not ready.
        """
        exposed = 0
        for value in entries:
            if value is None:
                continue
            if value.status is not READY or value.consumed:
                return None
            if value.is_exposed:
                exposed += 1
                if len(value.instances) > 1:
                    device = self._device
                    invalidate_stale_copies(device.records, device.backend, value)
        return exposed

"""Known work: what ran before on values of some forms, and runs again past the queue.

While the records stand still, values that it ran on before are known by themselves; others are
known by their forms.
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
#: Forms of values whose recordings are remembered, and sets of values.
MAX_FORMS = 8
#: What a run is given; None: an array of the call.
Entries: TypeAlias = "tuple[ValueRecord | None, ...]"
#: What whoever asks remembers beside a recording.
D = TypeVar("D")


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded(Generic[D]):
    """What serves values of some forms, and the numbers that these have in it."""

    recording: Executable
    numbers: tuple[int, ...]
    details: D


class CachedPlan(Generic[D]):
    """Entries that were given before: which recording serves them, and how it is bound to them.

    It holds while the records stand still, and what others hold of these values is the same.
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
        #: Whether the arrays of a call, as they are given, are what a run copies in.
        self.is_in_order = tuple(n for n, v in zip(self.numbers, entries, strict=True)
                                 if v is None) == tuple(read)  # fmt: skip
        buffers = [v.instances[0].buffer for v in entries if v is not None and v.is_exposed]
        self.exposed = len(buffers)
        #: Bytes outside the spaces, and those of torch that are lent, are pinned for good or never.
        self.exports = tuple([
            (buffer, buffer.pins > 0)
            for buffer in buffers
            if buffer.address is not None and buffer.address < LENT_ADDRESSES
        ])  # fmt: skip

    def holds(self, generation: int, exposed: int) -> bool:
        """Whether nothing has changed that the recording was chosen by."""
        if self.generation != generation or self.exposed != exposed:
            return False
        # No `all`: each step of a generator costs as much as the comparison.
        for buffer, pinned in self.exports:  # noqa: SIM110
            if (buffer.pins > 0) is not pinned:
                return False
        return True

    def binding(self, device: RuntimeDevice) -> Binding | None:
        """How the recording is bound to an idle lease and these places, if its guard holds."""
        return device.maker.again((self.recording,), self.places)

    def arrays(self, entries: Entries, arguments: Sequence[Any]) -> list[Array]:
        """The arrays that a run copies in, in its order: those of the call, and those of values
        outside the spaces where no room was left to keep a copy of them."""
        arrays = {
            number: argument if value is None else value.host_array()
            for number, value, argument in zip(self.numbers, entries, arguments, strict=True)
            if number in self.recording.arrays
        }
        return [arrays[number] for number in self.recording.arrays]


class PlanCache(Generic[D]):
    """The runs of one kind of work that need no queue; `details`: how whoever runs them hands
    out the results of each."""

    __slots__ = ("_device", "_known", "_recorded")

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._recorded: dict[tuple[object, ...], _Recorded[D]] = {}
        self._known: dict[Entries, CachedPlan[D]] = {}

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def forms(self, entries: Entries) -> tuple[object, ...]:
        """What plans that run on such values depend on, but for places."""
        return tuple([v if v is None else (v.desc_key, v.signature()) for v in entries])

    def remember(
        self, binding: Binding, forms: tuple[object, ...], numbers: Sequence[int], details: D
    ) -> None:
        """What has just run serves values of these forms from now on; `numbers`: those that they
        had. Not where it changes more than its results, or one value was given twice."""
        if binding.lease is None or len(set(numbers)) < len(numbers):
            return
        self._known.clear()
        self._recorded.pop(forms, None)
        self._recorded[forms] = _Recorded(binding.recording, tuple(numbers), details)
        if len(self._recorded) > MAX_FORMS:
            del self._recorded[next(iter(self._recorded))]

    def find(self, entries: Entries, exposed: int) -> CachedPlan[D] | None:
        """What serves these values, so many of which are exposed."""
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
        """How many of the values others can write to, after a look at their copies; None where one
        cannot be read now."""
        exposed = 0
        for value in entries:
            if value is None:
                continue
            if value.status is not READY or value.consumed:
                return None
            if value.is_exposed:
                exposed += 1
                if len(value.instances) > 1:
                    invalidate_stale_copies(self._device, value)
        return exposed

"""Replays: an executable that ran for a graph runs again on such arguments, without the queue.

`ReplayCache` remembers by the arguments' signatures what ran for one graph. A `Replay` is such an
executable on specific tensors, bound to their addresses and to output slots. It stays with the
slots (`OutputSlots.again`) and runs again while its guard (`arrays`) holds: the memory records'
generation is unchanged, and the arguments are the same tensors and other arrays. A run that
overwrites tensors ends in one commit (`Replay.run_over`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from stitch.budget import LARGE_NBYTES
from stitch.memory import LENT_ADDRESSES
from stitch.program import Array
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.execution import (
    COMPLETE,
    UNTOUCHED,
    Binding,
    Executable,
    GeneratedRunner,
    Ran,
    perform,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.graphs.placed_graph import MadeValue
from stitch.runtime.queue import invalidate_stale_copies
from stitch.runtime.tensor import Tensor, handle_on
from stitch.runtime.values import (
    InputPort,
    InstanceRef,
    Records,
    Status,
    ValueRecord,
)

READY = Status.READY
#: Called by `map`, without Python frames.
_COPY = np.ndarray.copy
#: Size of the caches by signatures and by tensors.
MAX_SIGNATURES = 8
#: Limit for unprocessed notes of dropped results, left for graphs that run in turn.
MAX_NOTES_LEFT = 16
#: Stores the results of a run in output slots.
Store: TypeAlias = "Callable[[list[Tensor]], object]"
#: Arguments of a run; None stands for a host array.
Entries: TypeAlias = "tuple[ValueRecord | None, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The executable for arguments of some signature.

    Attributes:
        executable: The executable.
        numbers: The arguments' numbers in it.
        own: The results in its output slots.
        carried: The results in buffers of arguments: position of the argument, instance, result.
        order: For each output of the graph its position among both; None if equal.
    """

    executable: Executable
    numbers: tuple[int, ...]
    own: tuple[MadeValue, ...]
    carried: tuple[tuple[int, InstanceRef, MadeValue], ...]
    order: tuple[int, ...] | None


class Replay:
    """One executable on specific arguments, bound, with output slots."""

    __slots__ = (
        "_copied", "_exports", "_fixed", "_inputs", "_order", "binding", "cache", "cells", "code",
        "device", "entries", "generation", "is_plain", "is_written", "note", "recorded", "slots",
    )  # fmt: skip

    def __init__(
        self, cache: ReplayCache, recorded: Recorded, binding: Binding, entries: Entries
    ) -> None:
        assert binding.slots is not None, "known executables have output slots"
        self.cache, self.recorded, self.device = cache, recorded, cache.device
        self.binding, self.slots, self.entries = binding, binding.slots, entries
        self.generation = cache.device.records.generation
        #: Runs on arrays; once it `is_written`, the generated code, which checks their types.
        self.code: Callable[[Sequence[Any]], Ran] = partial(perform, cache.device, binding)
        self.is_written = False
        self._guard(cache.ports)
        #: Of arguments that may be written from outside, the buffers in device memory, and whether
        #: they are pinned. Host arrays and lent buffers stay as they are.
        self._exports = [
            (buffer, buffer.pins > 0)
            for value in entries
            if value is not None and value.is_exposed
            and (buffer := value.instances[0].buffer).address is not None
            and buffer.address < LENT_ADDRESSES
        ]  # fmt: skip
        numbers, read = recorded.numbers, recorded.executable.arrays
        given = [n for n, value in zip(numbers, entries, strict=True) if value is None]
        #: Host arrays of values outside the spaces for which no copy fit.
        self._fixed: list[Array] = []
        #: For each array of the executable its position among those of the call and these; None if
        #: equal.
        self._order: list[int] | None = None
        if tuple(given) != tuple(read):
            for number, value in zip(numbers, entries, strict=True):
                if value is not None and number in read:
                    given.append(number)
                    self._fixed.append(value.host_array())
            self._order = [given.index(number) for number in read]
        #: Whether the generated code takes the arguments as they are.
        self.is_plain = False
        #: The persistent buffers that its results replace.
        self.cells: Sequence[int] = ()
        #: With generated code, the finalizer of the handle on its only result.
        self.note: Callable[[], object] | None = None
        self._copied: tuple[list[Array], list[list[int]]] | None = None

    # -- the guard -------------------------------------------------------------------------------

    def _guard(self, ports: Sequence[InputPort | None]) -> None:
        """Set what `arrays` compares: for each input its tensor, whether that may be written from
        outside, and its type, None if nothing has to check it."""
        self._inputs = [
            (value, value is not None and value.is_exposed, port)
            for value, port in zip(self.entries, ports, strict=True)
        ]

    def arrays(self, arguments: Sequence[Any]) -> list[Any] | None:
        """Return the arrays to run on; None if a tensor, a type or the memory records changed."""
        arrays = []
        for (entry, was_exposed, port), argument in zip(self._inputs, arguments, strict=True):
            if entry is None:
                if port is not None and not takes(port, argument):
                    return None
                arrays.append(argument)
            elif (
                type(argument) is not Tensor
                or argument._record is not entry
                or entry.status is not READY
                or entry.consumed
                or entry.is_exposed is not was_exposed
            ):
                return None
            elif was_exposed and len(entry.instances) > 1:
                device = self.device
                invalidate_stale_copies(device.records, device.backend, entry)
                if device.records.generation != self.generation:
                    return None
        for buffer, is_pinned in self._exports:
            if (buffer.pins > 0) is not is_pinned:
                return None
        if self._order is not None:
            arrays += self._fixed
            return [arrays[at] for at in self._order]
        return arrays

    @property
    def overwritten(self) -> list[ValueRecord]:
        """The arguments whose buffers the results take over."""
        entries = self.entries
        return [v for at, _, _ in self.recorded.carried if (v := entries[at]) is not None]

    # -- running ---------------------------------------------------------------------------------

    def run(self, arguments: Sequence[Any]) -> Ran:
        """Run; returns False, without running, if the guard does not hold for the arguments."""
        arrays = arguments if self.is_plain else self.arrays(arguments)
        try:
            return arrays is not None and self.code(arrays)
        except BaseException as error:
            self._stopped(error)
            if isinstance(error, Exception):
                self.device.check_lost(error)
            raise

    def _stopped(self, error: BaseException) -> None:
        """Report the steps that ran before an exception."""
        straight = self.binding.straight if self.is_written else None
        stopped = stopped_by(error) if straight is None else straight.stopped(error)
        tell_stopped(self.device, self.binding, stopped)

    def values(self) -> list[ValueRecord]:
        """Return the records for the results in its slots: those of the last run if they are
        unused."""
        slots = self.slots
        if slots.values is not None and not slots.held:
            return slots.values
        return [ValueRecord(self.device, *made) for made in self.recorded.own]

    def take(self) -> list[ValueRecord]:
        """Return the results of the run that ended, without handles."""
        slots, now = self.slots, self.device.tasks.queued.number
        values = slots.reuse(now)
        if values is None:
            values = self.values()
            slots.take(values, now)
        if slots.again is not self or not self.is_written:
            self.stay()
        return values

    def stay(self) -> None:
        """Stay with the output slots for the next run."""
        straight, values = self.binding.straight, self.slots.values
        if isinstance(straight, GeneratedRunner):
            self.code, self.is_written = straight.run, True
            self._guard((None,) * len(self.entries))
            self.is_plain = not any(self.entries) and self._order is None
            if self.slots.is_single and values is not None and self.recorded.order is None:
                self.note = partial(self.device.drop, values[0])
        self.slots.again, self.cache.last = self, self.recorded.executable

    def run_over(
        self, arguments: Sequence[Any], carried: Sequence[ValueRecord], store: Store, *,
        rolls_forward: bool,
    ) -> bool:  # fmt: skip
        """Run an executable that overwrites arguments, and commit its results.

        Returns False, without running, if the guard does not hold for the arguments.

        Args:
            arguments: The arguments.
            carried: The values that the overwritten arguments become; they may stay themselves.
            store: Stores handles on the results in its slots; called once more if interrupted.
            rolls_forward: Whether the results are committed after an exception too, if everything
                was overwritten. Otherwise, and after an exception before that, an argument stays
                the caller's, or is lost if it was partly overwritten or by another layout.
        """
        arrays = self.arrays(arguments)
        if arrays is None:
            return False
        device, binding = self.device, self.binding
        records, own, now = device.records, self.values(), device.tasks.queued.number
        progress = binding.bound.progress if binding.executable.overwrites else [0, UNTOUCHED]
        finish = partial(self._finish, own, carried, now, partial(store, list(map(handle_on, own))))
        end = partial(self._end, progress, finish if rolls_forward else None)
        # Atomic: no call in between.
        progress[1] = UNTOUCHED
        records.pending_recovery = end
        records.is_consistent = False
        try:
            ran = perform(device, binding, arrays)
            commit(records, finish)
        except BaseException as error:
            stopped = stopped_by(error)
            if records.pending_recovery is end:
                end()
            if records.is_consistent:
                tell_stopped(device, binding, stopped)
            if isinstance(error, Exception):
                device.check_lost(error)
            raise
        if ran is not True:
            tell_run(device, binding, ran)
        return True

    def _finish(
        self, own: list[ValueRecord], carried: Sequence[ValueRecord], now: int,
        store: Callable[[], object],
    ) -> None:  # fmt: skip
        """Give the results their places and handles; idempotent."""
        self.slots.take(own, now)
        for (at, ref, _), value in zip(self.recorded.carried, carried, strict=True):
            entry = self.entries[at]
            assert entry is not None, "an array of the call is overwritten by nobody"
            if entry is not value and entry.instances:
                self.device.records.hand_on(entry, value, ref)
            value.last_used = now
        self.stay()
        store()

    def _end(self, progress: Sequence[int], finish: Callable[[], object] | None) -> None:
        """End a run that raised; idempotent."""
        device, is_complete = self.device, progress[1] == COMPLETE
        if is_complete and finish is not None:
            commit(device.records, finish)
            return
        for at, ref, _ in self.recorded.carried if progress[1] != UNTOUCHED else ():
            value = self.entries[at]
            assert value is not None, "an array of the call is overwritten by nobody"
            is_there = is_complete and [i.desc_key for i in value.instances] == [ref.desc_key]
            if not is_there and value.status is READY:
                device.deaths.free(value, self.cache.reasons[at])
                value.status = Status.LOST
        # Atomic: no call in between.
        device.records.pending_recovery = None
        device.records.is_consistent = True

    # -- copies of the results -------------------------------------------------------------------

    def can_copy(self, arguments: Sequence[Any]) -> bool:
        """Return whether `copies` may run next on these arguments: without observers, on lent
        tensors only, with small dense results in slots of their own.

        Lent tensors cannot be donated, and ending a loan changes the generation.
        """
        device = self.device
        if device.observers or self.slots.shares or not self.is_written or self._order is not None:
            return False
        if self.arrays(arguments) is None:
            return False
        for entry, argument in zip(self.entries, arguments, strict=True):
            if entry is None and type(argument) is Tensor:
                return False
            for instance in () if entry is None else entry.instances:
                address = instance.buffer.address
                if address is None or address < LENT_ADDRESSES:
                    return False
        results, reads = [], []
        for instances, (desc, key, _) in zip(self.slots.instances, self.recorded.own, strict=True):
            array = device.backend.dense(instances[0])
            if array is None or array.nbytes >= LARGE_NBYTES:
                return False
            results.append(array)
            reads.append(device.history.reads_of(key, desc, array.nbytes))
        order = self.recorded.order or range(len(results))
        self._copied = [results[at] for at in order], [reads[at] for at in order]
        return True

    def copies(self, arrays: Sequence[Array]) -> list[Array] | None:
        """Run on the same tensors and other arrays, and return copies of the results, whose slots
        stay idle.

        Returns None, without running, if anything has changed. The caller holds the run lock, and
        `can_copy` was true.
        """
        slots, device = self.slots, self.device
        records, deaths = device.records, device.deaths
        if (
            records.generation != self.generation
            or slots.again is not self
            # Process pending notes first: an export of a result may have ended.
            or slots.held
            or slots.shares
            or deaths.ended
            or (deaths.dropped and not only_of_slots(deaths.dropped))
            # An interrupted batch may read the previous result.
            or not device.tasks.is_idle
            or not records.is_consistent
        ):
            return None
        slots.last_run = device.tasks.queued.number
        try:
            if not self.code(arrays):
                return None
        except BaseException as error:
            self._stopped(error)
            raise
        assert self._copied is not None, "can_copy was called"
        results, reads = self._copied
        for times in reads:
            times[0] += 1
        return list(map(_COPY, results))


class ReplayCache:
    """What ran for one graph, by the signatures of its arguments.

    Args:
        device: The device.
        ports: The graph's inputs.
        reasons: By position of a donated input, why its tensor is lost after a failure.
    """

    def __init__(
        self, device: RuntimeDevice, ports: Sequence[InputPort], reasons: dict[int, str]
    ) -> None:
        self.device, self.ports, self.reasons = device, ports, reasons
        self._recorded: dict[tuple[object, ...], Recorded] = {}
        self._replays: dict[Entries, Replay] = {}
        #: The executable whose output slots have a replay.
        self.last: Executable | None = None

    def signature(self, entries: Sequence[ValueRecord | None]) -> tuple[object, ...]:
        """Return what plans on such arguments depend on, except addresses."""
        return tuple([v if v is None else (v.desc_key, v.signature()) for v in entries])

    def remember(self, signature: tuple[object, ...], binding: Binding, recorded: Recorded) -> None:
        """Cache what has just run for arguments of a signature.

        Not if it changes more than its results, or one tensor was passed twice.
        """
        if binding.slots is None or len(set(recorded.numbers)) < len(recorded.numbers):
            return
        self._replays.clear()
        _put(self._recorded, signature, recorded)

    def settled(self) -> Replay | None:
        """Return the replay of the output slots that are next, if nothing was moved since."""
        slots = None if self.last is None else self.last.ready()
        again: Replay | None = None if slots is None else slots.again
        if again is None or again.cache is not self:
            return None
        return again if again.generation == self.device.records.generation else None

    def find(self, arguments: Sequence[Any]) -> Replay | None:
        """Return a new replay for arguments; None if no executable for such arguments may run."""
        device, entries = self.device, list[ValueRecord | None]()
        if not self._recorded:
            return None
        for port, argument in zip(self.ports, arguments, strict=True):
            if type(argument) is Tensor:
                value = argument._record
                if value.status is not READY or value.consumed:
                    return None
                if value.is_exposed and len(value.instances) > 1:
                    invalidate_stale_copies(device.records, device.backend, value)
                entries.append(value)
            elif takes(port, argument):
                entries.append(None)
            else:
                return None
        key = tuple(entries)
        again = self._replays.get(key)
        if (
            again is not None
            and again.generation == device.records.generation
            and again.slots is again.recorded.executable.ready()
            and again.arrays(arguments) is not None
        ):
            return again
        recorded = self._recorded.get(self.signature(entries))
        if recorded is None:
            return None
        places = tuple([
            (number, value.places())
            for number, value in zip(recorded.numbers, entries, strict=True)
            if value is not None
        ])  # fmt: skip
        binding = device.maker.again((recorded.executable,), places)
        if binding is None:
            return None
        again = Replay(self, recorded, binding, key)
        _put(self._replays, key, again)
        return again


def _put(cache: dict[Any, Any], key: object, entry: object) -> None:
    """Store an entry as the newest, and drop the oldest of too many."""
    cache.pop(key, None)
    cache[key] = entry
    if len(cache) > MAX_SIGNATURES:
        del cache[next(iter(cache))]


def takes(port: InputPort, argument: object) -> bool:
    """Return whether an argument is an array of the type of an input."""
    return (
        type(argument) is np.ndarray
        and argument.dtype is port.dtype
        and argument.shape == port.shape
    )


def commit(records: Records, change: Callable[[], object]) -> None:
    """Make an idempotent change completely: if it is interrupted, the next use of the device
    completes it."""
    records.is_consistent = False
    records.pending_recovery = partial(commit, records, change)
    change()
    # Atomic: no call in between.
    records.pending_recovery = None
    records.is_consistent = True


def only_of_slots(dropped: Sequence[ValueRecord]) -> bool:
    """Return whether pending notes are few and only release values to output slots, so that they
    can wait."""
    count = len(dropped)
    if count > MAX_NOTES_LEFT:
        return False
    # No iterator: finalizers may append at any time.
    for position in range(count):  # noqa: SIM110 (each step of a generator costs a call)
        if dropped[position].slots is None:
            return False
    return True

"""Replay of the last run of a graph into the same output slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.budget import LARGE_NBYTES
from stitch.memory import LENT_ADDRESSES
from stitch.program import Array
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.graphs.placed_graph import MadeValue
from stitch.runtime.plan_cache import Entries
from stitch.runtime.queue import TaskQueue
from stitch.runtime.recording import Binding, GeneratedRunner, Ran, tell_stopped
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import InstanceRef, OutputSlots, Records, Status, ValueRecord

READY = Status.READY
#: Called by `map`, without Python frames.
_COPY = np.ndarray.copy
#: Limit for unprocessed notes of dropped results, left for graphs that run in turn.
MAX_NOTES_LEFT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Details:
    """The results of an executable: in output slots (`own`), and in buffers of donated entries
    (`carried`).

    `order`: for each output of the graph its position among both; None if equal.
    """

    own: tuple[MadeValue, ...]
    #: Position of the entry, the result's instance, and the result.
    carried: tuple[tuple[int, InstanceRef, MadeValue], ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTarget:
    """How to run into output slots again while the records' generation is unchanged.

    `known`: the plan cache of the graph. `entries`: its arguments (None: arrays only); `exposed`:
    which of them are externally writable (lent, or host arrays). `note`: the finalizer of the
    handle on its only result; None if it has several.
    """

    device: RuntimeDevice
    known: object
    generation: int
    entries: Entries | None
    exposed: tuple[bool, ...]
    binding: Binding
    details: Details
    straight: GeneratedRunner
    run: Callable[..., Ran]
    note: Callable[[], object] | None

    def ran(self, arguments: Sequence[Any]) -> Ran:
        """Run; returns False, without running, if the arguments differ."""
        arrays = arguments if self.entries is None else self.arrays(self.entries, arguments)
        try:
            return arrays is not None and self.run(arrays)
        except BaseException as error:
            tell_stopped(self.device, self.binding, self.straight.stopped(error))
            raise

    def arrays(self, entries: Entries, arguments: Sequence[Any]) -> list[Any] | None:
        """Return the arrays among the arguments; None if a tensor differs or needs a check."""
        arrays = []
        for entry, was_exposed, argument in zip(entries, self.exposed, arguments, strict=True):
            if type(argument) is Tensor:
                value = argument._record
                if value is not entry or value.status is not READY or value.consumed:
                    return None
                if value.is_exposed and (not was_exposed or len(value.instances) > 1):
                    return None
            elif entry is None:
                arrays.append(argument)
            else:
                return None
        return arrays

    def ran_on(self, arguments: Sequence[Any]) -> bool:
        """Return whether the arguments are these tensors and as many arrays."""
        if self.entries is None:
            return not any(type(argument) is Tensor for argument in arguments)
        return self.arrays(self.entries, arguments) is not None

    @property
    def reads_lent(self) -> bool:
        """Whether all its tensors are lent: they cannot be donated, and ending a loan changes the
        generation."""
        for entry in self.entries or ():
            for instance in () if entry is None else entry.instances:
                address = instance.buffer.address
                if address is None or address < LENT_ADDRESSES:
                    return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A repeated run on lent tensors into slots that stay idle, since results are copied at once.

    `results`: the bytes of each graph output; `reads`: the read counters. The caller holds the run
    lock.
    """

    again: ReplayTarget
    lease: OutputSlots
    results: tuple[Array, ...]
    reads: tuple[list[int], ...]
    #: State checked by each call.
    records: Records
    tasks: TaskQueue
    dropped: Sequence[ValueRecord]
    ended: Sequence[object]

    @staticmethod
    def of(again: ReplayTarget, lease: OutputSlots) -> Replay | None:
        """Return the replay of the last run in these slots.

        Returns None with observers, shared slots or non-lent arguments, or if a result is not dense
        or is large.
        """
        device, details = again.device, again.details
        if device.observers or lease.shares or not again.reads_lent:
            return None
        results = []
        for instances, (desc, key, _) in zip(lease.instances, details.own, strict=True):
            array = device.backend.dense(instances[0])
            if array is None or array.nbytes >= LARGE_NBYTES:
                return None
            results.append((array, device.history.reads_of(key, desc, array.nbytes)))
        order = range(len(results)) if details.order is None else details.order
        return Replay(
            again, lease, tuple([results[at][0] for at in order]),
            tuple([results[at][1] for at in order]), device.records, device.tasks,
            device.deaths.dropped, device.deaths.ended,
        )  # fmt: skip

    def __call__(self, arrays: Sequence[Array]) -> list[Array] | None:
        """Run on the arrays of a call and return copies of the results.

        Returns None, without running, if anything has changed.
        """
        again, lease, records, tasks = self.again, self.lease, self.records, self.tasks
        if (
            records.generation != again.generation
            or lease.again is not again
            # Process pending notes first: an export of a result may have ended.
            or lease.held
            or lease.shares
            or self.ended
            or (self.dropped and not only_of_leases(self.dropped))
            # An interrupted batch may read the previous result.
            or not tasks.is_idle
            or not records.is_consistent
        ):
            return None
        lease.last_run = tasks.queued.number
        try:
            if not again.run(arrays):
                return None
        except BaseException as error:
            tell_stopped(again.device, again.binding, again.straight.stopped(error))
            raise
        for times in self.reads:
            times[0] += 1
        return list(map(_COPY, self.results))


def only_of_leases(dropped: Sequence[ValueRecord]) -> bool:
    """Return whether pending notes are few and only release values to output slots, so that they
    can wait."""
    count = len(dropped)
    if count > MAX_NOTES_LEFT:
        return False
    # No iterator: finalizers may append at any time.
    for position in range(count):  # noqa: SIM110 (each step of a generator costs a call)
        if dropped[position].lease is None:
            return False
    return True

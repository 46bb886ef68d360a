"""Once more: what a lease remembers of the last run into it, to run into it again."""

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
from stitch.runtime.values import InstanceRef, Notes, OutputSlots, Records, Status, ValueRecord

READY = Status.READY
#: Called by C for one array after the other.
_COPY = np.ndarray.copy
#: Notes of dropped results that are left to the graphs that made them, which run in turn.
MAX_NOTES_LEFT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Details:
    """Of a recording: its results that lie in leases, and those that lie in the buffers of entries.

    `order`: for each output of the graph its position among both; None where it is the same.
    """

    own: tuple[MadeValue, ...]
    #: Position of the entry, how the result lies there, and the result.
    carried: tuple[tuple[int, InstanceRef, MadeValue], ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTarget:
    """How a lease is run into once more while the generation of the records is the same.

    `known`: whose work it is. `entries`: what it was given (None: arrays only); `exposed`: which of
    them others can write to, all of them lent, or outside the spaces. `note`: what the handle on
    its only result calls in the end, None where it has several.
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
        """Run it; False, with nothing done, where the arguments are others. Raises what its steps
        raise."""
        arrays = arguments if self.entries is None else self.arrays(self.entries, arguments)
        try:
            return arrays is not None and self.run(arrays)
        except BaseException as error:
            tell_stopped(self.device, self.binding, self.straight.stopped(error))
            raise

    def arrays(self, entries: Entries, arguments: Sequence[Any]) -> list[Any] | None:
        """The arrays among the arguments; None where a tensor is none of the entries, or is not to
        be read as it lies."""
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
        """Whether what ran was given these very tensors, and as many arrays."""
        if self.entries is None:
            return not any(type(argument) is Tensor for argument in arguments)
        return self.arrays(self.entries, arguments) is not None

    @property
    def reads_lent(self) -> bool:
        """Whether the tensors that it was given are lent: they are nobody's to give away, and whose
        owner takes one back moves the generation on."""
        for entry in self.entries or ():
            for instance in () if entry is None else entry.instances:
                address = instance.buffer.address
                if address is None or address < LENT_ADDRESSES:
                    return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A run on lent tensors, over and over into one lease that stays idle: its results are copied
    out as soon as it has run, so nobody holds any.

    `results`: the bytes of each output of the graph; `reads`: how often such were read. The
    device's lock is held by who calls.
    """

    again: ReplayTarget
    lease: OutputSlots[Binding]
    results: tuple[Array, ...]
    reads: tuple[list[int], ...]
    #: What each call looks at.
    records: Records
    tasks: TaskQueue
    dropped: Sequence[ValueRecord]
    notes: Notes

    @staticmethod
    def of(again: ReplayTarget, lease: OutputSlots[Binding]) -> Replay | None:
        """The repeat of what a lease remembers; None where somebody looks on, where it has or reads
        what may change without a word, or a result is no dense array."""
        device, details = again.device, again.details
        if device.observers or lease.shares or not again.reads_lent:
            return None
        results = []
        for instances, (desc, key, _) in zip(lease.instances, details.own, strict=True):
            array = device.contents.dense(instances[0])
            if array is None or array.nbytes >= LARGE_NBYTES:
                return None
            results.append((array, device.history.reads_of(key, desc, array.nbytes)))
        order = range(len(results)) if details.order is None else details.order
        return Replay(
            again, lease, tuple([results[at][0] for at in order]),
            tuple([results[at][1] for at in order]), device.records, device.tasks,
            device.deaths.dropped, device.deaths.notes,
        )  # fmt: skip

    def __call__(self, arrays: Sequence[Array]) -> list[Array] | None:
        """Run it on the arrays of a call: its results, in arrays of their own. None, with nothing
        done, where anything is not as it was. Raises what its steps raise."""
        again, lease, records, tasks = self.again, self.lease, self.records, self.tasks
        if (
            records.generation != again.generation
            or lease.again is not again
            # What others let go of is looked at first: it may be all that they hold of a result.
            or lease.held
            or lease.shares
            or self.notes.left
            or (self.dropped and not only_of_leases(self.dropped))
            # Else an interrupted window may read what the last run made.
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
    """Whether reading notes would only give places back to their leases, and there are few: then
    those that made them find them as they are."""
    count = len(dropped)
    if count > MAX_NOTES_LEFT:
        return False
    # Finalizers leave notes at any time: no iterator outlives that.
    for position in range(count):  # noqa: SIM110 (each step of a generator costs a call)
        if dropped[position].lease is None:
            return False
    return True

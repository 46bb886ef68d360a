"""Once more: what a lease remembers of the last run into it, to run into it again.

Comes in: what a run was given, and what ran. Goes out: the same run on the same tensors and other
arrays, while the device's generation stands still. Must not know handles on results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stitch.runtime.device import RuntimeDevice
from stitch.runtime.graphs.placed_graph import MadeValue
from stitch.runtime.known_work import Entries
from stitch.runtime.recording import Binding, Ran, Straight, tell_stopped
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import InstanceRef, Status, ValueRecord

READY = Status.READY
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
class Again:
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
    straight: Straight
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

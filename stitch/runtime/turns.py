"""Turns: a pipeline's plan bound to output buffers of its own, run again when nobody reads them.

A caller who still holds the last result gets other buffers (so two usually take turns); one who
let go of it gets the same handle back with new contents, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import TYPE_CHECKING

from stitch.program import Array, Space
from stitch.runtime.events import PlanStopped
from stitch.runtime.plans import ReadyPlan
from stitch.runtime.program import InputPort
from stitch.runtime.state import Status, ValueRecord
from stitch.runtime.straight import straight_code
from stitch.runtime.tensor import Tensor

if TYPE_CHECKING:
    from stitch.runtime.device import Device

#: Results of one pipeline that may be held at a time before calls go by way of the queue.
MAX_TURNS = 8
#: References to an output that are ours while `getrefcount` looks at it: the tuple of outputs, the
#: attribute or the name in a loop, and the argument.
OWN_REFERENCES = 3


def can_take_turns(ready: ReadyPlan) -> bool:
    """Whether a plan touches nothing but its arguments and what it makes itself."""
    effects, plan = ready.effects, ready.plan
    if effects.freed or effects.moved or ready.bystanders:
        return False
    return all(plan.request.buffers[number].address is None for number in plan.touched)


class Turn:
    """One bound plan, its outputs' handles, and what the memory looked like after it ran.

    `only` is the output where there is one, for callers that look at every nanosecond.
    """

    __slots__ = (
        "_device", "_outputs", "_places", "_ready", "_temporary", "_written", "epoch", "only",
        "run", "straight",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        ready: ReadyPlan,
        outputs: Sequence[Tensor],
        ports: Sequence[InputPort],
    ) -> None:
        self._device = device
        self.run = device.quiet.run
        self._outputs = tuple(outputs)
        self.only = outputs[0] if len(outputs) == 1 else None
        # Arguments are numbered as they enter the queue, which is the order of the inputs.
        sources = sorted(r.value for r in ready.plan.request.residents)
        rank = {value: i for i, value in enumerate(sources)}
        self._ready = ready
        self._written = straight_code(
            ready.bound.thunks,
            [(port.dtype, port.shape) for port in ports],
            [rank[value] for value in ready.bound.argument_values],
            ready.tally,
        )
        self.straight = self._written.run
        self._places = tuple(t._record.instances[0].buffer.address for t in outputs)
        kept = [(b.space, b.address, b.size_per_bank) for b, _ in ready.effects.made]
        self._temporary = tuple(
            region
            for space, address, size in ready.plan.free_regions
            for region in _outside(space, address, size, kept)
        )
        #: The records' epoch at which everything below was last seen to hold.
        self.epoch = -1

    def is_whole(self) -> bool:
        """Whether its outputs are still where the plan writes them, and only there."""
        return all(
            _is_at(tensor._record, place)
            for tensor, place in zip(self._outputs, self._places, strict=True)
        )

    def is_unheld(self) -> bool:
        """Whether nobody else holds a handle on its outputs."""
        if self.only is not None:
            return getrefcount(self.only) == OWN_REFERENCES
        for tensor in self._outputs:  # noqa: SIM110
            if getrefcount(tensor) > OWN_REFERENCES:
                return False
        return True

    def is_free(self) -> bool:
        """Whether what it works in is as it was; then that holds until the records change."""
        records = self._device.records
        allocators = records.allocators
        fits = self.is_whole() and all(
            allocators[space].is_free(address, size) for space, address, size in self._temporary
        )
        if fits:
            self.epoch = records.epoch
        return fits

    def again(self, arrays: tuple[Array, ...]) -> bool:
        """Run the plan on other arrays; False, and nothing done, if one is of another kind."""
        return self.run(self.straight, arrays)

    def stopped(self, error: BaseException) -> None:
        """Tell of the steps that were done before one of its own raised."""
        done = self._ready.steps_of(self._written.steps_done(error))
        if done:
            ready = self._ready
            self._device.events.report(PlanStopped(ready.index, ready.plan, done))

    def outputs(self) -> Tensor | tuple[Tensor, ...]:
        """The handles: always the same ones."""
        if self.only is not None:
            return self.only
        # A new tuple each time: whoever keeps it is seen by the outputs' reference counts.
        return tuple([tensor for tensor in self._outputs])  # noqa: C416


def _is_at(record: ValueRecord, place: int | None) -> bool:
    instances = record.instances
    if record.status is not Status.READY or record.consumed or record.handles != 1:
        return False
    if len(instances) != 1 or record.version:
        return False
    buffer = instances[0].buffer
    return buffer.address == place and not buffer.pins and len(buffer.users) == 1


def _outside(
    space: Space, address: int, size: int, kept: Sequence[tuple[Space, int | None, int]]
) -> list[tuple[Space, int, int]]:
    """The parts of a region that lie outside the kept ones."""
    left, at, end = [], address, address + size
    mine = sorted((a, n) for s, a, n in kept if s is space and a is not None)
    for start, length in mine:
        if start + length <= at or start >= end:
            continue
        if start > at:
            left.append((space, at, start - at))
        at = max(at, start + length)
    if at < end:
        left.append((space, at, end - at))
    return left

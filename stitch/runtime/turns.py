"""Turns: a pipeline's plan bound to output buffers of its own, run again when nobody reads them.

A caller who still holds the last result gets other buffers (so two usually take turns); one who
let go of it gets the same handle back with new contents, and nothing is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stitch.program import Array, Space
from stitch.runtime.plans import ReadyPlan
from stitch.runtime.state import Status
from stitch.runtime.tensor import Tensor

if TYPE_CHECKING:
    from stitch.runtime.device import Device

#: Results of one pipeline that may be held at a time before calls go by way of the queue.
MAX_TURNS = 8


def can_take_turns(ready: ReadyPlan) -> bool:
    """Whether a plan touches nothing but its arguments and what it makes itself."""
    effects = ready.effects
    only_arrays = all(
        block.address is None or block.number not in ready.plan.touched
        for block in ready.plan.request.blocks
    )
    return only_arrays and not (effects.freed or effects.moved or ready.bystanders)


class Turn:
    """One bound plan, its outputs' handles, and what the memory looked like after it ran."""

    __slots__ = ("_arguments", "_checks", "_device", "_order", "_outputs", "_ready",
                 "_temporary", "_tokens")  # fmt: skip

    def __init__(self, device: Device, ready: ReadyPlan, outputs: Sequence[Tensor]) -> None:
        self._device = device
        self._ready = ready
        self._outputs = tuple(outputs)
        # Arguments are numbered as they enter the queue, which is the order of the inputs.
        sources = sorted(r.value for r in ready.plan.request.residents)
        rank = {value: i for i, value in enumerate(sources)}
        self._order = tuple(rank[value] for value in ready.bound.argument_values)
        self._arguments = ready.bound.arguments
        self._checks = tuple(
            (tensor, tensor._record, tensor._record.instances[0].block.address)
            for tensor in outputs
        )
        records = device.records
        self._tokens = tuple((a, a.token) for a in records.allocators.values())
        kept = [(block.space, block.address, block.size_per_bank) for block in ready.effects.made]
        self._temporary = tuple(
            region
            for space, address, size in ready.plan.free_regions
            for region in _outside(space, address, size, kept)
        )

    def is_whole(self) -> bool:
        """Whether its outputs are still where the plan writes them."""
        for _, record, place in self._checks:
            if record.status is not Status.READY or record.consumed:
                return False
            if not record.instances or record.instances[0].block.address != place:
                return False
        return True

    def is_free(self) -> bool:
        """Whether nobody else holds its outputs, and the regions it works in are free."""
        for tensor, record, place in self._checks:
            # Four references are ours: `_outputs`, `_checks`, the loop's name, the argument.
            if sys.getrefcount(tensor) > 4:
                return False
            if record.status is not Status.READY or record.consumed or record.handles != 1:
                return False
            instances = record.instances
            if len(instances) != 1:
                return False
            block = instances[0].block
            if block.address != place or block.pins or len(block.users) != 1:
                return False
        for allocator, token in self._tokens:
            if allocator.token != token:
                allocators = self._device.records.allocators
                return all(
                    allocators[space].is_free(address, size)
                    for space, address, size in self._temporary
                )
        return True

    def run(self, arrays: Sequence[Array]) -> Tensor | tuple[Tensor, ...]:
        """Run the plan on other arrays; gives the handles of the same outputs."""
        arguments = self._arguments
        for i, source in enumerate(self._order):
            arguments[i] = arrays[source]
        with np.errstate(all="ignore"):
            for thunk in self._ready.bound.thunks:
                thunk()
        for i in range(len(arguments)):
            arguments[i] = None
        self._ready.runs += 1
        outputs = self._outputs
        if len(outputs) == 1:
            return outputs[0]
        # A new tuple each time: whoever keeps it is seen by the outputs' reference counts.
        return tuple([tensor for tensor in outputs])  # noqa: C416


def _outside(
    space: Space, address: int, size: int, kept: Sequence[tuple[Space, int | None, int]]
) -> list[tuple[Space, int, int]]:
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

"""Making way: what lies where a plan wants to write is moved aside, so that the plan can run again.

A caller who keeps every result fills the place that the last run wrote to. Moving that one result
costs a memmove; planning and binding anew would cost a thousand times that for small tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.machine import footprint
from stitch.memory import Allocator
from stitch.program import Space
from stitch.runtime.events import MovedAside
from stitch.runtime.plans import ReadyPlan
from stitch.runtime.state import BufferRecord

if TYPE_CHECKING:
    from stitch.runtime.device import Device

#: Bytes that may be moved to save a plan: about what planning a small window costs in time.
MOVED_NBYTES = 4 << 20


def make_way(device: Device, ready: ReadyPlan) -> bool:
    """Whether the regions of a plan are free now, after moves of whole buffers out of them.

    Nothing has changed where the answer is no. Only buffers that lie just where the plan makes
    its own are moved: the results of earlier runs.
    """
    if device.copies_forbidden or not ready.bystanders_hold(device.records):
        return False
    in_the_way = _in_the_way(device, ready)
    if not in_the_way:
        return False
    targets = _targets(device, ready, in_the_way)
    if targets is None:
        return False
    if not all(
        device.host_memory.try_take_region(buffer.space, target, buffer.desc)
        for buffer, target in zip(in_the_way, targets, strict=True)
    ):
        return False
    records, spaces = device.records, device.backend.spaces
    for buffer, target in zip(in_the_way, targets, strict=True):
        assert buffer.address is not None
        space, address, size = buffer.space, buffer.address, buffer.size_per_bank
        own_nbytes = footprint(buffer.desc, device.machine.shape).own_nbytes
        if device.backend.executor.computes:
            spaces[space].move(address, target, size)
            spaces[space].counter.count(1, own_nbytes)
        records.move([((space, address), target)])
        nbytes = size * spaces[space].shape.banks
        inside = device.machine.path(space, space) is not None
        seconds = device.machine.seconds(space, space, nbytes, size) if inside else 0.0
        device.events.report(MovedAside(space, address, target, size, own_nbytes, seconds))
    return True


def _in_the_way(device: Device, ready: ReadyPlan) -> list[BufferRecord]:
    """The buffers to move; empty where something else is in the way, or it is not worth it."""
    found: list[BufferRecord] = []
    nbytes = 0
    # What lies there when the plan starts, and is moved or freed by the plan itself.
    its_own = {bystander.place for bystander in ready.bystanders}
    for made, _ in ready.effects.made:
        assert made.address is not None
        buffer = device.records.buffers.get((made.space, made.address))
        if buffer is None or (made.space, made.address) in its_own:
            continue
        if buffer.size_per_bank != made.size_per_bank or buffer.pins or not buffer.users:
            return []
        if any(user.window == device.queued.number for user in buffer.users):
            return []
        if made.space is not Space.HOST and device.machine.path(made.space, made.space) is None:
            return []
        nbytes += buffer.size_per_bank * device.machine.shape.space(made.space).banks
        found.append(buffer)
    return found if nbytes <= MOVED_NBYTES else []


def _targets(device: Device, ready: ReadyPlan, buffers: list[BufferRecord]) -> list[int] | None:
    """Where the buffers can go, outside all regions of the plan; the allocators are as before."""
    allocators = device.records.allocators
    done: list[tuple[Allocator, int]] = []
    targets: list[int] = []
    for buffer in buffers:
        assert buffer.address is not None
        allocators[buffer.space].free(buffer.address)
    for space, address, size in ready.plan.free_regions:
        if not allocators[space].is_free(address, size):
            break
        allocators[space].alloc_at(address, size)
        done.append((allocators[space], address))
    cleared = len(done) == len(ready.plan.free_regions)
    for buffer in buffers if cleared else ():
        target = allocators[buffer.space].try_alloc(buffer.size_per_bank)
        if target is None:
            break
        targets.append(target)
        done.append((allocators[buffer.space], target))
    for allocator, address in done:
        allocator.free(address)
    for buffer in buffers:
        assert buffer.address is not None
        allocators[buffer.space].alloc_at(buffer.address, buffer.size_per_bank)
    return targets if len(targets) == len(buffers) else None

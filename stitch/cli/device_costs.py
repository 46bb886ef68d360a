"""Memory peaks and copies of a run, for the reports of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stitch.api import Device
from stitch.cli.chain import Runnable
from stitch.errors import OutOfMemoryError
from stitch.linker import check_capacity, demands
from stitch.planner import Allocate, Copy, Execute, Free, Plan
from stitch.program import Space
from stitch.report import CopyLine, copy_lines, memory_report, other_lines


def check_device_capacity(device: Device, runnable: Runnable) -> None:
    """Raise `OutOfMemoryError` if a program or an input exceeds the memory of the machine."""
    shape = device.machine.shape
    for loaded in runnable.programs:
        one = loaded.program
        wanted = demands(one, one.scratch, shape)
        check_capacity(wanted, shape, f"program {one.name!r}")
    # A pipeline's input may be larger than the elements of it that programs read.
    capacity = shape.host.capacity * shape.host.banks
    for slot in runnable.inputs:
        if slot.type.nbytes > capacity:
            raise OutOfMemoryError(
                f"input {slot.name!r} exceeds the host memory of machine {shape.name!r}",
                expected=f"at most {capacity} B",
                got=f"{slot.type.nbytes} B for {slot.type.text()}",
                remedy="split it, and run several times",
            )


def peaks(plans: Sequence[Plan]) -> dict[Space, int]:
    """Return the largest bytes per bank of any plan at one time, by space (scratch included)."""
    largest: dict[Space, int] = {}
    for plan in plans:
        sizes = {b.number: (b.space, b.size_per_bank) for b in plan.request.buffers
                 if b.address is not None}  # fmt: skip
        used: dict[Space, int] = {}
        for space, size in sizes.values():
            used[space] = used.get(space, 0) + size
        _raise_to(largest, used)
        for step in plan.steps:
            if isinstance(step, Allocate):
                buffer = step.buffer
                sizes[buffer.number] = (buffer.space, buffer.size_per_bank)
                used[buffer.space] = used.get(buffer.space, 0) + buffer.size_per_bank
            elif isinstance(step, Free) and step.buffer in sizes:
                space, size = sizes.pop(step.buffer)
                used[space] -= size
            elif isinstance(step, Execute) and step.scratch is not None:
                space, _, size = step.scratch
                _raise_to(largest, used | {space: used.get(space, 0) + size})
            _raise_to(largest, used)
    return largest


def _raise_to(largest: dict[Space, int], used: Mapping[Space, int]) -> None:
    for space, size in used.items():
        largest[space] = max(largest.get(space, 0), size)


def memory_text(device: Device) -> str:
    """Return the memory report with the peak of each space in the device's period."""
    lines = [memory_report(device)]
    for name, size in peaks_of(device).items():
        lines.append(f"{name}: peak {size} B per bank ({device.history.period})")
    return "\n".join(lines)


def peaks_of(device: Device) -> dict[str, int]:
    """Return the peaks of the period's plans and of present memory, in bytes per bank by space."""
    used = {s: use.used_nbytes for s, use in device.memory_use().items()}
    with device.lock:
        largest = peaks([plan for plan, _ in device.history.plans])
    _raise_to(largest, used)
    return {space.value: size for space, size in largest.items() if size}


def copies_inside(device: Device) -> tuple[CopyLine, ...]:
    """Return the copies between buffers in memory: all but those of the run's host arrays."""
    account = device.account()
    planned = copy_lines([(_without_entries(plan), times) for plan, times in account.plans])
    return planned + tuple(line for line in other_lines(account) if line.kind != "write")


def _without_entries(plan: Plan) -> Plan:
    entering = plan.request.entering()
    steps = tuple(
        step
        for step in plan.steps
        if not isinstance(step, Copy) or step.source.buffer not in entering
    )
    return replace(plan, steps=steps)


def planned_copies(device: Device) -> int:
    """Return the largest number of `copies_inside` of one plan, for runs without data."""
    inside = (_without_entries(plan).copies for plan, _ in device.history.plans)
    return max((sum(step.count for step in copies) for copies in inside), default=0)

"""Memory peaks and copies of a run, for the reports of commands."""

from __future__ import annotations

from dataclasses import replace

from stitch.api import Device
from stitch.cli.chain import Runnable
from stitch.errors import OutOfMemoryError
from stitch.linker import check_capacity, demands
from stitch.planner import Copy, Plan
from stitch.report import CopyLine, copy_lines, memory_report, other_lines, peaks_of


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


def memory_text(device: Device) -> str:
    """Return the memory report with the peak of each space in the device's period."""
    lines = [memory_report(device)]
    for name, size in peaks_of(device).items():
        lines.append(f"{name}: peak {size} B per bank ({device.history.period})")
    return "\n".join(lines)


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

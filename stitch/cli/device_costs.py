"""Memory peaks and copies of a run, for the reports of the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stitch.api import Device
from stitch.cli.chain import RunInput, Runnable
from stitch.errors import OutOfMemoryError
from stitch.linker import check_capacity, demands
from stitch.machine import MachineShape
from stitch.planner import Allocate, Copy, Execute, Free, Plan
from stitch.program import Space
from stitch.report import CopyLine, copy_lines, memory_report, other_lines


def check_room(device: Device, runnable: Runnable) -> None:
    """Raise `OutOfMemoryError` where a program, or an input, is larger than the machine."""
    shape = device.machine.shape
    for loaded in runnable.programs:
        one = loaded.program
        wanted = demands(one, one.scratch, shape)
        check_capacity(wanted, shape, f"program {one.name!r}")
    _check_inputs(runnable.inputs, shape)


def _check_inputs(slots: Sequence[RunInput], shape: MachineShape) -> None:
    """A pipeline's inputs may be larger than what its programs see of them at a time."""
    have = shape.host.capacity * shape.host.banks
    for slot in slots:
        if slot.type.nbytes > have:
            raise OutOfMemoryError(
                f"input {slot.name!r} does not fit the host of machine {shape.name!r}",
                expected=f"at most {have} B",
                got=f"{slot.type.nbytes} B for {slot.type.text()}",
                remedy="give it in parts, over several runs",
            )


def peaks(plans: Sequence[Plan]) -> dict[Space, int]:
    """The most bytes per bank that any plan needed at one time, by space (scratch included)."""
    most: dict[Space, int] = {}
    for plan in plans:
        sizes = {b.number: (b.space, b.size_per_bank) for b in plan.request.buffers
                 if b.address is not None}  # fmt: skip
        used: dict[Space, int] = {}
        for space, size in sizes.values():
            used[space] = used.get(space, 0) + size
        _raise_to(most, used)
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
                _raise_to(most, used | {space: used.get(space, 0) + size})
            _raise_to(most, used)
    return most


def _raise_to(most: dict[Space, int], used: Mapping[Space, int]) -> None:
    for space, size in used.items():
        most[space] = max(most.get(space, 0), size)


def memory_text(device: Device) -> str:
    """The memory report, and the peak of each space in the device's period."""
    lines = [memory_report(device)]
    for name, size in peaks_of(device).items():
        lines.append(f"{name}: peak {size} B per bank ({device.history.period})")
    return "\n".join(lines)


def peaks_of(device: Device) -> dict[str, int]:
    """The peaks of the period's plans, and what is held now, in bytes per bank by space."""
    held = {s: use.used_nbytes for s, use in device.memory_use().items()}
    with device.lock:
        most = peaks([plan for plan, _ in device.history.plans])
    _raise_to(most, held)
    return {space.value: size for space, size in most.items() if size}


def entries(device: Device) -> int:
    """How often a call's host array has entered a space so far."""
    return device.history.whole().entries


def copies_inside(device: Device) -> tuple[CopyLine, ...]:
    """The copies of what was in memory already: all but the inputs' way in."""
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
    """For runs without data: the most copies that one plan makes of what is in memory already."""
    inside = (_without_entries(plan).copies for plan, _ in device.history.plans)
    return max((sum(step.count for step in copies) for copies in inside), default=0)

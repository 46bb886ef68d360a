"""Is there room for what a run brings in? Asked before arrays are made, not when they are full.

Comes in: a device, programs, the slots to fill. Goes out: nothing, or an `OutOfMemoryError`. Must
not know: words of the command line, arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.api import Device
from stitch.cli.chain import RunInput, Runnable
from stitch.errors import OutOfMemoryError
from stitch.linker import check_capacity, demands
from stitch.machine import MachineShape


def check_room(device: Device, runnable: Runnable) -> None:
    """Raise `OutOfMemoryError` where a program, or an input, is larger than the machine."""
    shape = device.machine.shape
    for loaded in runnable.programs:
        one = loaded.program
        wanted = demands(one.inputs, one.outputs, one.constants, one.values, one.scratch, shape)
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

"""Loading: a program of a binary becomes an agent of a device, its constants get addresses."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from stitch.errors import IncompatibleError
from stitch.machine import footprint, machine_names
from stitch.runtime.checks import check_program
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.values import BufferRecord
from stitch.ttb import Binary

if TYPE_CHECKING:
    from stitch.runtime.device import Device


def load_program(
    device: Device, binary: Binary, which: int | str, where: str | None = None
) -> LoadedProgram:
    """See `Device.load`; `where` is the binary's file. Nothing stays reserved where it fails."""
    missing = tuple(device.machine.shape.shortcomings(binary.machine))
    if missing:
        raise IncompatibleError(
            f"a binary compiled for {binary.machine.name!r} does not run on "
            f"{device.machine.name!r}: " + "; ".join(missing),
            where=where,
            remedy=_targets(device.machine.name, binary.machine.name),
        )
    program = binary.program(which)
    check_program(program, device.machine.shape)
    buffers: list[BufferRecord] = []
    try:
        for constant in program.constants:
            value = program.values[constant.value]
            desc = value.desc
            size = footprint(desc, device.machine.shape).size_per_bank
            name = f"constant {value.name!r} of {program.name!r}"
            buffers.append(device.records.reserve(desc, size, desc.layout.address, name))
    except Exception:
        for buffer in buffers:
            device.records.free(buffer)
        raise
    loaded = LoadedProgram(device, program, lambda: binary.verify_segments(program), tuple(buffers))
    weakref.finalize(loaded, device.unloaded.append, loaded.transformation.key).atexit = False
    if buffers:
        # Runs wherever the last reference dies, so it only leaves notes; see Device._drain.
        weakref.finalize(loaded, device.unpinned.extend, buffers).atexit = False
    return loaded


def _targets(here: str, there: str) -> str:
    """What makes both fit: targets and devices that exist under these names."""
    known = machine_names()
    target = here if here in known else "FILE.yaml, the description of this machine"
    device = f", or run it on {there!r}" if there in known else ""
    return f"compile it with --target={target}{device}"

"""Loading: a program of a binary becomes an agent of a device, its constants get addresses."""

from __future__ import annotations

from stitch.errors import IncompatibleError
from stitch.machine import Machine, footprint, machine_names
from stitch.ops import program_work
from stitch.program import Program
from stitch.runtime.checks import check_program
from stitch.runtime.loaded import Home, LoadedProgram
from stitch.runtime.values import BufferRecord, Records
from stitch.ttb import Binary


def load_program(
    device: Home, machine: Machine, records: Records, binary: Binary, which: int | str,
    where: str | None = None,
) -> LoadedProgram:  # fmt: skip
    """See `Device.load`; `where` is the binary's file. Nothing stays reserved where it fails."""
    missing = tuple(machine.shape.shortcomings(binary.machine))
    if missing:
        raise IncompatibleError(
            f"a binary compiled for {binary.machine.name!r} does not run on "
            f"{machine.name!r}: " + "; ".join(missing),
            where=where,
            remedy=_targets(machine.name, binary.machine.name),
        )
    program = binary.program(which)
    check_program(program, machine.shape)
    kept: list[BufferRecord] = []
    seconds = simulated_seconds(program, machine)
    loaded = LoadedProgram(device, program, lambda: binary.verify_segments(program), kept, seconds)
    # From now on all that is kept is given back when nobody refers to it, whatever happens.
    device.await_unloading(loaded)
    try:
        for constant in program.constants:
            value = program.values[constant.value]
            desc = value.desc
            size = footprint(desc, machine.shape).size_per_bank
            name = f"constant {value.name!r} of {program.name!r}"
            records.keep(records.reserve(desc, size, desc.layout.address, name), kept)
    except Exception:
        records.let_go(kept)
        raise
    return loaded


def simulated_seconds(program: Program, machine: Machine) -> float:
    """What one run of a program takes on a machine; 0 where that describes no compute rates."""
    if machine.compute is None:
        return 0.0
    work = program_work(program)
    return machine.compute.seconds(work.products, work.other_flops, work.nbytes)


def _targets(here: str, there: str) -> str:
    """What makes both fit: targets and devices that exist under these names."""
    known = machine_names()
    target = here if here in known else "FILE.yaml, the description of this machine"
    device = f", or run it on {there!r}" if there in known else ""
    return f"compile it with --target={target}{device}"

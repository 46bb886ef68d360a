"""What one copy of a tensor costs: bytes by its descriptors, time by the machine's curves."""

from __future__ import annotations

from stitch.machine import Machine, footprint
from stitch.program import TensorDesc


def copy_cost(machine: Machine, source: TensorDesc, target: TensorDesc) -> tuple[int, float]:
    """Bytes written (`Footprint.own_nbytes`) and simulated seconds of one copy."""
    written, read = footprint(target, machine.shape), footprint(source, machine.shape)
    nbytes = written.own_nbytes
    page = max(1, min(written.page_nbytes, read.page_nbytes))
    seconds = machine.seconds(source.layout.space, target.layout.space, nbytes, page)
    return nbytes, seconds

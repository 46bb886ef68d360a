"""Two machines: one described in YAML, and one derived from it by a function."""

from dataclasses import replace
from pathlib import Path

from stitch.machine import Machine, load_machine

DESCRIPTION = Path(__file__).parent / "lab4x4.yaml"


def wide() -> Machine:
    """Return the machine with twice the L1."""
    machine = load_machine(DESCRIPTION)
    l1 = machine.shape.l1
    assert l1 is not None
    shape = replace(machine.shape, name="lab4x4_wide", l1=replace(l1, limit=2 * l1.limit))
    return replace(machine, shape=shape)

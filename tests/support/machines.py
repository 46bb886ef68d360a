"""Machines with less than they have, to ask what a plan would then have to do."""

from __future__ import annotations

import dataclasses

from stitch.machine import Machine
from stitch.program import Space


def without_path(machine: Machine, source: Space, target: Space) -> Machine:
    """The same machine with one path cut."""
    left = tuple(p for p in machine.paths if not (p[0] is source and p[1] is target))
    return dataclasses.replace(machine, paths=left)

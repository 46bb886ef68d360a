"""What programs and their operations take on a machine: the one estimate of it.

What devices report, plans are advised by and the search for trainings weighs, comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stitch.machine.machine import Machine
from stitch.ops import OperationWork, summed_over_operations
from stitch.program import OperationList, Space

_SECONDS = "seconds"


def operation_seconds(work: OperationWork, machine: Machine) -> float:
    """What one run of an operation takes; 0 where the machine describes no compute rates."""
    compute = machine.compute
    if compute is None:
        return 0.0
    rows, columns = machine.shape.core_grid
    return compute.seconds(work, rows * columns, _link_bytes_per_cycle(machine))


def program_seconds(
    operations: OperationList, machine: Machine, space: Space | None = None
) -> float:
    """What one run takes: its launch, and its operations one after the other.

    Bodies must be those of scans alone. Values without a layout lie in `space`. It is 0 where the
    machine describes no compute rates.
    """
    if machine.compute is None:
        return 0.0

    def figures(work: OperationWork) -> Mapping[str, float]:
        return {_SECONDS: operation_seconds(work, machine)}

    found = summed_over_operations(operations, figures, space)
    return machine.compute.launch_seconds + found.get(_SECONDS, 0.0)


def _link_bytes_per_cycle(machine: Machine) -> float:
    """What a core carries over its own link at best."""
    noc = machine.noc
    if noc is None:
        return math.inf
    return noc.curve[-1][1] if noc.link is None else noc.link

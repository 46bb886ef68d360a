"""Machines: described devices, the shape of their memory, and what copies cost on them.

Comes in: YAML descriptions. Goes out: `Machine`. Must not know tensors' values, plans or devices.
"""

from typing import TYPE_CHECKING

from stitch.machine.description import load_machine, machine_names, parse_machine
from stitch.machine.machine import (
    LOOP_EXECUTORS,
    Compute,
    LoopRates,
    Machine,
    Path,
)
from stitch.machine.shape import (
    Footprint,
    MachineShape,
    SpaceShape,
    footprint,
    page_shape,
    round_up,
    shard_counts,
    shard_layout,
)
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.machine.machine_form import MACHINE_KEYS
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"machine_form": "MACHINE_KEYS"})

__all__ = [
    "LOOP_EXECUTORS", "MACHINE_KEYS", "Compute", "Footprint", "LoopRates", "Machine",
    "MachineShape", "Path", "SpaceShape", "footprint", "load_machine", "machine_names",
    "page_shape", "parse_machine", "round_up", "shard_counts", "shard_layout",
]  # fmt: skip

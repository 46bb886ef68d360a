"""Machine descriptions: memory shapes, and a model of what copies and programs cost."""

from typing import TYPE_CHECKING

from stitch.machine.copies import copy_counts
from stitch.machine.description import parse_machine
from stitch.machine.machine import (
    LOOP_EXECUTORS,
    Compute,
    CopyCounts,
    LoopRates,
    Machine,
    Path,
    estimated_seconds,
    operation_seconds,
    program_seconds,
)
from stitch.machine.named_machines import (
    known_machines,
    load_machine,
    varied_machine,
    with_policies,
)
from stitch.machine.network import Noc, Route, Routers
from stitch.machine.shape import (
    MOST_GRANULES,
    POLICIES,
    Footprint,
    MachineShape,
    Policy,
    SpaceShape,
    footprint,
    page_shape,
    room_per_bank,
    round_up,
    shard_counts,
    shard_layout,
)
from stitch.machine.shipped import machine_names
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.machine.machine_yaml import MACHINE_KEYS, machine_json_schema
    from stitch.machine.systems import (
        derived_machine,
        system_chips,
        system_tables,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "machine_yaml": "MACHINE_KEYS machine_json_schema",
            "systems": "derived_machine system_chips system_tables",
        },
    )

__all__ = [
    "LOOP_EXECUTORS", "MACHINE_KEYS", "MOST_GRANULES", "POLICIES", "Compute", "CopyCounts",
    "Footprint", "LoopRates", "Machine", "MachineShape", "Noc", "Path", "Policy", "Route",
    "Routers", "SpaceShape", "copy_counts", "derived_machine", "estimated_seconds",
    "footprint", "known_machines", "with_policies",
    "load_machine", "machine_json_schema", "machine_names", "operation_seconds",
    "page_shape", "parse_machine", "program_seconds", "room_per_bank", "round_up", "shard_counts",
    "shard_layout", "system_chips", "system_tables", "varied_machine",
]  # fmt: skip

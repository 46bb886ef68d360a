"""Linking: may programs be joined, and several programs joined into one before they run.

Comes in: programs, the wires between their slots, a machine's memory shape. Goes out: reports,
errors that name both sides, or one program. Serves compiler and runtime alike; must not know
either, nor files, devices or plans.
"""

from stitch.link.alias import AliasProofs
from stitch.link.capacity import Demand, address_problems, check_capacity, demands
from stitch.link.check import LinkReport, check_link, input_name, output_name, wire
from stitch.link.interval_packing import pack_intervals
from stitch.link.intervals import Interval, Packing, max_load
from stitch.link.scratch import (
    SCRATCH_ALIGNMENT,
    ScratchPlan,
    choose_scratch,
    pack_scratch,
    place_intermediates,
)
from stitch.link.static import link_programs
from stitch.link.wires import Port, SharedInput, Wire, chain_wires, check_wire

__all__ = [
    "SCRATCH_ALIGNMENT", "AliasProofs", "Demand", "Interval", "LinkReport", "Packing", "Port",
    "ScratchPlan", "SharedInput", "Wire", "address_problems", "chain_wires", "check_capacity",
    "check_link", "check_wire", "choose_scratch", "demands", "input_name", "link_programs",
    "max_load", "output_name", "pack_intervals", "pack_scratch", "place_intermediates", "wire",
]  # fmt: skip

"""Check links between programs, and link several programs into one (loaded on first use)."""

from typing import TYPE_CHECKING

from stitch.linker.capacity import (
    AliasProofs,
    Demand,
    address_problems,
    check_capacity,
    demands,
    use_problems,
)
from stitch.linker.expansion import (
    drop_unused_values,
    expanded,
    expansion_nbytes,
    order_by_use,
    remove_dead_code,
    with_used_bodies,
)
from stitch.linker.link_check import LinkReport, check_link, handed_on, wire
from stitch.linker.scratch import (
    SCRATCH_ALIGNMENT,
    ScratchPacker,
    ScratchPlan,
    choose_scratch,
    pack_scratch,
    place_intermediates,
    program_of_body,
    repeated_outputs,
)
from stitch.linker.wires import Port, Wire, chain_wires
from stitch.linker.wiring import (
    ProgramNames,
    SlotWord,
    Wiring,
    chain_in_words,
    likely_words,
    slot_index,
    wires_in_words,
)
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.linker.static import link_programs
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"static": "link_programs"})

__all__ = [
    "SCRATCH_ALIGNMENT", "AliasProofs", "Demand", "LinkReport", "Port", "ProgramNames",
    "ScratchPacker", "ScratchPlan", "SlotWord", "Wire", "Wiring", "address_problems",
    "chain_in_words", "chain_wires", "check_capacity", "check_link", "choose_scratch", "demands",
    "drop_unused_values", "expanded", "handed_on", "expansion_nbytes", "likely_words",
    "link_programs", "order_by_use", "pack_scratch", "place_intermediates", "program_of_body",
    "remove_dead_code", "repeated_outputs", "slot_index", "use_problems", "wire",
    "wires_in_words", "with_used_bodies",
]  # fmt: skip

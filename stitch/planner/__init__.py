"""Plan a sequence of tasks: residency, addresses and moves; pure functions on immutable data.

The checker and the advice are imported on first use.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.planner.eviction import EvictionCandidate
from stitch.planner.inter_op_threads import (
    LEAST,
    SINGLE_THREAD,
    ArenaSlot,
    Fork,
    ThreadAssignment,
    assign_threads,
    touched_by,
)
from stitch.planner.plan import (
    Allocate,
    Branches,
    Buffer,
    Certificate,
    Copy,
    CostCertificate,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Region,
    Relocate,
    Resident,
    Step,
    Transfer,
    after_steps,
    copy_cost,
    memory_rise,
    predicted_cost,
)
from stitch.planner.plan_state import RULES, needed_regions, ranges_of
from stitch.planner.planner import plan
from stitch.planner.rebinding import is_rebindable, rebind_plan

if TYPE_CHECKING:
    from stitch.planner.advice import (
        Cost,
        Slot,
        SlotChange,
        possible_changes,
    )
    from stitch.planner.checker import WARNINGS, check_certificate, check_plan
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "advice": "Cost Slot SlotChange possible_changes",
            "checker": "WARNINGS check_certificate check_plan",
        },
    )

__all__ = [
    "LEAST", "RULES", "SINGLE_THREAD", "EvictionCandidate", "WARNINGS", "Allocate", "ArenaSlot",
    "Branches", "Buffer", "Certificate", "Copy", "Cost", "CostCertificate", "Execute", "Fork",
    "Free", "Instance", "Plan", "PlanRequest", "Region", "Relocate", "Resident", "Slot",
    "SlotChange", "Step", "ThreadAssignment", "Transfer", "after_steps", "assign_threads",
    "check_certificate", "check_plan", "copy_cost", "is_rebindable", "memory_rise",
    "needed_regions", "plan", "possible_changes", "predicted_cost", "ranges_of", "rebind_plan",
    "touched_by",
]  # fmt: skip

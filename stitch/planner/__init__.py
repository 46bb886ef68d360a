"""Plan a sequence of tasks: residency, addresses and moves; pure functions on frozen data.

The checker and the advice are imported on first use.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.planner.inter_op_threads import (
    LEAST,
    SINGLE_THREAD,
    ArenaSlot,
    Fork,
    ThreadAssignment,
    assign_threads,
    touched_by,
)
from stitch.planner.placing import may_be_placed, placed
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
    foreseen_cost,
)
from stitch.planner.plan_state import needed_regions, ranges_of
from stitch.planner.planner import plan

if TYPE_CHECKING:
    from stitch.planner.advice import (
        MOST_CHANGES,
        MOST_TRIALS,
        Cost,
        Slot,
        SlotChange,
        best_changes,
        possible_changes,
    )
    from stitch.planner.checker import WARNINGS, check_certificate, check_plan
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "advice": "MOST_CHANGES MOST_TRIALS Cost Slot SlotChange best_changes possible_changes",
            "checker": "WARNINGS check_certificate check_plan",
        },
    )

__all__ = [
    "LEAST", "MOST_CHANGES", "MOST_TRIALS", "SINGLE_THREAD", "WARNINGS", "Allocate", "Branches",
    "Buffer",
    "Certificate", "Copy", "Cost", "CostCertificate", "Execute", "Fork", "Free", "Instance",
    "ThreadAssignment", "ArenaSlot", "Plan", "PlanRequest", "Region", "Relocate", "Resident",
    "Slot", "SlotChange", "Step", "Transfer", "after_steps", "best_changes", "check_certificate",
    "check_plan", "copy_cost", "foreseen_cost", "assign_threads", "may_be_placed", "needed_regions",
    "placed", "plan", "possible_changes", "ranges_of", "touched_by",
]  # fmt: skip

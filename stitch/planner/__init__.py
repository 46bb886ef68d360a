"""Planning: residency, addresses and moves for a stretch of tasks; pure functions on frozen data.

Comes in: a `PlanRequest` (machine, tasks, blocks, values). Goes out: a `Plan` whose every copy
carries its bytes, simulated time, reason and, where bytes leave L1, a certificate. Must not know
devices, bytes, kernels or files.
"""

from stitch.planner.check import WARNINGS, check_plan
from stitch.planner.outcome import outcome
from stitch.planner.plan import (
    Allocate,
    Block,
    Certificate,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Resident,
    Step,
    Transfer,
)
from stitch.planner.planner import plan
from stitch.planner.room import copy_cost

__all__ = [
    "WARNINGS", "Allocate", "Block", "Certificate", "Copy", "Execute", "Free", "Instance", "Plan",
    "PlanRequest", "Relocate", "Resident", "Step", "Transfer", "check_plan", "copy_cost",
    "outcome", "plan",
]  # fmt: skip

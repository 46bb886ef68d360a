"""Check that a plan does what it states, by following every byte symbolically.

The checker shares no code with the planner except the definition of plans (`stitch.planner.plan`),
so one mistake cannot affect both.
"""

from stitch.planner.checker.plan_check import WARNINGS, check_plan
from stitch.planner.checker.proof import check_certificate

__all__ = ["WARNINGS", "check_certificate", "check_plan"]

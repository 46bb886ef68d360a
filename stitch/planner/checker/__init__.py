"""The checker: whether a plan does what it says, found by following every byte symbolically.

Shares nothing with what makes plans but the plan's own words (`stitch.planner.plan` and
`certificate`), so that one mistake cannot be made twice.
"""

from stitch.planner.checker.plan_check import WARNINGS, check_plan
from stitch.planner.checker.proof import check_certificate

__all__ = ["WARNINGS", "check_certificate", "check_plan"]

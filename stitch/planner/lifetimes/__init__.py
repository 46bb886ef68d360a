"""Lifetimes: where the tensors of a whole plan had best lie, now that it is known how long each is.

Comes in: a plan that moves some. Goes out: addresses at which fewer have to move, for the plan to
be made once more. Must not know: values, who leaves, steps of the plan that is made.
"""

from stitch.planner.lifetimes.standing import Standing, standing_for

__all__ = ["Standing", "standing_for"]

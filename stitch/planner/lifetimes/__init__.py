"""Lifetimes: where the tensors of a whole plan had best lie, now that it is known how long each
is.
"""

from stitch.planner.lifetimes.standing import StaticLayout, standing_for

__all__ = ["StaticLayout", "standing_for"]

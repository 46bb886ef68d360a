"""Residency: which tensors are in L1 when, over a chain of tasks that is known.

Comes in: a `PlanRequest`. Goes out: `StayChoice`: who gives way between which uses, what that
costs, and a bound below which no choice can be. `stays` reads the request, `cover` chooses
greedily, `bound` prices, `sweep` improves and proves. Pure functions that count what they try,
never time. Must not know: addresses, steps.
"""

from stitch.planner.residency.choice import StayChoice, choose
from stitch.planner.residency.stays import Holder, Stay, StayChain, chain_of

__all__ = ["StayChain", "StayChoice", "Holder", "Stay", "chain_of", "choose"]

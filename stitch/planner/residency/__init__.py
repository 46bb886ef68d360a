"""Residency: which tensors are in L1 when, over a chain of tasks that is known.

Comes in: a `PlanRequest`. Goes out: `Choice`: who gives way between which uses, what that costs,
and a bound below which no choice can be. `chain` reads the request, `cover` chooses, `exact` is for
few contested stays, `bound` proves. Pure functions that count what they try, never time. Must not
know: addresses, steps.
"""

from stitch.planner.residency.chain import Chain, Holder, Stay, chain_of
from stitch.planner.residency.choice import Choice, choose

__all__ = ["Chain", "Choice", "Holder", "Stay", "chain_of", "choose"]

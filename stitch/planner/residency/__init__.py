"""PlanState: which tensors are in L1 when, over a chain of tasks that is known.

`stays` reads the request, `cover` chooses greedily, `bound` prices, `sweep` improves and proves.
Pure functions that count what they try, never time.
"""

from stitch.planner.residency.choice import StayChoice, choose
from stitch.planner.residency.stays import Holder, Stay, StayChain, chain_of

__all__ = ["StayChain", "StayChoice", "Holder", "Stay", "chain_of", "choose"]

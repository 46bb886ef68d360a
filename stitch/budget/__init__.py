"""The budget of host memory: how many bytes this process takes, and how many it may.

Comes in: requests, each before anything of it is allocated. Goes out: claims, or an
`OutOfMemoryError` that says what else is there. Must not know: spaces, devices, files.
"""

from stitch.budget.budget import (
    BUDGET,
    LARGE_NBYTES,
    SMALL_NBYTES,
    Budget,
    Claim,
    allowed_nbytes,
    allowing,
    claim,
    claim_for,
    claimed_array,
    copied,
    keep,
    parse_nbytes,
)

__all__ = [
    "BUDGET", "LARGE_NBYTES", "SMALL_NBYTES", "Budget", "Claim", "allowed_nbytes", "allowing",
    "claim", "claim_for", "claimed_array", "copied", "keep", "parse_nbytes",
]  # fmt: skip

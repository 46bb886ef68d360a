"""The planner's own eviction rules pass the suite of all eviction rules."""

from __future__ import annotations

from typing import ClassVar

from stitch.testing import ResidencySuite


class TestOwnRules(ResidencySuite):
    residency: ClassVar[None] = None
    most_evictions: ClassVar[float] = 1.0

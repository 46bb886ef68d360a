"""The allocator and the eviction rule pass Stitch's suites."""

from typing import ClassVar

from stitch.testing import AllocatorSuite, ResidencySuite


class TestWorstFit(AllocatorSuite):
    allocator: ClassVar[str] = "worst_fit"


class TestLeastRecent(ResidencySuite):
    residency: ClassVar[str] = "least_recent"

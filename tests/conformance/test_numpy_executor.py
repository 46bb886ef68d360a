"""The NumPy executor passes the suite of all executors, and is exact."""

from __future__ import annotations

from typing import ClassVar

from stitch.testing import ExecutorSuite, PlacementSuite
from tests.support.grids import CAMPAIGN


class TestNumpyExecutor(ExecutorSuite):
    executor: ClassVar[str] = "numpy"
    left_out: ClassVar[int] = 8
    same_bits_with_hooks: ClassVar[bool] = True


@CAMPAIGN
class TestNumpyExecutorWithAllPlacements(PlacementSuite):
    executor: ClassVar[str] = "numpy"
    left_out: ClassVar[int] = 0

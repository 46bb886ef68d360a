"""The ONNX Runtime executor passes the suite of all executors."""

from __future__ import annotations

from typing import ClassVar

from stitch.testing import ExecutorSuite, PlacementSuite
from tests.support.grids import CAMPAIGN


class TestOnnxRuntimeExecutor(ExecutorSuite):
    executor: ClassVar[str] = "onnxruntime"
    relative_tolerance: ClassVar[float] = 1e-6
    left_out: ClassVar[int] = 8


@CAMPAIGN
class TestOnnxRuntimeExecutorWithAllPlacements(PlacementSuite):
    executor: ClassVar[str] = "onnxruntime"
    relative_tolerance: ClassVar[float] = 1e-6
    left_out: ClassVar[int] = 0

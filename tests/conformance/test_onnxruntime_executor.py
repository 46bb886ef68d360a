"""The ONNX Runtime executor passes the suite of all executors."""

from __future__ import annotations

from typing import ClassVar

from tests.support.executors.suite import ExecutorSuite


class TestOnnxRuntimeExecutor(ExecutorSuite):
    executor: ClassVar[str] = "onnxruntime"
    relative_tolerance: ClassVar[float] = 1e-6

"""The ONNX Runtime executor passes the suite of all executors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
from executor_suite import ExecutorSuite  # noqa: E402


class TestOnnxRuntimeExecutor(ExecutorSuite):
    executor: ClassVar[str] = "onnxruntime"
    relative_tolerance: ClassVar[float] = 1e-6

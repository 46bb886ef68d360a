"""The executor passes Stitch's suite, with NumPy's very bits."""

from typing import ClassVar

from stitch.testing import ExecutorSuite


class TestTimedExecutor(ExecutorSuite):
    executor: ClassVar[str] = "timed"
    left_out: ClassVar[int] = 6
    same_bits_with_hooks: ClassVar[bool] = True

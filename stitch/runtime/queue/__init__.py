"""The queue: the stretch of tasks that waits to be run, and what becomes of it after a failure.

Comes in: tasks on values. Goes out: windows. Must not know handles.
"""

from stitch.runtime.queue.constant_cache import ConstantCache
from stitch.runtime.queue.exposure import expose, forget_stale_copies
from stitch.runtime.queue.failure import fail, run_one_by_one, run_the_rest
from stitch.runtime.queue.window import Window

__all__ = [
    "ConstantCache", "Window", "expose", "fail", "forget_stale_copies", "run_one_by_one",
    "run_the_rest",
]  # fmt: skip

"""The task queue: the pending batch, its execution, and recovery after a failure."""

from stitch.runtime.queue.reclaimer import (
    ConstantCache,
    Reclaimer,
    comparison_of,
    invalidate_stale_copies,
)
from stitch.runtime.queue.task_queue import TaskQueue

__all__ = [
    "ConstantCache",
    "Reclaimer",
    "TaskQueue",
    "comparison_of",
    "invalidate_stale_copies",
]

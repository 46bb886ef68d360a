"""The queue: the stretch of tasks that waits to be run, and what becomes of it after a failure.

Comes in: tasks on values, notes of what has died. Goes out: windows, free memory.
Must not know handles.
"""

from stitch.runtime.queue.constant_cache import ConstantCache
from stitch.runtime.queue.deaths import Deaths
from stitch.runtime.queue.exposure import comparison_of, expose, forget_stale_copies
from stitch.runtime.queue.linked import Linked
from stitch.runtime.queue.task_queue import Done, TaskQueue

__all__ = [
    "ConstantCache",
    "Deaths",
    "Done",
    "Linked",
    "TaskQueue",
    "comparison_of",
    "expose",
    "forget_stale_copies",
]

"""Assign threads to small work: forks of a few microseconds, without large programs."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.planner import ThreadAssignment, assign_threads, inter_op_threads
from stitch.runtime.recording import thread_work


def shorten(patch: pytest.MonkeyPatch) -> list[ThreadAssignment]:
    """Every stretch is long enough from now on; gives the lanes of plans that have several."""
    patch.setattr(inter_op_threads, "LEAST", 1e-9)
    patch.setattr(inter_op_threads, "HANDING", 0.0)
    patch.setattr(inter_op_threads, "_HEAVY", 1e-9)
    patch.setattr(thread_work, "least_copy_microseconds", lambda nbytes: 1e-6 * (1 + nbytes))
    found: list[ThreadAssignment] = []

    def noting(*arguments: Any) -> ThreadAssignment:
        lanes = assign_threads(*arguments)
        if lanes.forks:
            found.append(lanes)
        return lanes

    patch.setattr(thread_work, "assign_threads", noting)
    return found

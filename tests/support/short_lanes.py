"""Lanes for small work: forks of a few microseconds, so that tests need no large programs."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.planner import Lanes, inter_op_threads, lanes_of
from stitch.runtime.recording import lane_work


def shorten(patch: pytest.MonkeyPatch) -> list[Lanes]:
    """Every stretch is long enough from now on; gives the lanes of plans that have several."""
    patch.setattr(inter_op_threads, "LEAST", 1e-9)
    patch.setattr(inter_op_threads, "HANDING", 0.0)
    patch.setattr(inter_op_threads, "_HEAVY", 1e-9)
    patch.setattr(lane_work, "least_copy_microseconds", lambda nbytes: 1e-6 * (1 + nbytes))
    found: list[Lanes] = []

    def noting(*arguments: Any) -> Lanes:
        lanes = lanes_of(*arguments)
        if lanes.forks:
            found.append(lanes)
        return lanes

    patch.setattr(lane_work, "lanes_of", noting)
    return found

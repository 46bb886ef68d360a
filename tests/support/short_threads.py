"""Assign threads to small work: forks of a few microseconds, without large programs."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.planner import Fork, Plan, inter_op_threads
from stitch.runtime.executors.prices import operation_prices


def shorten(patch: pytest.MonkeyPatch) -> list[tuple[Fork, ...]]:
    """Every section is long enough from now on; gives the forks of plans that have any."""
    patch.setattr(inter_op_threads, "LEAST", 1e-9)
    patch.setattr(inter_op_threads, "HANDING", 0.0)
    patch.setattr(inter_op_threads, "_HEAVY", 1e-9)
    patch.setattr(operation_prices, "COPIED", 1e6)
    found: list[tuple[Fork, ...]] = []
    assign = inter_op_threads.assign_arenas

    def noting(plan: Plan, forks: tuple[Fork, ...]) -> Any:
        found.append(forks)
        return assign(plan, forks)

    patch.setattr(inter_op_threads, "assign_arenas", noting)
    return found

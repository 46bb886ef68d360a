"""CP-SAT (OR-tools, the `bench` extra): the same packing as one no-overlap constraint."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model

from stitch.packing import Interval


def peak_by_cp_sat(intervals: Sequence[Interval], bound: int, seconds: float) -> int | None:
    """The peak that one worker finds within seconds; None where it finds none."""
    most = sum(interval.nbytes for interval in intervals)
    model = cp_model.CpModel()
    peak = model.new_int_var(bound, most, "peak")
    times, places = [], []
    for k, interval in enumerate(intervals):
        offset = model.new_int_var(0, most - interval.nbytes, f"offset {k}")
        model.add(offset + interval.nbytes <= peak)
        life = interval.last + 1 - interval.first
        times.append(model.new_fixed_size_interval_var(interval.first, life, f"life {k}"))
        places.append(model.new_fixed_size_interval_var(offset, interval.nbytes, f"place {k}"))
    model.add_no_overlap_2d(times, places)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return int(solver.value(peak))

"""Offline packing: the peak of our search beside the greatest load, and CP-SAT's if asked for.

Each FILE (CSV: id,lower,upper,size; lifetimes half open) is packed within a number of placements.
Without files MiniMalloc's challenging cases A to E are taken. `--seconds` picks the placements from
a table that was measured on the reference machine and leaves it a third of the time; the time
printed is this machine's. A ratio of 1.0 cannot be improved; `bound` is proved for every packing.
`--check` exits 1 where a peak is above 1.10 x the greatest load (1.05 x from ten seconds on).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command_line import bench_parser, exit_code_for, from_one, refused

from stitch.cli.buffers_csv import read_buffers
from stitch.errors import StitchError
from stitch.packing import Interval, max_load, pack_intervals

CASES = Path(__file__).parent / "minimalloc"
#: Placements within so many seconds of CPython 3.11 on the reference machine, an AMD EPYC (Zen, two
#: cores of a shared host): 2.3 to 4.5 us each, more for more buffers.
PLACEMENTS = {1: 150_000, 10: 1_500_000}
GOALS = {1: 1.10, 10: 1.05}


@dataclass(frozen=True, slots=True)
class Row:
    """One file: bytes, the peak over the greatest load, and what the search took."""

    file: str
    buffers: int
    peak: int
    max_load: int
    ratio: float
    lower_bound: int
    ended: bool
    placements: int
    seconds: float
    cp_sat_peak: int | None
    cp_sat_ratio: float | None


def clashes(intervals: Sequence[Interval], offsets: Sequence[int]) -> bool:
    """Whether two intervals that are alive together share a byte."""
    rows = sorted(zip(intervals, offsets, strict=True), key=lambda row: row[0].first)
    for k, (a, low) in enumerate(rows):
        for b, other in rows[k + 1 :]:
            if b.first > a.last:
                break
            if low < other + b.nbytes and other < low + a.nbytes:
                return True
    return False


def measure(path: Path, placements: int, cp_sat_seconds: float) -> Row:
    """Packs one file; raises `FormatError` where it is none."""
    intervals = read_buffers(path).intervals
    load = max_load(intervals)
    started = time.perf_counter()
    packing = pack_intervals(intervals, placements=placements)
    seconds = time.perf_counter() - started
    assert not clashes(intervals, packing.offsets), f"{path}: two buffers share bytes"
    theirs = None
    if cp_sat_seconds:
        # Only whoever asks for it needs the extra.
        from packing_ways.cp_sat import peak_by_cp_sat

        theirs = peak_by_cp_sat(intervals, load, cp_sat_seconds)
    return Row(
        str(path), len(intervals), packing.peak_nbytes, load, ratio(packing.peak_nbytes, load),
        packing.bound_nbytes, packing.peak_nbytes == packing.bound_nbytes, packing.placements,
        seconds, theirs, None if theirs is None else ratio(theirs, load),
    )  # fmt: skip


def ratio(peak: int, load: int) -> float:
    return peak / load if load else 1.0


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--placements", type=from_one, metavar="N")
    budget.add_argument("--seconds", type=int, choices=sorted(PLACEMENTS), default=1)
    parser.add_argument("--cp-sat", type=from_one, default=0, metavar="S", help="seconds of CP-SAT")
    options = parser.parse_args(arguments)
    placements = options.placements or PLACEMENTS[options.seconds]
    goal = min((GOALS[s] for s, n in PLACEMENTS.items() if n <= placements), default=GOALS[1])
    files = options.files or sorted(CASES.glob("*.csv"))
    try:
        rows = [measure(path, placements, options.cp_sat) for path in files]
    except StitchError as error:
        return refused("packing.py", error)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("file      buffers       peak   max load  ratio  bound  placements  seconds  CP-SAT")
        for row in rows:
            proved = f"{ratio(row.lower_bound, row.max_load):.3f}"
            theirs = "" if row.cp_sat_ratio is None else f"{row.cp_sat_ratio:.3f}"
            print(
                f"{Path(row.file).stem:<9} {row.buffers:>7} {row.peak:>10} {row.max_load:>10} "
                f"{row.ratio:6.3f} {proved:>6} {row.placements:>11} {row.seconds:8.2f} {theirs:>7}"
            )
    missed = [f"{row.file}: {row.ratio:.3f} of {goal}" for row in rows if row.ratio > goal]
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())

"""Copies timed on silicon beside what the cost model says of them, as errors.

FILE.csv has a row for each copy, with the columns of tests/data/tenstorrent/noc_traces (which is
taken without a FILE): name, transfers, bytes, page_bytes, reading_cores, busiest_reader_bytes,
busiest_reader_transfers, source_nodes, busiest_source_bytes, cycles (of the machine's NoC). A name
such as 2x4_BLOCK_TO_4x4_HEIGHT or DRAM_TO_8x8_BLOCK tells the shards of both ends (rows x columns
of cores): from these follow the loads of links and the networks in use, which are not in the file.
Of another name the cores are taken for a grid as square as can be (`grids`: "assumed").

The kernels that were traced record each read, and issue one every 125 cycles: `--interval` cycles.
That is added to what is simulated here, and nowhere else. `error` is simulated ÷ measured - 1.
`--leave_one_out` fits the figures of the model that are fitted (`noc.dram_queueing` from DRAM,
`noc.turns` inside L1) to all copies but one, for each copy. `--check` exits 1 where, inside L1 or
from DRAM, the median of errors is above 15 % or the error of a tenth of the copies above 40 %.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import timed_on_silicon
from command_line import bench_parser, exit_code_for, from_one, refused
from timed_on_silicon import missed_goals, summary_line

from stitch.errors import StitchError, UsageError
from stitch.machine import CopyCounts, Machine, Route, copy_counts, load_machine
from stitch.program import DataType, Layout, MemoryLayout, ShardSpec, Space, TensorDesc

TRACES = Path(__file__).parents[2] / "tests/data/tenstorrent/noc_traces/noc_traces.csv"
#: Cycles from one read to the next in a kernel that records them (tt-npe's traces of an n150).
RECORDED_INTERVAL = 125
GOALS = (0.15, 0.40)
COLUMNS = ("name", "transfers", "bytes", "page_bytes", "reading_cores", "busiest_reader_bytes",
           "busiest_reader_transfers", "source_nodes", "busiest_source_bytes",
           "cycles")  # fmt: skip
#: More than any copy has, or takes.
MOST = 1 << 40
_GRID = r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})_(BLOCK|HEIGHT|WIDTH)"
_NAME = re.compile(f"(?:{_GRID}|DRAM)_TO_{_GRID}")
_TILE = 32


@dataclass(frozen=True, slots=True)
class Timed:
    """One copy of a file, as it was measured."""

    name: str
    transfers: int
    nbytes: int
    page_nbytes: int
    reading_cores: int
    busiest_reader_nbytes: int
    busiest_reader_transfers: int
    source_nodes: int
    busiest_source_nbytes: int
    cycles: int


@dataclass(frozen=True, slots=True)
class Row:
    """One copy: nanoseconds, and simulated ÷ measured - 1."""

    name: str
    measured_ns: float
    simulated_ns: float
    error: float
    source: str
    grids: str


def read_timed(path: Path) -> list[Timed]:
    """The copies of a file; raises `UsageError` where it lacks a column or a number."""
    return timed_on_silicon.read_timed(path, "copies", COLUMNS, _timed)


def _timed(line: dict[str, str], where: str) -> Timed:
    return Timed(line["name"], *(_whole(line[name], where, name) for name in COLUMNS[1:]))


def _whole(text: str | None, where: str, name: str) -> int:
    try:
        number = int(text or "")
    except ValueError:
        number = 0
    if not 1 <= number <= MOST:
        raise UsageError(
            f"{where}: {name} is no whole number from 1 to {MOST}", got=repr(text)[:80],
            remedy="correct the line, or leave it out",
        )  # fmt: skip
    return number


def ends_of(copy: Timed, machine: Machine) -> tuple[TensorDesc, TensorDesc, str]:
    """The descriptors of both ends, of a matrix of so many tiles or, where shards of such grids
    are no whole tiles of it, of a larger one; and whether the grids are named or assumed."""
    match = _NAME.fullmatch(copy.name)
    if match:
        words, how = match.groups(), "named"
    else:
        from_dram, how = copy.name.startswith("DRAM"), "assumed"
        source = (None, None, None) if from_dram else _near_square(copy.source_nodes, machine)
        words = (*source, *_near_square(copy.reading_cores, machine))
    grids = [(int(w[0]), int(w[1]), w[2]) for w in (words[:3], words[3:]) if w[0] is not None]
    cuts = [_cuts(*grid) for grid in grids]
    down, across = (math.lcm(*(cut[i] for cut in cuts)) for i in (0, 1))
    kinds = [t for t in DataType if t.nbytes(_TILE * _TILE) == copy.page_nbytes]
    # As square as it can be, higher than wide.
    wide = [across * w for w in _divisors(copy.transfers // (across * down))
            if copy.transfers % (across * down) == 0]  # fmt: skip
    columns = max((w for w in wide if w * w <= copy.transfers), default=(wide or [2 * across])[0])
    rows = copy.transfers // columns if wide else 2 * down
    shape = (rows * _TILE, columns * _TILE)
    data_type = kinds[0] if kinds else DataType.BFLOAT16
    layouts = [_shards(data_type, shape, *grid) for grid in grids]
    if len(layouts) == 1:
        layouts.insert(0, Layout(data_type, Space.DRAM, (_TILE, _TILE)))
    return TensorDesc(shape, layouts[0]), TensorDesc(shape, layouts[1]), how


def _divisors(number: int) -> list[int]:
    """All of them, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _near_square(cores: int, machine: Machine) -> tuple[str, str, str]:
    """So many cores, in rows of which there are no more than columns; those of a number that no
    such grid of the machine has fill its rows, one by one."""
    columns = machine.shape.core_grid[1]
    down = max(n for n in range(1, math.isqrt(cores) + 1) if cores % n == 0)
    across = cores // down if cores // down <= columns else columns
    return str(-(-cores // across)), str(across), "HEIGHT"


def _cuts(rows: int, columns: int, kind: str) -> tuple[int, int]:
    """Into how many shards a grid cuts a matrix, down and across."""
    return {"BLOCK": (rows, columns), "HEIGHT": (rows * columns, 1)}.get(kind, (1, rows * columns))


def _shards(
    data_type: DataType, shape: tuple[int, int], rows: int, columns: int, kind: str
) -> Layout:
    down, across = _cuts(rows, columns, kind)
    spec = ShardSpec((rows, columns), (shape[0] // down, shape[1] // across))
    memory = MemoryLayout[f"{kind}_SHARDED"]
    return Layout(data_type, Space.L1, (_TILE, _TILE), memory, spec)


def counts_of(copy: Timed, machine: Machine) -> tuple[CopyCounts, str]:
    """What was measured of a copy, what follows from its grids, and where those come from."""
    *ends, how = ends_of(copy, machine)
    known = copy_counts(ends[0], ends[1], machine)
    networks = known.networks
    if known.route is not Route.CORE and known.source is Space.L1:
        networks = 2 if copy.busiest_reader_transfers > 2 else 1
    # Measured is what the busiest source gives over both networks.
    given = copy.busiest_source_nbytes / known.busiest_source_nbytes
    scale = copy.nbytes / known.nbytes
    found = CopyCounts(
        known.source, known.target, copy.transfers, copy.nbytes, copy.page_nbytes,
        copy.reading_cores, copy.busiest_reader_nbytes, copy.busiest_reader_transfers,
        copy.source_nodes, copy.busiest_source_nbytes, networks,
        round(known.busiest_port_nbytes * given), round(known.busiest_link_nbytes * scale),
        round(known.in_turn_nbytes * scale), known.route,
    )  # fmt: skip
    return found, how


def simulated(copy: Timed, machine: Machine, interval: float) -> Row:
    """One copy beside what the model says, in a kernel that issues a read every `interval`."""
    counts, how = counts_of(copy, machine)
    assert machine.noc is not None
    # The smallest transfer of the table takes as long as issuing it.
    nbytes, rate = machine.noc.curve[0]
    recording = max(0.0, interval - nbytes / rate)
    measured = copy.cycles / machine.noc.clock_hz * 1e9
    ns = machine.copy_seconds(counts, recording) * 1e9
    return Row(copy.name, measured, ns, ns / measured - 1, counts.source.value, how)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by where they come from, those that there are."""
    labels = {"l1": "L1 -> L1", "dram": "DRAM -> L1"}
    found = {label: [row for row in rows if row.source == key] for key, label in labels.items()}
    return {label: rows for label, rows in found.items() if rows}


def left_out(copies: Sequence[Timed], machine: Machine, interval: float) -> list[Row]:
    """Each copy by the model fitted to all others of its kind: to the least sum of errors."""
    noc = machine.noc
    assert noc is not None
    tried = [replace(noc, dram_queueing=1 + k / 50, turns=k / 50) for k in range(51)]
    table = [
        [simulated(copy, replace(machine, noc=one), interval) for copy in copies] for one in tried
    ]
    found = []
    for at in range(len(copies)):
        others = [i for i in range(len(copies))
                  if i != at and table[0][i].source == table[0][at].source]  # fmt: skip
        costs = [sum(abs(rows[i].error) for i in others) for rows in table]
        found.append(table[costs.index(min(costs))][at])
    return found


def show(rows: Sequence[Row]) -> None:
    """A line per copy, then one per group."""
    for row in rows:
        print(f"{row.name:28} measured {row.measured_ns:9.0f} ns  simulated "
              f"{row.simulated_ns:9.0f} ns  {row.error:+7.1%}  grids {row.grids}")  # fmt: skip
    for line in lines_of(rows):
        print(line)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """A line per group."""
    found = groups(rows).items()
    return [summary_line(f"{label:10}", group, "copies", (0.10, 0.40)) for label, group in found]


def main(words: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", default=[TRACES])
    parser.add_argument("--machine", default="wormhole_n150", help="a name, or a description")
    parser.add_argument(
        "--interval", type=from_one, default=RECORDED_INTERVAL,
        help="cycles between the reads of a recorded kernel; 1: none recorded",
    )  # fmt: skip
    parser.add_argument("--leave_one_out", action="store_true")
    arguments = parser.parse_args(words)
    try:
        machine = load_machine(arguments.machine)
        if machine.noc is None:
            raise UsageError(f"machine {machine.name!r} describes no NoC")
        copies = [copy for path in arguments.files for copy in read_timed(path)]
        if arguments.leave_one_out:
            rows = left_out(copies, machine, arguments.interval)
        else:
            rows = [simulated(copy, machine, arguments.interval) for copy in copies]
    except StitchError as error:
        return refused("silicon", error)
    if arguments.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        print()
        for line in lines_of(rows):
            print(line, file=sys.stderr)
    else:
        show(rows)
    return exit_code_for(missed_goals(groups(rows), "copy", GOALS), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())

"""Products timed on silicon beside what the model says that programs of them take, as errors.

FILE.csv has a row for each product, with the columns of tests/data/tenstorrent/op_times (which is
taken without a FILE): machine, grid_rows, grid_columns, m, k, n, input, weights, output (where each
lies: dram, or l1 in blocks over the grid), type, fidelity, settings, ns. A grid that the machine
does not have is that of a machine with so many cores, alike in all else.

`error` is simulated ÷ measured - 1. `--leave_out=row` fits the figures of the model that are fitted
(`compute.launch_seconds` and `compute.products_share`) to all other products of the machine, for
each product; `--leave_out=group` to those of other grids, types, fidelities or settings. `--check`
exits 1 where, of a machine, the median of errors is above 20 %, or that of a tenth above 40 %.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import timed_on_silicon
from command_line import bench_parser, exit_code_for, refused
from timed_on_silicon import missed_goals, summary_line

from stitch.errors import StitchError, UsageError
from stitch.machine import Machine, derived_machine, load_machine, program_seconds
from stitch.program import (
    DataType,
    Layout,
    MathFidelity,
    MemoryLayout,
    Operation,
    OperationList,
    ShardSpec,
    Space,
    Value,
    ValueType,
)

PRODUCTS = Path(__file__).parents[2] / "tests/data/tenstorrent/op_times/matmuls.csv"
GOALS = (0.20, 0.40)
_NUMBERS = ("grid_rows", "grid_columns", "m", "k", "n")
_WORDS = {
    "input": ("dram", "l1"), "weights": ("dram", "l1"), "output": ("dram", "l1"),
    "type": tuple(kind.value for kind in DataType),
    "fidelity": tuple(kind.value for kind in MathFidelity),
}  # fmt: skip
COLUMNS = ("machine", *_NUMBERS, *_WORDS, "settings", "ns")
#: More than any grid or matrix has.
MOST = 1 << 20
_TILE = 32
#: What fits are chosen from.
_SHARES = [n / 100 for n in range(60, 101)]
_LAUNCHES = [n * 0.5e-6 for n in range(2, 31)]


@dataclass(frozen=True, slots=True)
class Timed:
    """One product of a file, as it was measured."""

    machine: str
    grid: tuple[int, int]
    sizes: tuple[int, int, int]
    spaces: tuple[str, str, str]
    type: str
    fidelity: str
    settings: str
    ns: float

    @property
    def group(self) -> Hashable:
        """Those that are alike but for their sizes."""
        return self.machine, self.grid, self.type, self.fidelity, self.settings

    @property
    def name(self) -> str:
        m, k, n = self.sizes
        return f"{m}x{k}x{n} {self.type} {self.fidelity} {self.settings}"


@dataclass(frozen=True, slots=True)
class Row:
    """One product: nanoseconds, and simulated ÷ measured - 1."""

    name: str
    machine: str
    cores: int
    measured_ns: float
    simulated_ns: float
    error: float


def read_timed(path: Path) -> list[Timed]:
    """The products of a file; raises `UsageError` where it lacks a column, a number or a word."""
    return timed_on_silicon.read_timed(path, "products", COLUMNS, _timed)


def _timed(line: dict[str, str], where: str) -> Timed:
    rows, columns, m, k, n = (int(_number(line, name, where)) for name in _NUMBERS)
    for name, words in _WORDS.items():
        if line[name] not in words:
            raise UsageError(f"{where}: {name} is not known", expected=", ".join(words),
                             got=repr(line[name])[:80])  # fmt: skip
    spaces = line["input"], line["weights"], line["output"]
    if "l1" in spaces and any(size % across for size, across in ((m, rows), (k, columns),
                                                                 (n, columns))):  # fmt: skip
        raise UsageError(f"{where}: blocks over {rows} x {columns} cores do not fit the sizes")
    return Timed(
        line["machine"], (rows, columns), (m, k, n), spaces, line["type"], line["fidelity"],
        line["settings"], _number(line, "ns", where),
    )  # fmt: skip


def _number(line: dict[str, str], name: str, where: str) -> float:
    try:
        number = float(line[name]) if name == "ns" else int(line[name])
    except (TypeError, ValueError):
        number = 0
    if not (number > 0 if name == "ns" else 1 <= number <= MOST) or not math.isfinite(number):
        raise UsageError(f"{where}: {name} is no number above 0", got=repr(line[name])[:80],
                         remedy="correct the line, or leave it out")  # fmt: skip
    return number


@cache
def machine_of(name: str, grid: tuple[int, int]) -> Machine:
    """A machine by name; with another grid of cores, where it has not this one."""
    machine = load_machine(name)
    if machine.compute is None:
        raise UsageError(f"machine {name!r} describes no compute rates")
    if machine.shape.core_grid == grid:
        return machine
    figures: dict[str, tuple[int | tuple[int, ...], str]] = {
        "core_grid": (grid, "the file"), "l1.banks": (grid[0] * grid[1], "the file"),
    }  # fmt: skip
    return derived_machine(name, f"{name} of {grid[0]}x{grid[1]}", figures, name)


def program_of(timed: Timed) -> OperationList:
    """A program of one product, its values placed as they were."""
    (m, k, n), kind = timed.sizes, DataType(timed.type)
    values = []
    for name, shape, space in zip("xwy", ((m, k), (k, n), (m, n)), timed.spaces, strict=True):
        layout = Layout(kind, Space.DRAM, (_TILE, _TILE))
        if space == "l1":
            shard = (shape[0] // timed.grid[0], shape[1] // timed.grid[1])
            layout = Layout(kind, Space.L1, (_TILE, _TILE), MemoryLayout.BLOCK_SHARDED,
                            ShardSpec(timed.grid, shard))  # fmt: skip
        values.append(Value(name, ValueType(shape, DataType.FLOAT32), layout))
    product = Operation("MatMul", (0, 1), (2,), math_fidelity=MathFidelity(timed.fidelity))
    return OperationList("product", (), (), tuple(values), (product,), ())


def simulated(timed: Timed, machine: Machine) -> Row:
    """One product beside what the model says of it."""
    ns = program_seconds(program_of(timed), machine) * 1e9
    rows, columns = timed.grid
    return Row(timed.name, timed.machine, rows * columns, timed.ns, ns, ns / timed.ns - 1)


def left_out(products: Sequence[Timed], key: Callable[[int], Hashable]) -> list[Row]:
    """Each product by the model fitted to those of its machine with another key: to the least sum
    of errors."""
    found: dict[int, Row] = {}
    for name in dict.fromkeys(timed.machine for timed in products):
        own = [at for at, timed in enumerate(products) if timed.machine == name]
        tables = list(_tables([products[at] for at in own]))
        costs = [[abs(row.error) for row in table] for table in tables]
        for out in dict.fromkeys(key(at) for at in own):
            kept = [i for i, at in enumerate(own) if key(at) != out]
            sums = [sum(cost[i] for i in kept) for cost in costs]
            best = tables[sums.index(min(sums))]
            found.update({at: best[i] for i, at in enumerate(own) if key(at) == out})
    return [found[at] for at in range(len(products))]


def _tables(products: Sequence[Timed]) -> list[list[Row]]:
    """The rows of products by every pair of figures that fits are chosen from."""
    tables = []
    for share in _SHARES:
        rows = []
        for timed in products:
            machine = machine_of(timed.machine, timed.grid)
            assert machine.compute is not None
            compute = replace(machine.compute, products_share=share, launch_seconds=0.0)
            rows.append(simulated(timed, replace(machine, compute=compute)))
        tables += [[_later(row, launch * 1e9) for row in rows] for launch in _LAUNCHES]
    return tables


def _later(row: Row, ns: float) -> Row:
    """The row of a program that takes so much longer to begin."""
    taken = row.simulated_ns + ns
    return replace(row, simulated_ns=taken, error=taken / row.measured_ns - 1)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by machine."""
    names = dict.fromkeys(row.machine for row in rows)
    return {name: [row for row in rows if row.machine == name] for name in names}


def main(words: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", default=[PRODUCTS])
    parser.add_argument("--leave_out", choices=["row", "group"])
    arguments = parser.parse_args(words)
    try:
        products = [timed for path in arguments.files for timed in read_timed(path)]
        if arguments.leave_out is not None:
            is_row = arguments.leave_out == "row"
            rows = left_out(products, lambda at: at if is_row else products[at].group)
        else:
            rows = [simulated(timed, machine_of(timed.machine, timed.grid)) for timed in products]
    except StitchError as error:
        return refused("op_times", error)
    if arguments.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        print()
    else:
        for row in rows:
            print(f"{row.machine:16} {row.cores:4} cores  {row.name:46} measured "
                  f"{row.measured_ns:12.0f} ns  simulated {row.simulated_ns:12.0f} ns  "
                  f"{row.error:+7.1%}")  # fmt: skip
    for label, found in groups(rows).items():
        line = summary_line(f"{label:16}", found, "products", (0.20,))
        print(line, file=sys.stderr if arguments.json else sys.stdout)
    return exit_code_for(missed_goals(groups(rows), "product", GOALS), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())

"""Simulated times beside those measured on Wormhole and Blackhole cards, with their goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import called_bench, csv_file, csv_rows, load_bench

DATA = Path(__file__).parents[1] / "data/tenstorrent"
COPIES = DATA / "noc_traces/noc_traces.csv"
PRODUCTS = DATA / "op_times/matmuls.csv"
LONG = pytest.mark.campaign("benchmarks")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("silicon", (COPIES,), "DRAM -> L1  15 copies"),
        ("op_times", (PRODUCTS,), "wormhole_n150    117 products"),
        ("op_times", (DATA / "op_times/held_out.csv",), "blackhole_p150    78 products"),
        pytest.param("silicon", ("--leave_one_out",), "L1 -> L1    21 copies", marks=LONG),
        pytest.param("op_times", ("--leave_out=group",), "117 products", marks=LONG),
    ],
)
def test_errors_of_the_cost_model_are_within_the_goals(
    name: str, options: tuple[str | Path, ...], said: str
) -> None:
    done = called_bench(name, *options, "--check")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(("name", "file"), [("silicon", COPIES), ("op_times", PRODUCTS)])
def test_errors_are_simulated_over_measured_minus_1(name: str, file: Path) -> None:
    rows = json.loads(called_bench(name, file, "--json").stdout)
    assert len(rows) == len(csv_rows(file)) - 1
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated_ns"] / row["measured_ns"] - 1)


@pytest.mark.parametrize(("name", "file"), [("silicon", COPIES), ("op_times", PRODUCTS)])
def test_times_three_times_as_long_miss_the_goals(tmp_path: Path, name: str, file: Path) -> None:
    head, *rows = csv_rows(file)
    slow = [[*row[:-1], str(3 * float(row[-1])).removesuffix(".0")] for row in rows]
    done = called_bench(name, csv_file(tmp_path, [head, *slow]), "--check")
    assert done.returncode == 1 and "the median of errors" in done.stderr


@pytest.mark.parametrize(
    ("name", "file", "at", "text", "said"),
    [
        ("silicon", COPIES, -1, "soon", "cycles is no whole number"),
        ("silicon", COPIES, 0, "DRAM_TO_16x16_BLOCK", "exceeds the machine's (8, 8)"),
        ("op_times", PRODUCTS, 0, "host", "describes no compute rates"),
        ("op_times", PRODUCTS, 9, "bfloat17", "type is not known"),
        ("op_times", PRODUCTS, 12, "nan", "ns is no number above 0"),
    ],
)
def test_a_wrong_cell_of_a_file_is_refused(
    tmp_path: Path, name: str, file: Path, at: int, text: str, said: str
) -> None:
    head, row = csv_rows(file)[:2]
    row[at] = text
    done = called_bench(name, csv_file(tmp_path, [head, row]))
    assert done.returncode in (2, 6) and said in done.stderr, done.stderr


def test_a_copy_of_very_many_transfers_is_priced_without_a_step_for_each(tmp_path: Path) -> None:
    head, row = csv_rows(COPIES)[:2]
    file = csv_file(tmp_path, [head, [row[0], str(10**12 - 1), *row[2:]]])
    (found,) = json.loads(called_bench("silicon", file, "--json").stdout)
    assert found["simulated_ns"] > 0


@LONG
def test_the_figures_that_ship_are_those_that_fit_best() -> None:
    """But for a step of either, beside which the sum of errors hardly changes."""
    bench = load_bench("op_times")
    products = bench.read_timed(PRODUCTS)
    fitted = bench.left_out(products, lambda at: None)
    shipped = [bench.simulated(p, bench.machine_of(p.machine, p.grid)) for p in products]
    for name, rows in bench.groups(shipped).items():
        best = sum(abs(row.error) for row in bench.groups(fitted)[name])
        assert sum(abs(row.error) for row in rows) <= 1.01 * best

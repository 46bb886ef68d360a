"""Simulated times beside those measured on Wormhole and Blackhole cards, with their goals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benches import called_bench, csv_file, csv_rows

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
def test_times_three_times_as_long_miss_the_goals(tmp_path: Path, name: str, file: Path) -> None:
    head, *rows = csv_rows(file)
    slow = [[*row[:-1], str(3 * float(row[-1])).removesuffix(".0")] for row in rows]
    done = called_bench(name, csv_file(tmp_path, [head, *slow]), "--check")
    assert done.returncode == 1 and "the median of errors" in done.stderr

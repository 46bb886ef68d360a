"""`tools/bench/op_times.py`: products timed on silicon beside what the model says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import called_bench, csv_file, csv_rows, load_bench, run_bench

FOLDER = Path(__file__).parents[1] / "data/tenstorrent/op_times"
PRODUCTS = FOLDER / "matmuls.csv"


def test_every_product_is_beside_its_measurement_and_no_goal_is_missed() -> None:
    ran = run_bench("op_times", PRODUCTS, "--json", "--check")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert len(rows) == 273
    for row, line in zip(rows, csv_rows(PRODUCTS)[1:], strict=True):
        assert (row["machine"], row["measured_ns"]) == (line[0], float(line[-1]))
        assert row["cores"] == int(line[1]) * int(line[2])
        assert row["error"] == pytest.approx(row["simulated_ns"] / row["measured_ns"] - 1)


def test_goals_hold_for_products_that_nothing_was_fitted_to() -> None:
    ran = called_bench("op_times", FOLDER / "held_out.csv", "--check")
    assert ran.returncode == 0, ran.stderr
    assert "blackhole_p150    78 products" in ran.stdout


@pytest.mark.campaign("benchmarks")
def test_goals_hold_for_each_group_by_figures_fitted_to_all_others() -> None:
    ran = called_bench("op_times", "--leave_out=group", "--check")
    assert ran.returncode == 0, ran.stderr
    assert "wormhole_n150    117 products" in ran.stdout


@pytest.mark.campaign("benchmarks")
def test_the_figures_that_ship_are_those_that_fit_best() -> None:
    """But for a step of either, beside which the sum of errors hardly changes."""
    bench = load_bench("op_times")
    products = bench.read_timed(PRODUCTS)
    fitted = bench.left_out(products, lambda at: None)
    shipped = [bench.simulated(p, bench.machine_of(p.machine, p.grid)) for p in products]
    for name, rows in bench.groups(shipped).items():
        best = sum(abs(row.error) for row in bench.groups(fitted)[name])
        assert sum(abs(row.error) for row in rows) <= 1.01 * best


def test_a_model_that_is_far_off_misses_its_goal(tmp_path: Path) -> None:
    rows = csv_rows(PRODUCTS)
    slow = [[*row[:-1], str(3 * float(row[-1]))] for row in rows[1:]]
    ran = called_bench("op_times", csv_file(tmp_path, [rows[0], *slow]), "--check")
    assert ran.returncode == 1
    assert "goal missed: wormhole_n150: the median of errors" in ran.stderr


@pytest.mark.parametrize(
    ("at", "text", "words"),
    [
        (0, "wormhole_n151", "wormhole_n151"),
        (0, "host", "describes no compute rates"),
        (1, "0", "grid_rows is no number above 0"),
        (3, "512.5", "m is no number above 0"),
        (6, "l3", "input is not known"),
        (9, "bfloat17", "type is not known"),
        (10, "hifi5", "fidelity is not known"),
        (12, "nan", "ns is no number above 0"),
        (12, "-1", "ns is no number above 0"),
    ],
)
def test_a_wrong_cell_is_refused_with_its_line(
    tmp_path: Path, at: int, text: str, words: str
) -> None:
    row = csv_rows(PRODUCTS)[1]
    row[at] = text
    ran = called_bench("op_times", csv_file(tmp_path, [csv_rows(PRODUCTS)[0], row]))
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr


def test_blocks_that_do_not_fit_the_grid_are_refused(tmp_path: Path) -> None:
    row = csv_rows(PRODUCTS)[1]
    row[3:9] = ["500", "512", "512", "l1", "dram", "l1"]
    ran = called_bench("op_times", csv_file(tmp_path, [csv_rows(PRODUCTS)[0], row]))
    assert ran.returncode == 2
    assert "blocks over 8 x 8 cores do not fit" in ran.stderr


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    ran = called_bench("op_times", csv_file(tmp_path, [row[:-1] for row in csv_rows(PRODUCTS)]))
    assert ran.returncode == 2
    assert "without ns" in ran.stderr

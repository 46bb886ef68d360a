"""`tools/bench/silicon.py`: copies timed on silicon beside what the model says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import called_bench, csv_file, csv_rows, load_bench, run_bench

TRACES = Path(__file__).parents[1] / "data/tenstorrent/noc_traces/noc_traces.csv"


def test_every_trace_is_beside_its_measurement_and_no_goal_is_missed() -> None:
    ran = run_bench("silicon", TRACES, "--json", "--check")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert len(rows) == 36
    for row, line in zip(rows, csv_rows(TRACES)[1:], strict=True):
        assert {"name", "measured_ns", "simulated_ns", "error"} <= row.keys()
        assert (row["name"], row["measured_ns"]) == (line[0], float(line[-1]))
        assert row["error"] == pytest.approx(row["simulated_ns"] / row["measured_ns"] - 1)
        assert row["grids"] == "named"


@pytest.mark.campaign("benchmarks")
def test_goals_hold_for_each_copy_by_figures_fitted_to_all_others() -> None:
    ran = called_bench("silicon", "--leave_one_out", "--check")
    assert ran.returncode == 0, ran.stderr
    assert "L1 -> L1    21 copies" in ran.stdout and "DRAM -> L1  15 copies" in ran.stdout


def test_a_model_that_is_far_off_misses_its_goal(tmp_path: Path) -> None:
    rows = csv_rows(TRACES)
    slow = [[*row[:-1], str(3 * int(row[-1]))] for row in rows[1:]]
    ran = called_bench("silicon", csv_file(tmp_path, [rows[0], *slow]), "--check")
    assert ran.returncode == 1
    assert "goal missed: DRAM -> L1: the median of errors" in ran.stderr


def test_without_recording_copies_that_issue_slowly_are_told_too_short() -> None:
    ran = called_bench("silicon", "--interval", "1", "--json", "--check")
    rows = {row["name"]: row for row in json.loads(ran.stdout)}
    assert rows["DRAM_TO_1x1_HEIGHT"]["error"] < -0.4
    assert ran.returncode == 1


def test_cores_of_another_name_are_taken_for_a_square_grid(tmp_path: Path) -> None:
    rows = csv_rows(TRACES)
    named = {row[0]: row for row in rows}
    dram, inside = named["DRAM_TO_8x8_HEIGHT"], named["2x4_BLOCK_TO_4x4_BLOCK"]
    file = csv_file(tmp_path, [rows[0], ["DRAM copy", *dram[1:]], ["reshard", *inside[1:]]])
    found = json.loads(called_bench("silicon", file, "--json").stdout)
    assert [row["grids"] for row in found] == ["assumed", "assumed"]
    assert abs(found[0]["error"]) < 0.15


def test_errors_of_most_copies_without_names_are_below_a_third(tmp_path: Path) -> None:
    rows = csv_rows(TRACES)
    bare = [[f"{'DRAM ' * row[0].startswith('DRAM')}copy", *row[1:]] for row in rows[1:]]
    found = json.loads(
        called_bench("silicon", csv_file(tmp_path, [rows[0], *bare]), "--json").stdout
    )
    assert len(found) == 36
    assert sorted(abs(row["error"]) for row in found)[24] < 1 / 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [row[:-1] for row in rows], "without cycles"),
        (lambda rows: [rows[0], [*rows[1][:-1], "soon"]], "cycles is no whole number"),
        (lambda rows: [rows[0], [*rows[1][:-1], "0"]], "cycles is no whole number"),
        (lambda rows: [rows[0], rows[1][:4]], "reading_cores is no whole number"),
    ],
)
def test_a_file_that_is_no_list_of_copies_is_refused(
    tmp_path: Path, change: object, words: str
) -> None:
    assert callable(change)
    ran = called_bench("silicon", csv_file(tmp_path, change(csv_rows(TRACES))))
    assert ran.returncode == 2 and words in ran.stderr, ran.stderr


def test_shards_that_are_no_whole_tiles_of_so_few_pages_are_priced_all_the_same(
    tmp_path: Path,
) -> None:
    rows = csv_rows(TRACES)
    inside = {row[0]: row for row in rows}["4x4_BLOCK_TO_8x8_BLOCK"]
    file = csv_file(tmp_path, [rows[0], ["8x8_BLOCK_TO_8x8_HEIGHT", *inside[1:]]])
    (found,) = json.loads(called_bench("silicon", file, "--json").stdout)
    assert found["grids"] == "named" and found["simulated_ns"] > 500


@pytest.mark.parametrize("count", [10**12 - 1, 2**40])
def test_a_copy_of_very_many_transfers_is_priced_without_a_look_at_each(
    tmp_path: Path, count: int
) -> None:
    rows = csv_rows(TRACES)
    file = csv_file(tmp_path, [rows[0], [rows[1][0], str(count), *rows[1][2:]]])
    (found,) = json.loads(called_bench("silicon", file, "--json").stdout)
    assert found["simulated_ns"] > 0


@pytest.mark.parametrize("name", ["0x0_BLOCK_TO_4x4_HEIGHT", "DRAM_TO_0x4_BLOCK"])
def test_a_name_with_a_grid_of_no_cores_tells_no_grid(tmp_path: Path, name: str) -> None:
    rows = csv_rows(TRACES)
    file = csv_file(tmp_path, [rows[0], [name, *rows[1][1:]]])
    (found,) = json.loads(called_bench("silicon", file, "--json").stdout)
    assert found["grids"] == "assumed"


def test_a_number_that_no_copy_has_is_refused(tmp_path: Path) -> None:
    rows = csv_rows(TRACES)
    file = csv_file(tmp_path, [rows[0], [rows[1][0], "9" * 400, *rows[1][2:]]])
    ran = called_bench("silicon", file)
    assert ran.returncode == 2 and "transfers is no whole number from 1 to" in ran.stderr


def test_a_mark_of_the_byte_order_is_no_part_of_a_column(tmp_path: Path) -> None:
    file = tmp_path / "marked.csv"
    file.write_bytes(b"\xef\xbb\xbf" + TRACES.read_bytes())
    assert (
        len(json.loads(called_bench("silicon", file, "--json").stdout)) == len(csv_rows(TRACES)) - 1
    )


def test_a_grid_that_the_machine_has_not_is_refused(tmp_path: Path) -> None:
    rows = csv_rows(TRACES)
    file = csv_file(tmp_path, [rows[0], ["DRAM_TO_16x16_BLOCK", *rows[1][1:]]])
    ran = called_bench("silicon", file)
    assert ran.returncode == 6 and "exceeds the machine's (8, 8)" in ran.stderr, ran.stderr


def test_a_file_without_copies_misses_the_goal(tmp_path: Path) -> None:
    ran = called_bench("silicon", csv_file(tmp_path, csv_rows(TRACES)[:1]), "--check")
    assert ran.returncode == 1 and "no copy" in ran.stderr


def test_a_machine_without_a_network_is_refused() -> None:
    ran = called_bench("silicon", "--machine", "host")
    assert ran.returncode == 2 and "describes no NoC" in ran.stderr


def test_another_machine_is_priced_by_its_own_clock() -> None:
    bench = load_bench("silicon")
    from stitch.machine import load_machine

    copy = bench.read_timed(TRACES)[0]
    row = bench.simulated(copy, load_machine("blackhole_p150"), 125)
    assert row.measured_ns == pytest.approx(copy.cycles / 1.35)

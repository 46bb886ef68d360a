"""Each benchmark runs on small data, compares results before it times anything, and prints rows."""

from __future__ import annotations

import json

import pytest

from tests.support.benches import BENCH_NAMES, BENCHES, called_bench, run_bench

LONG = pytest.mark.campaign("benchmarks")
CASE = str(BENCHES / "minimalloc" / "A.csv")
#: The least data of each. Those of `LARGE` take seconds, or a process of their own.
SMALL: dict[str, tuple[str, ...]] = {
    "allocator": ("--rounds=1",),
    "fragmentation": (CASE, "--slack=0.1"),
    "lanes": ("--sizes", "32", "--tasks=5", "--rounds=1"),
    "layout": ("64x40", "--rounds=1"),
    "load": ("--operations=100", "--large_mb=2", "--runs=1"),
    "overhead": ("--chains=1,3", "--width=8", "--machine=tiny", "--rounds=1"),
    "packing": (CASE, "--placements=1000"),
    "peers": ("--chains", "tiny", "--machines", "host", "--executors", "numpy", "--peers", "numpy",
              "onnxruntime", "torch", "--rounds", "1"),
    "silicon": (),
    "op_times": (),
    "steady": ("--quick",),
    "tasks": ("--counts", "200", "--ways", "stitch", "ThreadPoolExecutor", "--rounds=1"),
}  # fmt: skip
LARGE: dict[str, tuple[str, ...]] = {
    "c_interface": ("--shapes", "2x3", "--calls=10", "--rounds=1"),
    "first_calls": ("--small", "--networks", "mlp", "--rounds=1"),
    "fractal": ("--depth=2", "--length=4", "--batch=2", "--hidden=8", "--attention=32",
                "--count=64", "--widths=4", "--depths=1,2", "--sentences=5", "--words=9",
                "--rounds=1", "--executors=numpy,torch", "--no-compile"),
    "loop_rates": ("--executors=numpy", "--count=64", "--tries=1"),
    "mesh": ("--stages=1", "--nbytes=4096", "--batches=3", "--rounds=1"),
    "moves": ("--machines", "tiny", "--cases", "4"),
    "report_page": ("--events=2000", "--rounds=1"),
    "residency": ("--seeds=1",),
    "imports": ("--rounds=1",),
    "staged_training": ("--widths=16", "--batches=4", "--micro_batches=2", "--rounds=1"),
    "stale_weights": ("--models=mlp", "--batch=2", "--rounds=1"),
    "torch_fallback": ("--width=8", "--parts=1,2", "--calls=20"),
    "train": ("--models=mlp", "--machines=host", "--executors=numpy", "--rounds=1", "--no-compile"),
    "planning": ("--tasks", "3", "12", "--live", "10", "--doubled", "5", "10", "--rounds=1"),
}  # fmt: skip


def test_every_benchmark_is_among_these() -> None:
    # `memory_goals` runs six of them with `--check`.
    assert {*SMALL, *LARGE, "memory_goals"} == {*BENCH_NAMES}


@pytest.mark.parametrize(
    ("name", "options"),
    [*SMALL.items(), *(pytest.param(*item, marks=LONG) for item in LARGE.items())],
)
def test_a_benchmark_prints_a_row_for_each_measurement(name: str, options: tuple[str, ...]) -> None:
    run = run_bench if name in LARGE else called_bench
    done = run(name, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) and "Traceback" not in done.stderr


@LONG
def test_no_move_on_tiny_takes_more_than_1_1_of_the_best_fixed_method() -> None:
    rows = json.loads(run_bench("moves", "--machines", "tiny", "--cases", "4", "--json").stdout)
    assert len(rows) == 60 and not any(row["problems"] for row in rows)
    assert all(0.5 < row["time_over_best"] <= 1.1 for row in rows)
    assert all(row["operations_per_tensor_and_piece"] <= 4 for row in rows)


@LONG
def test_bytes_moved_by_the_allocator_are_near_the_optimum_of_brute_force() -> None:
    rows = json.loads(run_bench("fragmentation", "--json").stdout)
    over = [row["moved_over_optimum"] for row in rows if row["moved_over_optimum"] is not None]
    assert len(over) == 2 and all(1 <= ratio <= 1.05 for ratio in over)

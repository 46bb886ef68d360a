"""Each benchmark runs on small data, compares results before it times anything, and prints rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import BENCH_NAMES, BENCHES, called_bench, load_bench, run_bench

LONG = pytest.mark.campaign("benchmarks")
CASE = str(BENCHES / "minimalloc" / "A.csv")
#: The least data of each. Those of `LARGE` take seconds, or a process of their own.
SMALL: dict[str, tuple[str, ...]] = {
    "allocator": ("--rounds=1",),
    "fragmentation": (CASE, "--slack=0.1"),
    "lanes": ("--sizes", "32", "--tasks=5", "--rounds=1"),
    "layout": ("64x40", "--rounds=1"),
    "named_sizes": ("--networks", "transformer", "--layers=1", "--sizes=2", "--rounds=1",
                    "--calls=5", "--tokens=0"),
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
    "cuda": ("--device=torch:cpu", "--suites=chains", "--counts=2", "--no-compile", "--rounds=1"),
    "first_calls": ("--small", "--networks", "mlp", "--rounds=1"),
    "fractal": ("--depth=2", "--length=4", "--batch=2", "--hidden=8", "--attention=32",
                "--count=64", "--widths=4", "--depths=1,2", "--sentences=5", "--words=9",
                "--rounds=1", "--executors=numpy,torch", "--no-compile"),
    "loop_rates": ("--executors=numpy", "--count=64", "--tries=1"),
    "mesh": ("--stages=1", "--nbytes=4096", "--batches=3", "--rounds=1"),
    "named_sizes": ("--networks", "transformer", "--layers=1", "--sizes=2", "--rounds=1",
                    "--calls=5", "--tokens=2"),
    "moves": ("--machines", "tiny", "--cases", "4"),
    "report_page": ("--events=2000", "--rounds=1"),
    "residency": ("--seeds=1",),
    "imports": ("--rounds=1",),
    "staged_training": ("--widths=16", "--batches=4", "--micro_batches=2", "--rounds=1"),
    "stale_weights": ("--models=mlp", "--batch=2", "--rounds=1"),
    "torch_fallback": ("--width=8", "--parts=1,2", "--calls=20"),
    "train": ("--models=mlp", "--machines=host", "--executors=numpy", "--rounds=1", "--no-compile"),
    "plans": ("--layers=2", "--devices=2"),
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


def test_without_a_card_nothing_is_measured_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = called_bench("cuda", "--check")
    assert done.returncode == 0 and done.stdout.startswith("not measured: PyTorch ")
    assert "no CUDA card" in done.stdout
    assert called_bench("cuda", "--suites=chain").returncode == 2
    assert called_bench("cuda", "--device=cpu").returncode == 2


def test_the_benchmark_of_cards_compares_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHES)
    words = ("--suites=chains", "--counts=2", "--no-compile", "--rounds=1", "--json")
    done = called_bench("cuda", "--device=torch:cpu", *words)
    assert done.returncode == 0, done.stderr
    rows = {row["way"]: row for row in json.loads(done.stdout)["rows"]}
    for way in ("stitch, pipe(tensor)", "torch, eager, part by part"):
        assert rows[way]["error"] <= 2e-6 and rows[way]["microseconds"] > 0
        assert not rows[way]["note"]


def test_the_benchmark_of_cards_says_which_goals_are_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_bench("cuda")
    goal = {"line": "1", "name": "chain", "found": 3.0, "most": 1.1, "is_met": False}
    met = {**goal, "found": 1.0, "is_met": True}
    for goals, code in (([goal], 1), ([met], 0), ([{**goal, "found": None, "is_met": None}], 0)):
        data = {"rows": [], "goals": goals}
        monkeypatch.setattr(bench, "in_this_process", lambda *_, data=data: data)
        assert bench.main(["--device=torch:cpu", "--check"]) == code
    said = capsys.readouterr()
    assert said.err == "goal missed: 1. chain: 3, at most 1.1\n"
    assert "MISSED" in said.out and " met" in said.out and "not measured" in said.out


@LONG
def test_everything_of_the_benchmark_of_cards_runs_on_the_processor(tmp_path: Path) -> None:
    file = tmp_path / "cuda.json"
    words = ("--no-compile", "--rounds=1", "--batches=1", "--counts=2")
    done = run_bench("cuda", "--device=torch:cpu", "--check", *words, f"--out={file}")
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert not [row for row in data["rows"] if row["note"].startswith(("failed", "wrong"))]
    assert {row["suite"] for row in data["rows"]} == {
        "chains", "networks", "operations", "nests", "training",
    }  # fmt: skip
    errors = [row["error"] for row in data["rows"] if row["way"].startswith("stitch, error")]
    assert len(errors) == 5 and max(errors) <= 2e-6
    assert {goal["line"] for goal in data["goals"]} == {"1", "2", "3", "4", "5"}
    assert all(goal["found"] is None for goal in data["goals"])


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

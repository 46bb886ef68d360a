"""Benchmarks of `tools/bench/`, loaded as modules, called here, or run as commands."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ROOT / "tools" / "bench"
#: The benchmarks by name; the other files hold what several of them share.
SHARED = {"command_line", "timed_on_silicon"}
BENCH_NAMES = sorted({file.stem for file in BENCHES.glob("*.py")} - SHARED)


def load_bench(name: str) -> ModuleType:
    """Import the benchmark `NAME.py` as `bench_NAME`, with `tools/bench` on the path while it is
    imported."""
    spec = spec_from_file_location(f"bench_{name}", BENCHES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHES)
        spec.loader.exec_module(module)
    return module


def called_bench(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A benchmark with these words, in this process: as `run_bench`, without the time that a
    process takes to load what it needs."""
    made = [str(word) for word in words]
    with (
        patch.dict(os.environ),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = load_bench(name).main(made)
        except SystemExit as left:
            code = left.code
    return subprocess.CompletedProcess(made, code, out.getvalue(), err.getvalue())


def run_bench(
    name: str, *words: str | Path, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own; raises `TimeoutExpired` after so many seconds."""
    return subprocess.run(
        [sys.executable, BENCHES / f"{name}.py", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def csv_rows(file: Path) -> list[list[str]]:
    """The rows of a file that a benchmark reads, its columns' names first."""
    with file.open(newline="") as stream:
        return list(csv.reader(stream))


def csv_file(folder: Path, rows: list[list[str]]) -> Path:
    """A file of such rows."""
    file = folder / "timed.csv"
    file.write_text("\n".join(",".join(row) for row in rows) + "\n")
    return file

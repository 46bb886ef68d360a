"""The residency benchmark: rows of planned chains, goals that are met or named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "bench" / "residency.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_row_for_each_chain_and_none_above_belady() -> None:
    done = bench("--json", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    rows = {row["chain"]: row for row in json.loads(done.stdout)}
    assert {"transformer", "cnn", "unet", "training", "loop"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["ours_seconds"] <= row["belady_seconds"] * (1 + 1e-6)
        assert row["ours_seconds"] <= row["lru_seconds"] * (1 + 1e-6)
        assert 0.8 < row["bound"] <= 1 + 1e-9 and row["gap"] >= 0
        assert row["ours_bytes"] <= row["belady_bytes"] and row["bound_seconds"] <= 1 + 1e-9
    assert rows["loop"]["belady_bytes"] < rows["loop"]["lru_bytes"]


def test_a_file_that_is_no_record_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text("{}", encoding="utf-8")
    done = bench("--traces", file)
    assert done.returncode == 3 and done.stdout == ""
    assert "Traceback" not in done.stderr and done.stderr.startswith("residency.py: ")

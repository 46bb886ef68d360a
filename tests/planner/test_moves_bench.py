"""The moves benchmark: a row per case, each near the best of ways that the mover has no part in."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ROOT / "tools" / "bench"


def test_no_move_on_tiny_takes_more_than_1_1_of_the_best_of_the_fixed_ways() -> None:
    done = subprocess.run(
        [sys.executable, BENCHES / "moves.py", "--machines", "tiny", "--cases", "4", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 60 and not any(row["problems"] for row in rows)
    assert all(0.5 < row["time_over_best"] <= 1.1 for row in rows)
    assert all(row["operations_per_tensor_and_piece"] <= 4 for row in rows)


def test_what_judges_the_mover_has_nothing_of_it() -> None:
    for file in (BENCHES / "moves.py", *(BENCHES / "moves_ways").glob("*.py")):
        imported = {
            node.module or ""
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
        }
        assert not any(name.startswith("stitch.planner.") for name in imported)

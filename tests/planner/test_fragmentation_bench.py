"""The fragmentation benchmark: its own optimum is one, and bad files are one clear error each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import run_bench


def test_bytes_moved_are_near_the_optimum_of_brute_force() -> None:
    done = run_bench("fragmentation", "--json")
    rows = json.loads(done.stdout)
    over = [row["moved_over_optimum"] for row in rows if row["moved_over_optimum"] is not None]
    # An optimum that lets buffers fit anywhere would be twice too low.
    assert len(over) == 2 and all(1 <= ratio <= 1.05 for ratio in over)


@pytest.mark.parametrize(("name", "before"), [("fragmentation", ()), ("residency", ("--traces",))])
def test_a_file_that_is_not_there_is_named(name: str, before: tuple[str, ...]) -> None:
    done = run_bench(name, *before, "nowhere.file")
    assert done.returncode == 3 and done.stdout == ""
    assert "cannot read" in done.stderr and "nowhere.file" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_lifetime_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "b.csv"
    file.write_text("id,lower,upper,size\na,3,1,4\n", encoding="utf-8")
    done = run_bench("fragmentation", file)
    assert done.returncode == 3 and f"{file}:2" in done.stderr


def test_rows_are_of_the_files_that_are_given_under_their_paths(tmp_path: Path) -> None:
    file = tmp_path / "b.csv"
    file.write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\n", encoding="utf-8")
    done = run_bench("fragmentation", file, "--json", "--check")
    assert done.returncode == 0, done.stderr
    assert [row["file"] for row in json.loads(done.stdout)] == [str(file)]

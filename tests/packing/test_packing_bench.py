"""The packing benchmark: rows as promised, and one clear error for each defect of a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.benches import BENCHES, called_bench, run_bench

HEADER = "id,lower,upper,size\n"


def test_a_row_for_each_file(tmp_path: Path) -> None:
    small = tmp_path / "small.csv"
    small.write_text("size,id,lower,upper\r\n10,a,0,2\r\n5,b,1,3\r\n10,c,2,4\r\n", encoding="utf-8")
    case = BENCHES / "minimalloc" / "A.csv"
    done = run_bench("packing", small, case, "--placements", "1000", "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first["file"] == str(small) and second["buffers"] == 154
    assert (first["peak"], first["max_load"], first["ratio"], first["ended"]) == (15, 15, 1.0, True)
    assert second["max_load"] == second["lower_bound"] == 1_048_576
    assert second["ratio"] == second["peak"] / second["max_load"]
    assert 0 < second["placements"] < 4_000 and second["cp_sat_ratio"] is None


def test_check_exits_1_where_the_goal_is_missed() -> None:
    case = BENCHES / "minimalloc" / "D.csv"
    done = run_bench("packing", case, "--placements", "1", "--check", "--json")
    assert done.returncode == 1 and done.stderr.startswith(f"goal missed: {case}: ")
    assert run_bench("packing", case, "--placements", "1").returncode == 0


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the header does not name these columns once each"),
        ("id,lower,upper\n0,1,2\n", 1, "the header does not name these columns once each"),
        ("id,lower,upper,size,size\n0,1,2,3,3\n", 1, "once each"),
        ("id,lower,upper,size,alignment\n0,1,2,3,3\n", 1, "once each"),
        (HEADER + "0,1,2,3\n1,-1,2,3\n", 3, "column 'lower' of buffer '1' is no count"),
        (HEADER + "0,1,2,-3\n", 2, "column 'size' of buffer '0' is no count"),
        (HEADER + "0,1,2,1e3\n", 2, "column 'size'"),
        (HEADER + "0,1,2,99999999999999\n", 2, "column 'size'"),
        (HEADER + "0,5,5,3\n", 2, "buffer '0' is never alive"),
        (HEADER + "0,6,5,3\n", 2, "buffer '0' is never alive"),
        (HEADER + "0,1,2,3\n\n7,1,2,3\n0,1,2,3\n", 5, "as in line 2"),
        (HEADER + "0,1,2\n", 2, "a row of another length than the header"),
    ],
)
def test_a_defect_is_one_error_with_its_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text, encoding="utf-8")
    done = called_bench("packing", file)
    assert done.returncode == 3 and done.stdout == ""
    assert said in done.stderr and f"{file}:{line}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_buffers_no_text_and_no_file_are_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "buffers.csv"
    for content, said in ((HEADER.encode(), "no buffers"), (b"\xff\xfe\0", "no UTF-8 text")):
        file.write_bytes(content)
        done = called_bench("packing", file)
        assert done.returncode == 3 and str(file) in done.stderr and "Traceback" not in done.stderr
        assert said in done.stderr
    done = called_bench("packing", tmp_path / "bufers.csv")
    assert done.returncode == 3 and f"did you mean {str(file)!r}?" in done.stderr


def test_a_byte_order_mark_before_the_header_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "marked.csv"
    file.write_text(HEADER + "0,0,2,5\n", encoding="utf-8-sig")
    done = called_bench("packing", file, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["peak"] == 5


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("packing", ()),
        ("fragmentation", ()),
        ("planning", ("--traces",)),
        ("residency", ("--traces",)),
    ],
)
def test_a_named_pipe_is_refused_without_waiting_for_its_writer(
    tmp_path: Path, name: str, before: tuple[str, ...]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run_bench(name, *before, pipe, seconds=60)
    assert done.returncode == 3 and done.stdout == ""
    assert "a named pipe" in done.stderr and done.stderr.count(str(pipe)) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "budget", [("--placements", "0"), ("--placements", "-1"), ("--seconds", "5")]
)
def test_a_budget_of_nothing_is_a_usage_error(budget: tuple[str, str]) -> None:
    done = called_bench("packing", *budget)
    assert done.returncode == 2 and budget[0] in done.stderr

"""`stitch pack`: MiniMalloc's files in and out, capacities, and one error for each defect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.cli.buffers_csv import read_buffers
from stitch.cli.stitch_command import main
from stitch.packing import Interval
from tests.support.benches import BENCHES
from tests.support.packing_brute_force import clashes

Captured = pytest.CaptureFixture[str]
#: The example of MiniMalloc's README.
EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"
CASE = str(BENCHES / "minimalloc" / "A.csv")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text(EXAMPLE)


def written(path: str) -> tuple[list[Interval], list[int]]:
    """The lifetimes and offsets of a file with the columns id,lower,upper,size,offset."""
    header, *rows = Path(path).read_text().splitlines()
    assert header == "id,lower,upper,size,offset"
    numbers = [[int(field) for field in row.split(",")[1:]] for row in rows]
    return [Interval(a, b - 1, size) for a, b, size, _ in numbers], [n[3] for n in numbers]


def test_minimallocs_example_is_packed_into_its_capacity(capsys: Captured) -> None:
    assert main(["pack", "in.csv", "--capacity=12", "-o", "out.csv"]) == 0
    assert "5 buffers: 12 B of 12 B; no packing is smaller" in capsys.readouterr().out
    intervals, offsets = written("out.csv")
    assert clashes(intervals, offsets) == []
    assert max(o + i.nbytes for o, i in zip(offsets, intervals, strict=True)) == 12


def test_a_challenging_case_of_minimalloc_fits_its_capacity() -> None:
    assert main(["pack", CASE, "--capacity=1MiB", "-o", "out.csv"]) == 0
    intervals, offsets = written("out.csv")
    assert len(offsets) == len(Path(CASE).read_text().splitlines()) - 1
    assert clashes(intervals, offsets) == []


def test_a_capacity_that_no_packing_has_is_refused_with_the_least_one(capsys: Captured) -> None:
    assert main(["pack", "in.csv", "--capacity=11", "-o", "out.csv"]) == 5
    said = capsys.readouterr().err
    assert "got: 12 B are live at one moment" in said and not Path("out.csv").exists()
    remedy = said.splitlines()[-1].removeprefix("  try: stitch ")
    assert main(remedy.split()) == 0


def test_offsets_are_multiples_of_every_alignment() -> None:
    rows = "id,lower,upper,size,alignment\na,0,4,10,8\nb,1,5,3,12\nc,2,3,1,1\n"
    Path("in.csv").write_text(rows)
    assert main(["pack", "in.csv", "-o", "out.csv"]) == 0
    header, *lines = Path("out.csv").read_text().splitlines()
    assert header == "id,lower,upper,size,alignment,offset"
    for line in lines:
        *_, alignment, offset = line.split(",")
        assert int(offset) % int(alignment) == 0


def test_the_older_column_names_and_inclusive_ends_are_read() -> None:
    Path("old.csv").write_text("buffer_id,start,end,size\nb1,0,2,4\n")
    assert read_buffers("old.csv").intervals == [Interval(0, 2, 4)]


def test_a_packed_file_is_packed_again_with_its_offsets_replaced(capsys: Captured) -> None:
    assert main(["pack", "in.csv", "-o", "out.csv"]) == 0
    capsys.readouterr()
    assert main(["pack", "out.csv", "-o", "again.csv", "--json"]) == 0
    seen = capsys.readouterr()
    assert "the offsets of out.csv are replaced" in seen.err
    assert json.loads(seen.out)["bound_nbytes"] == 12
    assert Path("again.csv").read_text() == Path("out.csv").read_text()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the header does not name these columns"),
        ("id,lower,uper,size\n", "did you mean 'upper'?"),
        ("id,lower,upper,end,size\n", "the header does not name these columns"),
        ("id,lower,upper,size\n", "no buffers"),
        ("id,lower,upper,size\na,1,2\n", "in.csv:2"),
        ("id,lower,upper,size\na,1,1,4\n", "is never alive"),
        ("id,lower,upper,size\na,1,2,-4\n", "is no count"),
        ("id,lower,upper,size\na,1,2,1e3\n", "is no count"),
        ("id,lower,upper,size\na,1,2,4\na,2,3,4\n", "as in line 2"),
        ("id,lower,upper,size,gaps\na,1,9,4,3-5\n", "has gaps in its lifetime"),
        ("id,lower,upper,size,alignment\na,1,9,4,0\n", "from 1 to"),
        ("id,lower,upper,size,alignment\na,1,9,4,1048577\n", "no common multiple"),
    ],
)
def test_a_defect_is_one_error_and_nothing_is_written(
    capsys: Captured, text: str, part: str
) -> None:
    Path("in.csv").write_text(text)
    assert main(["pack", "in.csv", "-o", "out.csv"]) == 3
    assert part in capsys.readouterr().err and not Path("out.csv").exists()


def test_a_file_of_another_kind_is_not_overwritten(capsys: Captured) -> None:
    Path("code.py").write_text("import os\n")
    assert main(["pack", "in.csv", "-o", "code.py"]) == 2
    assert "is of another kind" in capsys.readouterr().err
    assert Path("code.py").read_text() == "import os\n"

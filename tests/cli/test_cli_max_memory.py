"""Arrays of commands come out of the budget: what is too large is refused before it is there."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.budget import BUDGET, allowing
from stitch.cli.run_inputs import array_of_text
from stitch.errors import FormatError, OutOfMemoryError
from stitch.forms import read_array, read_array_file

LARGE = (1 << 22,)


@pytest.fixture(autouse=True)
def _nothing_is_left_to_collect() -> None:
    """What other tests left to the collector counts as taken, too."""
    gc.collect()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small archive of a small array and one of 16 MiB of zeros."""
    path = tmp_path / "arrays.npz"
    np.savez_compressed(path, x=np.ones((4, 8), np.float32), large=np.zeros(LARGE, np.float32))
    assert path.stat().st_size < 1 << 16
    return path


def test_only_the_arrays_that_are_asked_for_are_read(archive: Path) -> None:
    with allowing(BUDGET.taken_nbytes + (1 << 20)):
        tracemalloc.start()
        try:
            found = read_array_file(archive)
            assert sorted(map(str, found)) == ["large", "x"]
            np.testing.assert_array_equal(found["x"], np.ones((4, 8)))
            np.testing.assert_array_equal(read_array(archive, "x"), np.ones((4, 8)))
            with pytest.raises(OutOfMemoryError, match="array 'large' of"):
                found["large"]
            with pytest.raises(OutOfMemoryError, match="array 'large' of"):
                read_array(archive, "large")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_arrays_of_files_count_while_they_live(archive: Path) -> None:
    before = BUDGET.taken_nbytes
    found = read_array(archive, "large")
    assert BUDGET.taken_nbytes == before + found.nbytes
    part = found[:10]
    del found
    assert BUDGET.taken_nbytes > before
    del part
    assert BUDGET.taken_nbytes == before


def test_a_header_that_promises_more_than_its_file_holds_is_no_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(100, np.float32))
    data = path.read_bytes().replace(b"(100,), }" + b" " * 9, b"(99999999999,), }".ljust(18))
    path.write_bytes(data)
    for read in (read_array, read_array_file):
        with pytest.raises(FormatError, match="promises 399999999996 bytes"):
            read(path)


def test_arrays_of_words_are_claimed_before_they_are_made(tmp_path: Path) -> None:
    raw = tmp_path / "raw.bin"
    with raw.open("wb") as file:
        file.truncate(1 << 22)
    with allowing(BUDGET.taken_nbytes + (1 << 20)):
        for text in ("1024x1024xf32", "1024x1024xf32=7", f"1024x1024xf32=@{raw}"):
            with pytest.raises(OutOfMemoryError):
                array_of_text(text)
        assert array_of_text("2xf32").tolist() == [0, 0]


def test_every_command_takes_a_limit_and_says_what_did_not_fit(cli: Callable[..., Any]) -> None:
    Path("large.yaml").write_text(
        "name: large\ninputs:\n  x: {shape: [4, 8], type: float32}\nparameters:\n"
        "  w: {shape: [8, 1000000], init: {kind: zeros}}\noperations:\n  - y = MatMul(x, w)\n"
        "outputs: [y]\n"
    )
    refused = cli("compile", "large.yaml", "-o", "l.ttb", "--max_memory=1MiB")
    assert (refused.code, "parameter 'w'" in refused.err) == (5, True)
    refused = cli("run", "--module=a.ttb", "--input=x=1000x1000xf32", "--max-memory=100kB")
    assert (refused.code, "the array 1000x1000xf32 needs" in refused.err) == (5, True)
    refused = cli("run", "--module=a.ttb", "--init=randn", "--max_memory=64kB")
    assert (refused.code, "MatMul(" in refused.err) == (5, True)
    assert cli("run", "--module=a.ttb", "--init=randn", "--max_memory=lots").code == 2
    enough = BUDGET.taken_nbytes + 64_000_000
    assert cli("run", "--module=a.ttb", "--init=randn", f"--max_memory={enough}").code == 0


def test_what_a_run_takes_is_told_before_and_after_it(cli: Callable[..., Any]) -> None:
    told = json.loads(cli("inspect", "a.ttb", "--section=memory", "--json").out)
    assert "MatMul(" in json.dumps(told)
    assert "host memory: a run takes at most" in cli("inspect", "a.ttb").out
    enough = BUDGET.taken_nbytes + 64_000_000
    words = ("--module=a.ttb", "--init=randn", f"--max_memory={enough}", "--memory", "--explain")
    assert cli("run", *words).out.count(f"{enough} B allowed") == 2

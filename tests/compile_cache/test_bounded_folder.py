"""Folders below a size: what goes, what stays, and what is none of theirs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stitch.compile_cache import keep_below, mark_used

NAMES = re.compile(r"([a-z])\.(?:one|two)")


def _files(folder: Path, names: str) -> None:
    """For each letter two files of 100 bytes, the first letter used the longest ago."""
    for at, letter in enumerate(names, 1):
        for ending in ("one", "two"):
            path = folder / f"{letter}.{ending}"
            path.write_bytes(bytes(100))
            os.utime(path, ns=(at, at))


def _letters(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir())
    assert len(found) == 2 * len({name[0] for name in found}), "those that belong together"
    return "".join(name[0] for name in found[::2])


@pytest.mark.parametrize(
    ("most", "left"), [(800, "abcd"), (799, "bcd"), (600, "bcd"), (201, "d"), (0, "")]
)
def test_what_was_used_least_recently_goes_until_the_rest_fits(
    most: int, left: str, tmp_path: Path
) -> None:
    _files(tmp_path, "abcd")
    assert keep_below(tmp_path, NAMES, most) == 800 - 200 * len(left)
    assert _letters(tmp_path) == left


def test_what_is_marked_stays(tmp_path: Path) -> None:
    _files(tmp_path, "abc")
    mark_used(tmp_path / "a.one")
    keep_below(tmp_path, NAMES, 400)
    assert _letters(tmp_path) == "ac"


def test_files_of_other_names_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(1000))
    (tmp_path / "a.one.part").write_bytes(bytes(1000))
    keep_below(tmp_path, NAMES, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert keep_below(tmp_path / "none", NAMES, 0) == 0
    mark_used(tmp_path / "none" / "a.one")

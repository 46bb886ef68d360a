"""The page on tasks names a test for each rule: they exist where it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = r"tests/[\w/]+/test_\w+\.py"


def named(page: str) -> Iterator[tuple[str, str]]:
    """Tests and the files that they are said to be in.

    A file in brackets is that of the whole row, and so is `there too`, the last row's; a file
    within a row is that of the names after it. All else is in the file of the table's heading.
    """
    usual = last = ""
    for paragraph in page.split("\n\n"):
        here = re.search(rf"in\s+`({FILE})` where nothing else is said", paragraph)
        usual = here.group(1) if here else usual
        if not paragraph.startswith("|"):
            for word, file in re.findall(rf"`(test_\w+)`(?: in `({FILE})`)?", paragraph):
                yield word, file or usual
            continue
        for row in paragraph.splitlines():
            whole = re.search(rf"\(`({FILE})`\)", row)
            file = last if "(there too)" in row else whole.group(1) if whole else usual
            for word in re.findall(rf"`(test_\w+|{FILE})`", row):
                if "/" in word:
                    file = word
                else:
                    yield word, file
            last = file


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists_in_the_file_that_it_names() -> None:
    found = list(named((ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")))
    assert len(found) > 40
    assert [(n, file) for n, file in found if f"def {n}(" not in text(file)] == []


def test_a_test_in_another_file_than_the_row_names_is_noticed() -> None:
    page = "The test (in `tests/a/test_a.py` where nothing else is said):\n\n" + "\n".join((
        "| one | `test_one` |", "| two | `test_two`, `test_four` (`tests/b/test_b.py`) |",
        "| three | `test_three` (there too) |",
        "| five | `test_five`, and in `tests/c/test_c.py` `test_six` |", "| seven | `test_seven` |",
    ))  # fmt: skip
    assert [(name, file[-4:-3]) for name, file in named(page)] == [
        ("test_one", "a"), ("test_two", "b"), ("test_four", "b"), ("test_three", "b"),
        ("test_five", "a"), ("test_six", "c"), ("test_seven", "a"),
    ]  # fmt: skip

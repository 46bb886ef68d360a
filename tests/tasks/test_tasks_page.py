"""The page on tasks names a test for each rule: they exist where it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import stitch
import stitch.fractal

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


@pytest.mark.parametrize("page", ["fractal", "stitching"])
def test_every_claim_of_a_document_has_an_api_and_a_test_that_exist(page: str) -> None:
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    table = written.split("## The document, claim by claim")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 12
    for row in rows:
        _, claim, api, tests, _ = row.split("|")
        assert claim.strip()
        names = re.findall(r"`(?:ops|stitch)\.([\w.]+)`", api)
        owner = stitch.fractal if "`ops." in api else stitch
        assert names and all(hasattr(owner, name) for name in names), row
        found = list(named(f"|{tests}|"))
        assert found and all(f"def {n}(" in text(file) for n, file in found), row

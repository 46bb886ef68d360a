"""The page on tasks names a test for each rule: they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists_in_the_file_that_it_names() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    files = {name: (ROOT / name).read_text(encoding="utf-8")
             for name in {*re.findall(r"tests/[\w/]+/test_\w+\.py", page)}}  # fmt: skip
    named = re.findall(r"`(test_\w+)`", page)
    missing = [n for n in named if not any(f"def {n}(" in text for text in files.values())]
    assert len(named) > 30 and missing == []

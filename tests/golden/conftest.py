"""Golden files: expected texts that lie beside the tests; see README.md."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)`: the text equals the file of that name, or the diff is shown."""
    update = bool(request.config.getoption("--update-golden", default=False))
    folder = Path(__file__).parent

    def compare(name: str, text: str) -> None:
        file = folder / name
        if update:
            file.write_text(text, encoding="utf-8")
        expected = file.read_text(encoding="utf-8") if file.exists() else ""
        shown = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        assert text == expected, "\n".join(shown)

    return compare

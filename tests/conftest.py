"""Shared test settings: long campaigns run only with `--full`, seeds are printed."""

from __future__ import annotations

import gc
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

#: Seconds that a long campaign may take; other tests: `timeout` in pyproject.toml.
CAMPAIGN_SECONDS = 1200
HAS_TORCH = importlib.util.find_spec("torch") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long campaigns as well")


@cache
def files_of_torch() -> frozenset[Path]:
    """Test files that name PyTorch, or a module of the tests that does."""
    texts = {p: p.read_text(encoding="utf-8") for p in Path(__file__).parent.rglob("*.py")}
    here = texts.pop(Path(__file__))
    assert "torch" in here
    found = {p for p, text in texts.items() if "torch" in text}
    while True:
        names = "|".join(sorted(p.stem for p in found))
        imports = re.compile(rf"^ *(from|import) ({names})\b", re.MULTILINE)
        more = {p for p, text in texts.items() if imports.search(text)} - found
        if not more:
            return frozenset(found)
        found |= more


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without PyTorch (`tools/test_pythons`) the files that need it stay out."""
    return None if HAS_TORCH else (collection_path in files_of_torch() or None)


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.timeout(CAMPAIGN_SECONDS))
        return
    long = [item for item in items if item.get_closest_marker("full")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("full")]

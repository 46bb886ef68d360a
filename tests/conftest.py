"""Shared test settings: long campaigns run only when they are asked for."""

from __future__ import annotations

import ast
import gc
import importlib.util
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.support import plans_that_ran
from tests.support.campaigns import campaign_of, check_mark, check_names

#: Seconds that a long campaign may take; other tests: `timeout` in pyproject.toml.
CAMPAIGN_SECONDS = 1200
TESTS = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None

plans_that_ran.watch()
# Modules and tests that are collected stay to the end: see `pytest_collection_finish`.
gc.disable()
# On a busy machine anything takes long.
settings.register_profile(
    "stitch", deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("stitch")
# Whoever starts the tests in the background has them ignore interrupts, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all campaigns as well")
    parser.addoption(
        "--campaign", action="append", default=[], metavar="NAME", help="run this campaign alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    check_names(config.getoption("--campaign"), "--campaign")


@cache
def files_of_torch() -> frozenset[Path]:
    """Files that name PyTorch, or import a module of the tests that does."""
    files = {p: p.read_text(encoding="utf-8") for p in TESTS.rglob("*.py")}
    assert "torch" in files.pop(Path(__file__))
    found = {p for p, text in files.items() if "torch" in text}
    imported = {p: modules_named(text) for p, text in files.items()}
    while True:
        names = {".".join(p.relative_to(TESTS.parent).with_suffix("").parts) for p in found}
        more = {p for p, named in imported.items() if named & names} - found
        if not more:
            return frozenset(found)
        found |= more


def modules_named(text: str) -> frozenset[str]:
    """What a file imports, by its full name: modules, and their names, which may be modules."""
    named = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(named)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without PyTorch (`tools/test_pythons`) the files that need it stay out."""
    return None if HAS_TORCH else (collection_path in files_of_torch() or None)


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were asked for: the quick suite, named campaigns, or all. First, so that
    pytest sorts these alone by their fixtures."""
    named = config.getoption("--campaign")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        campaign = campaign_of(item)
        if campaign is not None:
            item.add_marker(pytest.mark.timeout(CAMPAIGN_SECONDS))
            item.user_properties.append(("campaign", campaign))
        is_asked_for = campaign in named if named else campaign is None
        (kept if config.getoption("--full") or is_asked_for else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures: what a test draws does not depend on the tests that ran before it."""
    check_mark(item)
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        # `torch.manual_seed` looks for every kind of card first.
        sys.modules["torch"].default_generator.manual_seed(0)
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = no_guard_seconds


def no_guard_seconds(*_: object) -> float:
    """What dynamo's guards take, for dynamo's log: it would measure that after each compilation
    with the processor's caches emptied, which takes longer than many a compilation."""
    return 0.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests of each campaign took together."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                campaign = dict(report.user_properties).get("campaign")
                if isinstance(campaign, str):
                    seconds[campaign] += report.duration  # type: ignore[assignment]
    for campaign, total in sorted(seconds.items()):
        terminalreporter.write_line(f"campaign {campaign}: {total:.0f} s")


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_not_looked_at() -> None:
    """Before the tests of a file: what earlier ones have left for good, libraries and caches, is no
    matter for collections of garbage any more. Tests and benches ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plans_are_sound() -> Iterator[None]:
    """After every test: the checker, which shares no code with the planner, finds nothing wrong
    with any plan that ran."""
    yield
    assert plans_that_ran.defects(plans_that_ran.taken()) == []

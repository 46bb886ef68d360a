"""The table of campaigns and the tests that belong to them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.campaigns import (
    CAMPAIGNS,
    campaign_of,
    check_mark,
    described,
)

TESTS = Path(__file__).parent
MARK = re.compile(r"mark\.campaign\(\s*\"(\w+)\"")


def names_in_marks() -> set[str]:
    files = [file for file in TESTS.rglob("*.py") if file != Path(__file__)]
    return {name for file in files for name in MARK.findall(file.read_text(encoding="utf-8"))}


def test_each_campaign_has_a_test_and_was_measured_and_each_mark_has_a_campaign() -> None:
    assert names_in_marks() == CAMPAIGNS.keys()
    assert [name for name, row in CAMPAIGNS.items() if row.seconds <= 0] == []


@pytest.mark.parametrize(
    ("names", "said"),
    [(["none"], "unknown campaign 'none'"), ([], "one name"), (["zoo", "onnx"], "one name")],
)
def test_a_wrong_mark_is_told_with_its_test(
    names: list[str], said: str, request: pytest.FixtureRequest
) -> None:
    request.node.add_marker(pytest.mark.campaign(*names), append=False)
    assert campaign_of(request.node) in (None, "zoo")
    with pytest.raises(pytest.UsageError, match=rf"test_a_wrong_mark.*{said}"):
        check_mark(request.node)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, ["quick", "none"]), ({"--campaign": ["zoo"]}, ["zoo"]),
     ({"--campaign": ["zoo", "onnx"]}, ["zoo", "onnx"]),
     ({"--full": True}, ["quick", "zoo", "onnx", "none"])],
)  # fmt: skip
def test_a_run_has_the_quick_suite_or_the_campaigns_that_are_named_or_all(
    options: dict[str, Any], kept: list[str], request: pytest.FixtureRequest
) -> None:
    items: list[pytest.Item] = []
    for name in ("quick", "zoo", "onnx", "none"):
        items.append(pytest.Function.from_parent(request.node.parent, name=name, callobj=described))
        if name != "quick":
            items[-1].add_marker(pytest.mark.campaign(name))
    left: list[pytest.Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: options.get(name, []), hook=hook)
    (plugin,) = (plugin for plugin in request.config.pluginmanager.get_plugins()
                 if getattr(plugin, "__file__", None) == str(TESTS / "conftest.py"))  # fmt: skip
    made = list(items)
    plugin.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == kept
    assert [item for item in made if item not in items] == left

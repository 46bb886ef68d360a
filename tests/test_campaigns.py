"""The table of campaigns and the tests that belong to them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.campaigns import (
    CAMPAIGNS,
    Campaign,
    campaign_of,
    check_mark,
    check_names,
    described,
    thirds,
)

TESTS = Path(__file__).parent
MARK = re.compile(r"mark\.campaign\(\s*\"(\w+)\"")


def names_in_marks() -> set[str]:
    files = [file for file in TESTS.rglob("*.py") if file != Path(__file__)]
    return {name for file in files for name in MARK.findall(file.read_text(encoding="utf-8"))}


def test_each_campaign_has_a_test_and_was_measured_and_each_mark_has_a_campaign() -> None:
    assert names_in_marks() == CAMPAIGNS.keys()
    assert [name for name, row in CAMPAIGNS.items() if row.seconds <= 0] == []


def test_each_campaign_is_described_in_one_line() -> None:
    assert list(CAMPAIGNS) == sorted(CAMPAIGNS)
    for row, line in zip(CAMPAIGNS.values(), described(), strict=True):
        assert row.description and line.startswith(row.name) and row.description in line
        assert len(line) <= 130


def test_three_days_have_all_campaigns_and_none_much_more_than_another() -> None:
    rows = [Campaign(str(n), "", seconds) for n, seconds in enumerate([0, 90, 50, 50, 30, 20, 0])]
    parts = thirds(rows)
    assert sorted(name for part in parts for name in part) == sorted(row.name for row in rows)
    assert sorted(sum(rows[int(name)].seconds for name in part) for part in parts) == [70, 80, 90]
    real = thirds(CAMPAIGNS.values())
    assert {name for part in real for name in part} == CAMPAIGNS.keys()


def test_an_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(pytest.UsageError, match=r"here: unknown campaign 'none'.*hostile, "):
        check_names(["zoo", "none"], "here")


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

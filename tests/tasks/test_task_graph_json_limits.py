"""However a text of a task graph is wrong: little work, and an error that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy as copy_of
from typing import Any

import pytest

from stitch.errors import FormatError
from stitch.tasks import TaskGraph, aggregate
from tests.support.task_graphs import random_graph

CAMPAIGN = pytest.mark.campaign("hostile")
DESC = {"shape": [4], "data_type": "float32", "space": "host"}


def refusal(**parts: Any) -> str:
    """What reading a text with these parts raises."""
    lists: dict[str, Any] = {
        key: [] for key in ("inputs", "programs", "functions", "tasks", "outputs")
    }
    body = {"format": "stitch.task_graph", "version": 1, "name": "t"} | lists | parts
    with pytest.raises(FormatError) as caught:
        TaskGraph.from_json(json.dumps(body))
    return str(caught.value)


def function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": [], "returns": [], "writes": [], "updates": []}


def copy(desc: dict[str, Any], *, reads: list[int], makes: list[int]) -> dict[str, Any]:
    return {"copy": desc, "inputs": reads, "outputs": makes}


def call(name: str) -> dict[str, Any]:
    return {"function": name, "arguments": [], "named": {}, "inputs": [], "outputs": []}


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "parts",
    [
        {"tasks": [copy(DESC, reads=[], makes=list(range(1, 50_000)))]},
        {"tasks": [call(LONG)]},
        {"functions": [function(LONG)]},
        {LONG: 0},
        {"outputs": [{"name": LONG, "value": 3}]},
        {"inputs": [{"name": LONG, "desc": DESC}] * 2},
        {"inputs": [{"name": "x", "desc": DESC | {"shape": [-1] * 100_000}}]},
        {
            "inputs": [{"name": "x", "desc": DESC}],
            "tasks": [copy(DESC | {"shape": [1] * 100_000}, reads=[0], makes=[1])],
        },
    ],
    ids=["numbers", "call", "function", "key", "output", "input", "bad shape", "other shape"],
)
def test_what_an_error_repeats_of_the_text_is_short(parts: dict[str, Any]) -> None:
    assert len(refusal(**parts)) < 1_000


def test_keys_that_stand_twice_are_repeated_in_short() -> None:
    with pytest.raises(FormatError, match="duplicate key") as caught:
        TaskGraph.from_json(f'{{"{LONG}": 0, "{LONG}": 0}}')
    assert len(str(caught.value)) < 1_000


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*at, key)
        yield from _paths(value[key], (*at, key))


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(n, marks=CAMPAIGN) for n in range(2, 40)]])
def test_a_text_with_any_part_replaced_or_missing_is_a_graph_or_a_format_error(seed: int) -> None:
    graph = random_graph(seed)
    for form in (aggregate(graph), graph):
        body = json.loads(form.as_json())
        for path in _paths(body):
            replacements: tuple[Any, ...] = (-2, 10**30, "text", None, [], {}, KeyError)
            for new in replacements:
                damaged = copy_of(body)
                part = damaged
                for key in path[:-1]:
                    part = part[key]
                if new is KeyError:
                    del part[path[-1]]
                else:
                    part[path[-1]] = new
                try:
                    again = TaskGraph.from_json(
                        json.dumps(damaged), programs=form.programs, functions=form.functions
                    )
                except FormatError:
                    continue
                again.validate()
                assert again.text() and again.as_json()

"""Traces of random task graphs with host functions: their tasks by name, arrows for their edges."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import stitch
from stitch.report import ChromeTrace
from stitch.tasks import CopyAgent, TaskGraph, TaskTable
from tests.support.grids import every
from tests.support.task_graphs import inputs_of, interpreted, random_graph, same
from tests.support.trace_format import Checked, checked

KINDS = ("program", "host")


def traced(graph: TaskGraph, window: int, seed: int) -> tuple[Checked, dict[str, Any]]:
    """Its trace, of two runs, and what it gave."""
    with stitch.open_device("tiny", window=window) as device:
        run, inputs = device.prepare(graph), inputs_of(graph.table(), seed)
        with_trace = ChromeTrace(device)
        for _ in range(2):
            given = run(**inputs)
            tensors = given if isinstance(given, tuple) else (given,)
            found = {n: t.numpy() for n, t in zip(graph.outputs, tensors, strict=True)}
        with_trace.close()
        return checked(with_trace.as_json()), found


def edges(table: TaskTable) -> Counter[tuple[str, str]]:
    """From whom each task has what it reads, by names; copies hand on."""
    made: dict[int, int] = {}
    found: Counter[tuple[str, str]] = Counter()
    names: dict[int, str] = {}
    for index, (agent, inputs, outputs) in enumerate(table.tasks):
        sources = {made[number] for number in inputs if number in made}
        if isinstance(agent, CopyAgent):
            made.update({number: source for number in outputs for source in sources})
            continue
        names[index] = agent.name
        found.update((names[source], agent.name) for source in sources)
        made.update(dict.fromkeys(outputs, index))
    return found


@pytest.mark.parametrize("seed", every(4, range(24)))
def test_each_task_has_its_name_and_each_edge_an_arrow(seed: int) -> None:
    graph = random_graph(seed)
    table = graph.table()
    found, results = traced(graph, 64, seed)
    assert same(results, interpreted(table, inputs_of(table, seed)))
    ran = Counter(each.name for each in found.slices if each.kind in KINDS)
    tasks = [agent.name for agent, _, _ in table.tasks if not isinstance(agent, CopyAgent)]
    assert ran == Counter(tasks * 2)
    arrows = {
        (id(flow[0]), id(flow[-1])): (flow[0].name, flow[-1].name)
        for flow in found.flows
        if flow[0].kind in KINDS
    }
    assert Counter(arrows.values()) == Counter(
        {edge: 2 * count for edge, count in edges(table).items()}
    )

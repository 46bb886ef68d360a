"""Random task graphs on a device, as they are and aggregated: the bits that plain Python gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.tasks import TaskGraph, aggregate, task
from tests.support.small_programs import HOST, SHAPE
from tests.support.task_graphs import inputs_of, interpreted, random_graph, same


def run(device: stitch.Device, graph: TaskGraph, seed: int) -> dict[str, object]:
    prepared = device.prepare(graph)
    results = prepared(**inputs_of(graph.table(), seed))
    tensors = results if isinstance(results, tuple) else (results,)
    return {name: tensor.numpy() for name, tensor in zip(graph.outputs, tensors, strict=True)}


def test_aggregation_changes_no_bit() -> None:
    with stitch.open_device("tiny") as device:
        for seed in range(20):
            graph = random_graph(seed)
            expected = interpreted(graph.table(), inputs_of(graph.table(), seed))
            for form in (graph, aggregate(graph), aggregate(graph, "keep")):
                assert same(run(device, form, seed), expected)


def test_a_member_that_fails_is_named_by_its_own_name() -> None:
    @task(returns=HOST)
    def fine(x: Any) -> Any:
        return x + 1

    @task(returns=HOST)
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("no number")

    graph = TaskGraph("steps")
    graph.output(fine(broken(fine(graph.input(HOST, "x")))), "y")
    merged = aggregate(graph)
    assert [row.name for row in merged.tasks] == ["fine+broken+fine"]
    with stitch.open_device("tiny") as device:
        prepared = device.prepare(merged)
        with pytest.raises(Exception, match="no number") as caught:
            prepared(x=np.zeros(SHAPE, np.float32))
        assert "'broken'" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "fine+broken" not in str(caught.value)

"""Random task graphs on a device, as they are and aggregated: the bits that plain Python gives."""

from __future__ import annotations

import pytest

import stitch
from stitch.tasks import TaskGraph, aggregate
from tests.support.task_graphs import inputs_of, interpreted, random_graph, same


def run(device: stitch.Device, graph: TaskGraph, seed: int) -> dict[str, object]:
    prepared = device.prepare(graph)
    results = prepared(**inputs_of(graph.table(), seed))
    tensors = results if isinstance(results, tuple) else (results,)
    return {name: tensor.numpy() for name, tensor in zip(graph.outputs, tensors, strict=True)}


@pytest.mark.parametrize("window", [1, 64])
def test_aggregation_and_the_window_change_no_bit(window: int) -> None:
    with stitch.open_device("tiny", window=window) as device:
        for seed in range(20):
            graph = random_graph(seed)
            expected = interpreted(graph.table(), inputs_of(graph.table(), seed))
            for form in (graph, aggregate(graph), aggregate(graph, "keep")):
                assert same(run(device, form, seed), expected)

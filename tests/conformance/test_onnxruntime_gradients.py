"""ONNX Runtime agrees with our kernels on the backward graph of every operator.

The cases are those of `tests/ops`, in float32.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler import differentiate
from stitch.graph import ComputationGraph
from tests.support.gradients import tables
from tests.support.gradients.running import (
    Case,
    Feeds,
    backward_feeds,
    graph_of,
    operands_of,
    run,
    seeds_of,
    wanted_names,
)
from tests.support.grids import every

ROWS: dict[str, list[Case]] = defaultdict(list)
for _row in tables.ROWS:
    # Of operators on several devices ONNX has no equivalent.
    if _row.op not in ("Combine", "Reduction", "Repartition", "Replicate"):
        ROWS[_row.op].append(_row)


def in_single(one: Case) -> Case:
    """The case in float32."""
    specs: list[Any] = []
    for spec in one.specs:
        if isinstance(spec, str):
            specs.append(spec.replace("f64", "f32"))
        elif isinstance(spec, np.ndarray) and spec.dtype == np.float64:
            specs.append(spec.astype(np.float32))
        else:
            specs.append(spec)
    attributes = {k: v for k, v in one.attributes.items() if k != "stash_type"}
    return dataclasses.replace(one, specs=tuple(specs), attributes=attributes)


def through(device: stitch.Device, graph: ComputationGraph, feeds: Feeds) -> Feeds:
    """Every output of a graph on a device, by name."""
    made = device.load(stitch.compile(graph))(**{s.name: feeds[s.name] for s in graph.inputs})
    tensors = made if isinstance(made, tuple) else (made,)
    return {s.name: t.numpy() for s, t in zip(graph.outputs, tensors, strict=True)}


@pytest.fixture(scope="module")
def device() -> Iterator[stitch.Device]:
    with stitch.open_device(executor="onnxruntime") as opened:
        yield opened


def agrees(device: stitch.Device, one: Case) -> None:
    operands = operands_of(one)
    graph, feeds = graph_of(one, operands)
    both = differentiate(graph, wanted_names(one, operands))
    results = run(both.forward, feeds)
    given = backward_feeds(both, feeds, results, seeds_of(both, results))
    ours = run(both.backward, given)
    theirs = through(device, both.backward, given)
    assert ours.keys() == theirs.keys()
    for name, expected in ours.items():
        np.testing.assert_allclose(theirs[name], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("op", every(3, sorted(ROWS)))
def test_backward_graphs_agree(device: stitch.Device, op: str) -> None:
    for row in ROWS[op]:
        agrees(device, in_single(row))

"""Running a graph one operation at a time, for tests that compare numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stitch import ops
from stitch.graph import ComputationGraph, check_types
from stitch.program import ABSENT, Array

Run = Callable[..., dict[str, Array]]


@pytest.fixture
def run() -> Run:
    """`run(graph, *arrays)`: the outputs by name, after the types were checked again."""

    def evaluate(graph: ComputationGraph, *arrays: Array) -> dict[str, Array]:
        assert check_types(graph) == ()
        found: dict[int, Array] = dict(graph.constant_data())
        for slot, array in zip(graph.inputs, arrays, strict=True):
            kind = graph.values[slot.value].type
            assert (array.shape, array.dtype) == (kind.shape, kind.data_type.dtype)
            found[slot.value] = array
        with np.errstate(all="ignore"):
            for operation in graph.operations:
                results = ops.evaluate(
                    operation.op,
                    [None if i == ABSENT else found[i] for i in operation.inputs],
                    domain=operation.domain,
                    attributes=operation.attributes,
                    outputs=len(operation.outputs),
                )
                found.update(zip(operation.outputs, results, strict=True))
        return {slot.name: found[slot.value] for slot in graph.outputs}

    return evaluate

"""Every executor gives what the bodies of a program come to, written out: NumPy its very bits."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraph
from stitch.program import Array, DataType
from stitch.runtime import HookContext
from tests.support.bodied_graphs import bodied_graph, plain_graph
from tests.support.grids import in_turn, named
from tests.support.stitched_models import several

#: Relative to the largest element of a result.
TOLERANCES = {"numpy": 0.0, "onnxruntime": 1e-5, "auto": 1e-5, "torch": 1e-5}
#: Rows that are computed as they are, and so many that passes are cut into chunks.
SHAPES = [(6, 8), (40_000, 8)]


def drawn(shape: tuple[int, ...], data_type: DataType) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape, np.float32).astype(data_type.dtype) for _ in range(2))
    return x, w


def results(
    graph: ComputationGraph, given: tuple[Array, ...], executor: str, target: str
) -> list[Array]:
    model = stitch.compile(graph, target=target)
    with stitch.open_device(target, executor=executor) as device:
        return [tensor.numpy().astype(np.float32) for tensor in several(device.load(model)(*given))]


@pytest.mark.parametrize(
    ("executor", "data_type", "shape"),
    in_turn(TOLERANCES, named(str, [DataType.FLOAT32, DataType.BFLOAT16]), named(str, SHAPES)),
)
def test_a_body_gives_what_it_comes_to(
    executor: str, data_type: DataType, shape: tuple[int, ...]
) -> None:
    given = drawn(shape, data_type)
    expected = results(plain_graph(data_type, shape), given, executor, "host")
    found = results(bodied_graph(data_type, shape), given, executor, "host")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 0, TOLERANCES[executor] * np.abs(theirs).max())


def test_a_device_with_memory_of_its_own_runs_bodies() -> None:
    given = drawn((6, 8), DataType.FLOAT32)
    expected = results(plain_graph(), given, "numpy", "tiny")
    assert all(map(np.array_equal, results(bodied_graph(), given, "numpy", "tiny"), expected))


@pytest.mark.parametrize("executor", ["numpy", "torch"])
def test_hooks_see_what_an_operation_is_computed_by(executor: str) -> None:
    model = stitch.compile(bodied_graph(), target="host")
    given = drawn((6, 8), DataType.FLOAT32)
    seen: list[str] = []

    def see(context: HookContext) -> None:
        assert context.operation is not None
        seen.append(context.operation.op)

    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model)
        expected = [tensor.numpy().copy() for tensor in several(program(*given))]
        device.hooks.register(after_operation=see)
        found = [tensor.numpy() for tensor in several(program(*given))]
    assert seen == [
        "Mul", "Tanh", "Mul", "Add", "Mul", "Tanh", "Mul", "Add", "MatMul", "Exp"
    ]  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-6)


def test_the_peak_of_host_bytes_counts_the_expansion() -> None:
    shape = (40_000, 8)
    executor = stitch.open_device("host").backend.executor
    ours, theirs = (
        executor.host_bytes(stitch.compile(graph, target="host").program)
        for graph in (bodied_graph(shape=shape), plain_graph(shape=shape))
    )
    assert ours.values == theirs.values and ours.kernels == theirs.kernels

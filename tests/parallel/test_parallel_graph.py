"""Parallel graphs: they run on one device as the whole, their gradients are parallel operators,
and what does not divide is one error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stitch.compiler import differentiate
from stitch.errors import CompileError, FormatError, UsageError
from stitch.graph import ComputationGraph
from stitch.mesh import MachineSpecification, open_mesh
from stitch.parallel import (
    ParallelComputationGraph,
    ParallelShape,
    TensorPlacement,
    lower,
    replicated,
)
from stitch.program import (
    Array,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Space,
    Value,
    ValueType,
)
from stitch.testing import evaluate_graph
from tests.support.training.staged_models import MODELS

F32 = DataType.FLOAT32


def shape(*sizes: int, degrees: tuple[int, ...] = (), sums: int = 1, copies: int = 1) -> Any:
    kind = ValueType(sizes, F32)
    return ParallelShape(kind, degrees or (1,) * len(sizes), sums, copies)


def parallel(op: str, source: int, result: int, **words: int) -> Operation:
    return Operation(op, (source,), (result,), words, "stitch")


def two_products(degree: int = 2) -> ParallelComputationGraph:
    """A product by columns of its weight, Relu, and one by rows: sums of a part of each."""
    shapes = {
        "x": shape(8, 6), "w": shape(6, 4), "v": shape(4, 5),
        "xs": shape(8, 6, copies=degree), "ws": shape(6, 4, degrees=(1, degree)),
        "vs": shape(4, 5, degrees=(degree, 1)), "h": shape(8, 4, degrees=(1, degree)),
        "r": shape(8, 4, degrees=(1, degree)), "parts": shape(8, 5, sums=degree),
        "y": shape(8, 5),
    }  # fmt: skip
    operations = (
        parallel("Replicate", 0, 3, degree=degree),
        parallel("Repartition", 1, 4, axis=1, degree=degree),
        parallel("Repartition", 2, 5, axis=0, degree=degree),
        Operation("MatMul", (3, 4), (6,)), Operation("Relu", (6,), (7,)),
        Operation("MatMul", (7, 5), (8,)), parallel("Reduction", 8, 9, degree=degree),
    )  # fmt: skip
    slots = (
        InputSlot("x", 0), InputSlot("w", 1, InputKind.PARAMETER),
        InputSlot("v", 2, InputKind.PARAMETER),
    )  # fmt: skip
    values = tuple([Value(name, each.type) for name, each in shapes.items()])
    graph = ComputationGraph("two", slots, (OutputSlot("y", 9),), values, operations)
    return ParallelComputationGraph(graph, tuple(shapes.values()))


def drawn(graph: ComputationGraph, seed: int = 0) -> dict[str, Array]:
    rng, feeds = np.random.default_rng(seed), {}
    for i, slot in enumerate(graph.inputs):
        kind = graph.input_type(i)
        if kind.data_type.is_floating:
            feeds[slot.name] = rng.standard_normal(kind.shape).astype(kind.data_type.dtype)
        else:
            feeds[slot.name] = rng.integers(0, 7, kind.shape).astype(kind.data_type.dtype)
    return feeds


def test_shards_on_one_device_compute_the_whole() -> None:
    both = two_products().stacked()
    feeds = drawn(both)
    x, w, v = feeds.values()
    np.testing.assert_allclose(
        evaluate_graph(both, feeds)["y"], np.maximum(x @ w, 0) @ v, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"statistics", "unread"}))
def test_a_replica_computes_its_micro_batch(name: str) -> None:
    graph = MODELS[name]()
    both = replicated(graph, 2).stacked()
    whole = drawn(both)
    kept = {slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER}
    halves = [
        {n: a if n in kept else np.split(a, 2)[half] for n, a in whole.items()} for half in (0, 1)
    ]
    expected = np.concatenate([evaluate_graph(graph, half)["y"] for half in halves])
    np.testing.assert_allclose(evaluate_graph(both, whole)["y"], expected, rtol=2e-5, atol=1e-6)


def test_the_gradient_of_a_replicated_parameter_is_a_sum_and_each_operator_has_another() -> None:
    graph = replicated(MODELS["mlp"](), 4)
    backward = differentiate(graph.stacked(), outputs=["y"]).backward
    made = [operation.op for operation in backward.operations if operation.domain]
    # Gradients of the prediction are scattered, those of the 12 parameters summed.
    assert made == ["Repartition"] + ["Reduction"] * 12
    two = differentiate(two_products().stacked(), outputs=["y"])
    made = [operation.op for operation in two.backward.operations if operation.domain]
    assert sorted(made) == ["Combine", "Combine", "Replicate"]
    feeds = drawn(two.forward)
    results = evaluate_graph(two.forward, feeds)
    seed = np.ones((8, 5), np.float32)
    inputs = {s.name for s in two.backward.inputs}
    gradients = evaluate_graph(
        two.backward,
        {n: a for n, a in {**feeds, **results, "y.grad": seed}.items() if n in inputs},
    )
    x, w, v = (feeds[name] for name in "xwv")
    h = np.maximum(x @ w, 0)
    np.testing.assert_allclose(gradients["v.grad"], h.T @ seed, rtol=1e-4)
    wanted = x.T @ (seed @ v.T * (h > 0))
    np.testing.assert_allclose(gradients["w.grad"], wanted, rtol=1e-4, atol=1e-5)


def test_json_comes_back_equal_and_another_version_or_degree_is_one_error() -> None:
    graph = two_products()
    text = graph.as_json()
    assert ParallelComputationGraph.from_json(text) == graph
    data = json.loads(text)
    with pytest.raises(FormatError, match=r"another version\n.*version 2\n.*version 1\n.*as_json"):
        ParallelComputationGraph.from_json(json.dumps({**data, "version": 1}))
    with pytest.raises(FormatError, match="no parallel computation graph"):
        ParallelComputationGraph.from_json(json.dumps(data["graph"]))
    with pytest.raises(UsageError, match=r"JSON text\n.*\n.*got: dict\n.*json.dumps"):
        ParallelComputationGraph.from_json(data)
    four = json.loads(replicated(MODELS["mlp"](), 4).as_json())
    with pytest.raises(FormatError, match=r"into 4 shards among 3 replicas"):
        ParallelComputationGraph.from_json(json.dumps({**four, "replicas": 3}))
    for index, key, value, message in (
        (3, "copy_degree", 3, "divided otherwise"),
        (4, "degrees", [1, 3], "does not divide into 3 equal shards"),
        (4, "degrees", [1], "one degree for each axis"),
        (0, "copy_degree", 2, "input 'x' must be whole"),
        (0, "sum_degree", 0, "at least 1"),
    ):
        shapes = [dict(each) for each in data["shapes"]]
        shapes[index][key] = value
        with pytest.raises(FormatError, match=message):
            ParallelComputationGraph.from_json(json.dumps({**data, "shapes": shapes}))
    with pytest.raises(FormatError, match="10"):
        ParallelComputationGraph.from_json(json.dumps({**data, "shapes": data["shapes"][1:]}))


def test_degrees_that_do_not_divide_and_operands_of_other_counts_are_refused() -> None:
    with pytest.raises(CompileError, match="axis 1 of 6x4xf32 does not divide into 3"):
        two_products(3)
    graph = two_products()
    shapes = list(graph.shapes)
    operations = (*graph.graph.operations[1:-1],)
    bare = ComputationGraph(
        "bare", (*graph.graph.inputs, InputSlot("xs", 3)), (), graph.graph.values, operations
    )
    shapes[3] = ParallelShape.whole(shapes[3].type)
    with pytest.raises(CompileError, match="different numbers of shards") as caught:
        ParallelComputationGraph(bare, tuple(shapes))
    assert caught.value.where == "operation 2 (MatMul) of parallel graph 'bare'"
    assert "Replicate" in str(caught.value.remedy)


def placed(graph: ParallelComputationGraph, devices: int) -> dict[str, TensorPlacement]:
    """Shard i of each value on device i, counted around."""
    return {
        value.name: TensorPlacement(
            tuple([f"device{i % devices}" for i in range(shape.count)]), Space.DRAM
        )
        for value, shape in zip(graph.graph.values, graph.shapes, strict=True)
    }


@pytest.mark.parametrize("name", ["two", "mlp", "embedding", "attention"])
def test_a_lowered_graph_computes_on_two_devices_what_one_computes(name: str) -> None:
    graph = two_products() if name == "two" else replicated(MODELS[name](), 2)
    specification = MachineSpecification.of(2, "tiny")
    tasks = lower(graph, placed(graph, 2), specification)
    assert set(tasks.table().devices) == {"device0", "device1"}
    feeds = drawn(graph.graph)
    with open_mesh(specification) as mesh:
        result = mesh.prepare(tasks)(**feeds)
        array = np.asarray(result.numpy())
    expected = evaluate_graph(graph.stacked(), feeds)["y"]
    np.testing.assert_allclose(array, expected, rtol=2e-5, atol=1e-6)


def test_what_nobody_reads_and_one_copy_are_lowered() -> None:
    kind = ValueType((4, 8), F32)
    slots = (InputSlot("x", 0), InputSlot("z", 1))
    names, whole, copies = "xzhcey", ParallelShape.whole(kind), shape(4, 8, copies=2)
    operations = (
        Operation("Relu", (0,), (2,)), parallel("Replicate", 2, 3, degree=2),
        Operation("Exp", (3,), (4,)), parallel("Replicate", 2, 5, degree=1),
    )  # fmt: skip
    values = tuple([Value(name, kind) for name in names])
    unread = ParallelComputationGraph(
        ComputationGraph("unread", slots, (OutputSlot("y", 5),), values, operations),
        (whole, whole, whole, copies, copies, whole),
    )
    alone = ParallelComputationGraph(
        ComputationGraph(
            "alone", slots[:1], (OutputSlot("y", 1),), (values[0], values[5]),
            (parallel("Replicate", 0, 1, degree=1),),
        ), (whole, whole),
    )  # fmt: skip
    specification = MachineSpecification.of(2, "tiny")
    with open_mesh(specification) as mesh:
        for graph in (unread, alone):
            feeds = drawn(graph.graph)
            made = mesh.prepare(lower(graph, placed(graph, 2), specification))(**feeds).numpy()
            expected = evaluate_graph(graph.stacked(), feeds)["y"]
            np.testing.assert_array_equal(np.asarray(made), expected)


def test_a_value_without_its_devices_is_one_error() -> None:
    graph, two = two_products(), MachineSpecification.of(2, "tiny")
    mapping = placed(graph, 2)
    short = {**mapping, "h": TensorPlacement(("device0",), Space.DRAM)}
    unknown = {**mapping, "y": TensorPlacement(("device7",), Space.DRAM)}
    for wrong, message in ((short, "'h' .* is not placed"), (unknown, "no device 'device7'")):
        with pytest.raises(UsageError, match=message):
            lower(graph, wrong, two)

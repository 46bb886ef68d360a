"""What a parallel graph computes is what the undivided graph computes, or it is refused.

The undivided graph is the reference: the operators on whole values, without parallel operators.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError, FormatError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.parallel import ParallelComputationGraph, ParallelShape, replicated
from stitch.program import DataType, InputKind, InputSlot, Operation, OutputSlot, Value, ValueType
from stitch.testing import evaluate_graph
from tests.support.training.drawn_divisions import drawn_division

#: An operator, its operands, its result with how it is divided, and its attributes.
Step = tuple[str, list[str], str, dict[str, Any], dict[str, Any]]


def parallel_graph(inputs: dict[str, tuple[int, ...]], *steps: Step) -> ParallelComputationGraph:
    """A parallel graph of steps; the last result is the output."""
    shapes = {name: ParallelShape.whole(ValueType(sizes, DataType.FLOAT32))
              for name, sizes in inputs.items()}  # fmt: skip
    operations = []
    for op, operands, result, divided, words in steps:
        sizes = divided["sizes"]
        shapes[result] = ParallelShape(
            ValueType(sizes, DataType.FLOAT32), divided.get("degrees", (1,) * len(sizes)),
            divided.get("sums", 1), divided.get("copies", 1),
        )  # fmt: skip
        numbers = list(shapes)
        domain = "stitch" if "degree" in words else ""
        operations.append(Operation(
            op, tuple([numbers.index(name) for name in operands]), (numbers.index(result),), words,
            domain,
        ))  # fmt: skip
    graph = ComputationGraph(
        "drawn", tuple([InputSlot(name, i) for i, name in enumerate(inputs)]),
        (OutputSlot("out", len(shapes) - 1),),
        tuple([Value(name, shape.type) for name, shape in shapes.items()]), tuple(operations),
    )  # fmt: skip
    return ParallelComputationGraph(graph, tuple(shapes.values()))


def cut(source: str, result: str, sizes: tuple[int, ...], axis: int, **divided: Any) -> Step:
    degrees = tuple([2 if i == axis else 1 for i in range(len(sizes))])
    return (
        "Repartition", [source], result, {"sizes": sizes, "degrees": degrees, **divided},
        {"axis": axis, "degree": 2},
    )  # fmt: skip


def join(source: str, result: str, sizes: tuple[int, ...], axis: int, **divided: Any) -> Step:
    words = {"axis": axis, "degree": 2}
    return "Combine", [source], result, {"sizes": sizes, **divided}, words


BOTH = {"sizes": (4, 8), "degrees": (2, 2)}
ROWS, COLUMNS = {"sizes": (4, 8), "degrees": (2, 1)}, {"sizes": (4, 8), "degrees": (1, 2)}
X: dict[str, tuple[int, ...]] = {"x": (4, 8)}
#: Graphs whose shapes are right, and whose numbers would be others, with what is said of them.
WRONG: dict[str, tuple[dict[str, tuple[int, ...]], list[Step], str]] = {
    "joins in the order of the divisions": (X, [
        cut("x", "a", (4, 8), 0), cut("a", "b", (4, 8), 1, degrees=(2, 2)),
        join("b", "c", (4, 8), 0, degrees=(1, 2)), join("c", "y", (4, 8), 1),
    ], "Combine joins other shards than those of the last division"),
    "Relu of partial sums": ({"x": (4, 8), "w": (8, 4)}, [
        cut("x", "a", (4, 8), 1), cut("w", "b", (8, 4), 0),
        ("MatMul", ["a", "b"], "p", {"sizes": (4, 4), "sums": 2}, {}),
        ("Relu", ["p"], "r", {"sizes": (4, 4), "sums": 2}, {}),
        ("Reduction", ["r"], "y", {"sizes": (4, 4)}, {"degree": 2}),
    ], r"(?s)Relu of shards .* insert Reduction\(degree=2\) of operand 0 before it"),
    "a bias added to each partial sum": ({"x": (4, 8), "w": (8, 4), "c": (4, 4)}, [
        cut("x", "a", (4, 8), 1), cut("w", "b", (8, 4), 0),
        ("Replicate", ["c"], "cc", {"sizes": (4, 4), "copies": 2}, {"degree": 2}),
        ("Gemm", ["a", "b", "cc"], "p", {"sizes": (4, 4), "sums": 2}, {}),
        ("Reduction", ["p"], "y", {"sizes": (4, 4)}, {"degree": 2}),
    ], "Gemm of shards"),
    "Softmax over a divided axis": (X, [
        cut("x", "a", (4, 8), 1), ("Softmax", ["a"], "b", COLUMNS, {}), join("b", "y", (4, 8), 1),
    ], r"(?s)Softmax of shards .* insert Combine\(axis=1, degree=2\) of operand 0 before it"),
    "layer normalization over a divided axis": ({"x": (4, 8), "s": (4,)}, [
        cut("x", "a", (4, 8), 1),
        ("Replicate", ["s"], "ss", {"sizes": (4,), "copies": 2}, {"degree": 2}),
        ("RMSNormalization", ["a", "ss"], "b", COLUMNS, {}), join("b", "y", (4, 8), 1),
    ], "RMSNormalization of shards"),
    "rows of one operand and columns of the other": ({"x": (4, 4), "z": (4, 4)}, [
        cut("x", "a", (4, 4), 0), cut("z", "b", (4, 4), 0),
        ("Transpose", ["b"], "t", {"sizes": (4, 4), "degrees": (1, 2)}, {}),
        ("MatMul", ["a", "t"], "p", {"sizes": (4, 4), "degrees": (2, 1)}, {}),
        join("p", "y", (4, 4), 0),
    ], "MatMul of shards|shards that the operands give"),
    "the contracted axis of one operand": ({"x": (4, 8), "w": (4, 4)}, [
        cut("x", "a", (4, 8), 1),
        ("Replicate", ["w"], "ww", {"sizes": (4, 4), "copies": 2}, {"degree": 2}),
        ("MatMul", ["a", "ww"], "p", {"sizes": (4, 4), "sums": 2}, {}),
        ("Reduction", ["p"], "y", {"sizes": (4, 4)}, {"degree": 2}),
    ], "MatMul of shards"),
    "shards in two orders": ({"x": (4, 8), "z": (4, 8)}, [
        cut("x", "a", (4, 8), 0), cut("a", "b", (4, 8), 1, degrees=(2, 2)),
        cut("z", "c", (4, 8), 1), cut("c", "d", (4, 8), 0, degrees=(2, 2)),
        ("Add", ["b", "d"], "e", BOTH, {}),
        join("e", "f", (4, 8), 1, degrees=(2, 1)), join("f", "y", (4, 8), 0),
    ], "Add of shards"),
    "half of an operand for all": ({"x": (4, 8), "z": (2, 8)}, [
        cut("x", "a", (4, 8), 0),
        ("Replicate", ["z"], "zz", {"sizes": (2, 8), "copies": 2}, {"degree": 2}),
        ("Add", ["a", "zz"], "b", ROWS, {}), join("b", "y", (4, 8), 0),
    ], "Add of shards"),
    "copies taken for parts": (X, [
        ("Replicate", ["x"], "a", {"sizes": (4, 8), "copies": 2}, {"degree": 2}),
        ("Relu", ["a"], "b", {"sizes": (8, 8), "degrees": (2, 1)}, {}),
        join("b", "y", (8, 8), 0),
    ], "the result is divided otherwise"),
    "copies taken for sums": (X, [
        ("Replicate", ["x"], "a", {"sizes": (4, 8), "copies": 2}, {"degree": 2}),
        ("Relu", ["a"], "b", {"sizes": (4, 8), "sums": 2}, {}),
        ("Reduction", ["b"], "y", {"sizes": (4, 8)}, {"degree": 2}),
    ], "the result is divided otherwise"),
    "rows joined as columns": (X, [
        cut("x", "a", (4, 8), 0), ("Relu", ["a"], "b", {"sizes": (2, 16), "degrees": (1, 2)}, {}),
        join("b", "y", (2, 16), 1),
    ], "the result is divided otherwise"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_graph_that_would_compute_other_numbers_is_refused(name: str) -> None:
    inputs, steps, message = WRONG[name]
    with pytest.raises(CompileError, match=message) as caught:
        parallel_graph(inputs, *steps)
    assert "of parallel graph 'drawn'" in str(caught.value.where)


def test_wrong_graphs_in_json_are_refused() -> None:
    text = parallel_graph(X, cut("x", "a", (4, 8), 1), join("a", "y", (4, 8), 1)).as_json()
    data = json.loads(text)
    operations = data["graph"]["operations"]
    operations.insert(1, {**operations[1], "op": "Softmax", "attributes": {}, "domain": ""})
    for value in (data["graph"]["values"], data["shapes"]):
        value.insert(2, value[1])
    operations[1]["outputs"], operations[2]["inputs"], operations[2]["outputs"] = [2], [2], [3]
    data["graph"]["values"][2] = {**data["graph"]["values"][2], "name": "s"}
    data["graph"]["outputs"][0]["value"] = 3
    with pytest.raises(FormatError, match="Softmax of shards"):
        ParallelComputationGraph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("inputs", []), ("inputs", [-1]), ("inputs", [1, -1]), ("inputs", [1, 1]),
        ("outputs", []), ("outputs", [-1]), ("outputs", [2, -1]),
    ],
)  # fmt: skip
def test_parallel_operators_have_one_operand_and_one_result(key: str, values: list[int]) -> None:
    text = parallel_graph(X, cut("x", "a", (4, 8), 1), join("a", "y", (4, 8), 1)).as_json()
    data = json.loads(text)
    data["graph"]["operations"][1][key] = values
    data["graph"]["outputs"][0]["value"] = 0
    what = "operand" if key == "inputs" else "result"
    with pytest.raises(FormatError, match=f"Combine has one {what}"):
        ParallelComputationGraph.from_json(json.dumps(data))


def test_a_division_is_undone_from_the_last_on() -> None:
    steps = [cut("x", "a", (4, 8), 0), cut("a", "b", (4, 8), 1, degrees=(2, 2))]
    joins = [join("b", "c", (4, 8), 1, degrees=(2, 1)), join("c", "y", (4, 8), 0)]
    graph = parallel_graph(X, *steps, *joins)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_array_equal(evaluate_graph(graph.stacked(), {"x": x})["out"], x)


def check_drawn(seeds: Sequence[int], steps: int) -> None:
    accepted = 0
    for seed in seeds:
        drawn = drawn_division(seed, steps)
        whole = drawn.join_all()
        graph = drawn.pcg(whole)
        feeds = {slot.name: drawn.whole[slot.value] for slot in drawn.inputs}
        with np.errstate(all="ignore"):
            found = evaluate_graph(graph.stacked(), feeds)
        for value in whole:
            expected = drawn.whole[value]
            largest = np.abs(expected[np.isfinite(expected)]).max(initial=1)
            np.testing.assert_allclose(
                found[f"o{value}"], expected, rtol=1e-3, atol=1e-3 * float(largest),
                err_msg=f"{drawn.values[value].name} of seed {seed}:\n{graph.text()}",
            )  # fmt: skip
        again = ParallelComputationGraph.from_json(graph.as_json())
        assert (again, again.orders) == (graph, graph.orders)
        accepted += sum(drawn.accepted.values())
    assert accepted > 10 * len(seeds)


def test_accepted_random_graphs_compute_what_the_undivided_ones_do() -> None:
    check_drawn(range(3), 25)


@pytest.mark.campaign("plans")
@pytest.mark.parametrize("part", range(4))
def test_more_accepted_random_graphs_compute_what_the_undivided_ones_do(part: int) -> None:
    check_drawn(range(part * 40, part * 40 + 40), 50)


def test_replicas_are_micro_batches_of_any_operator() -> None:
    b = ComputationGraphBuilder("over_rows")
    x = b.input("x", (4, 3), "float32")
    b.output(
        "y", b.op("Softmax", b.op("MatMul", x, b.input("x.shards", (3, 2), "float32")), axis=0)
    )
    graph = b.build()
    parameters = tuple([
        replace(s, kind=InputKind.PARAMETER) if s.name == "x.shards" else s for s in graph.inputs
    ])  # fmt: skip
    graph = replace(graph, inputs=parameters)
    both = replicated(graph, 2)
    assert both.replicas == 2
    rng = np.random.default_rng(1)
    x1, x2, w = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3), (4, 3), (3, 2)))
    found = evaluate_graph(both.stacked(), {"x": np.concatenate([x1, x2]), "x.shards": w})["y"]
    expected = [evaluate_graph(graph, {"x": each, "x.shards": w})["y"] for each in (x1, x2)]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5)
    # As one batch of eight rows it has one Softmax over all of them.
    with pytest.raises(CompileError, match="Softmax of shards"):
        ParallelComputationGraph(both.graph, both.shapes)
    with pytest.raises(CompileError, match="at least one replica"):
        ParallelComputationGraph(both.graph, both.shapes, 0)


@pytest.mark.parametrize("axes", [(), (4,)])
def test_what_has_no_replicas_is_one_error(axes: tuple[int, ...]) -> None:
    b = ComputationGraphBuilder("scalar")
    x = b.input("x", (4,), "float32")
    total = b.op("ReduceSum", x, keepdims=0)
    b.output("y", x + total if axes else total)
    for replicas in (2, 0):
        with pytest.raises(UsageError, match=r"scalar.* has no .*replicas"):
            replicated(b.build(), replicas)

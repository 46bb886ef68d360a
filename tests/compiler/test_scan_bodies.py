"""The passes work inside the bodies of scans, and nothing goes round that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler import CompileOptions
from stitch.compiler.compile_graph import optimize
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, scan
from stitch.program import Array, Operation
from tests.support.grids import every
from tests.support.scan_cases import CASES, ScanCase, expected_of, graph_of, inputs_of

Tensors = Sequence[SymbolicTensor]


def only_scan(graph: ComputationGraph) -> Operation:
    (found,) = (o for o in graph.operations if o.op == "Scan")
    return found


def shape_of(operation: Operation) -> tuple[Any, ...]:
    """States, sequences, operands and results of a scan."""
    given = [operation.attributes.get(name) for name in ("num_states", "num_scan_inputs")]
    return (*given, len(operation.inputs), len(operation.outputs))


def results(graph: ComputationGraph, arrays: Sequence[Array], **how: Any) -> list[Array]:
    with stitch.open_device("host", executor="numpy") as device:
        # Schedules may change the shapes of products, and with them the last bits.
        model = stitch.compile(graph, target="host", schedule="rounds", **how)
        made = device.load(model)(*arrays)
        return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


def three_states(wanted: Sequence[str]) -> ComputationGraph:
    """a sums x; b sums a; c counts for itself; given: a, y and c; some of the results wanted."""
    b = ComputationGraphBuilder("g")
    start = [b.input(name, (2,), "float32") for name in "abc"]
    xs, ys = (b.input(name, (4, 2), "float32") for name in ("xs", "ys"))

    def f(s: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        return [s[0] + e[0], s[1] + s[0], s[2] + 1.0], [s[0] * 2.0, e[1] + 3.0, s[2] * 4.0]

    last, given = scan(
        b, f, start, [xs, ys], taken_backward=(False, True), given_backward=(True, False, True)
    )
    named = dict(zip(("a", "b", "c", "ga", "gy", "gc"), (*last, *given), strict=True))
    for name in wanted:
        b.output(f"out_{name}", named[name])
    return b.build()


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        # States, sequences, operands, results.
        (["a"], (1, 1, 2, 1)),
        (["b"], (2, 1, 3, 2)),
        (["c"], (1, 0, 1, 1)),
        (["ga"], (1, 1, 2, 2)),
        (["gy"], (0, 1, 1, 1)),
        (["gc", "gy"], (1, 1, 2, 3)),
        (["a", "b", "c", "ga", "gy", "gc"], (3, 2, 5, 6)),
    ],
    ids=str,
)
def test_only_what_is_read_goes_round(wanted: list[str], shape: tuple[int, ...]) -> None:
    graph = three_states(wanted)
    assert shape_of(only_scan(optimize(graph))) == shape
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s, np.float32) for s in ((2,), (2,), (2,), (4, 2), (4, 2))]
    whole = results(three_states(["a", "b", "c", "ga", "gy", "gc"]), arrays)
    every = dict(zip(("a", "b", "c", "ga", "gy", "gc"), whole, strict=True))
    a, y = arrays[0], arrays[4]
    np.testing.assert_allclose(every["a"], a + arrays[3].sum(0), 1e-5)
    np.testing.assert_array_equal(every["gy"], y[::-1] + np.float32(3))
    for name, found in zip(wanted, results(graph, arrays), strict=True):
        np.testing.assert_array_equal(found, every[name])


def test_a_scan_of_nothing_but_such_states_is_gone() -> None:
    b = ComputationGraphBuilder("g")
    (last,), _ = scan(b, lambda s, _: ([s[0]], []), [b.input("x", (2,), "float32")], [], count=9)
    b.output("y", last)
    graph = b.build()
    assert [o.op for o in graph.operations] == ["Scan"]
    assert not any(o.op == "Scan" for o in optimize(graph).operations)
    assert optimize(graph).bodies == ()
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(results(graph, [x])[0], x)


@pytest.mark.parametrize("case", every(2, CASES), ids=lambda case: case.name)
def test_each_result_alone_is_what_it_is_among_all(case: ScanCase) -> None:
    graph, arrays = graph_of(case, 5), inputs_of(case, 5)
    whole, plain = results(graph, arrays), unoptimised(graph, arrays)
    for index, expected in enumerate(whole):
        assert np.array_equal(expected, plain[index])
        alone = replace(graph, outputs=(graph.outputs[index],))
        np.testing.assert_array_equal(results(alone, arrays)[0], expected)
    assert [a.shape for a in whole] == [a.shape for a in expected_of(case, 5)]


def unoptimised(graph: ComputationGraph, arrays: Sequence[Array]) -> list[Array]:
    """The results without any pass."""
    from stitch.compiler import compile_graph
    from stitch.machine import load_machine
    from stitch.ttb import Binary

    machine = load_machine("host")
    program = compile_graph(graph, machine, CompileOptions(optimize=False)).program
    assert any(o.op == "Scan" for o in program.operations)
    with stitch.open_device("host", executor="numpy") as device:
        made = device.load(Binary((program,), machine.shape, "test"))(*arrays)
        return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("schedule", [None, "rounds", "batch"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rounds_in_which_nothing_differs(count: int, schedule: Any) -> None:
    """Nobody reads the sequence, and the state stays: nothing goes round; in lanes, neither."""
    b = ComputationGraphBuilder("g")
    xs, w = b.input("xs", (count, 3), "float32"), b.input("w", (3,), "float32")
    rows = b.input("rows", (2, 3), "float32")

    def f(s: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
        return [s[0]], [b.tanh(s[0])]

    def lane(_: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        return [], scan(b, f, [e[0]], [xs])[1]

    for name, made in (
        ("given", scan(b, f, [w], [xs])[1]),
        ("lanes", scan(b, lane, [], [rows])[1]),
    ):
        b.output(name, made[0])
    arrays = [np.ones(shape, np.float32) * 0.5 for shape in ((count, 3), (3,), (2, 3))]
    model = stitch.compile(b.build(), target="host", schedule=schedule)
    with stitch.open_device("host", executor="numpy") as device:
        found = device.load(model)(*arrays)
        assert isinstance(found, tuple)
        given, lanes = (t.numpy() for t in found)
    np.testing.assert_allclose(given, np.full((count, 3), np.tanh(0.5)), 1e-6)
    np.testing.assert_allclose(lanes, np.full((2, count, 3), np.tanh(0.5)), 1e-6)


def test_scans_of_equal_constants_are_told_apart_by_their_bodies() -> None:
    b = ComputationGraphBuilder("g")
    rows = b.constant(np.ones((4, 5), np.float32))

    def two(_: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        return [], [e[0][:2]]

    def three(_: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        return [], [e[0][:3]]

    for f in (two, three):
        _, (given,) = scan(b, f, [], [rows])
        b.output(f"shape_{f.__name__}", b.apply("Shape", [given], 1, {})[0])
    assert [list(shape) for shape in results(b.build(), [])] == [[4, 2], [4, 3]]

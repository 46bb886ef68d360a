"""Scan and Loop of ONNX stay loops where all rounds are alike, and are written out elsewhere.

ONNX's own tests of loops: tests/conformance/test_onnx_node_suite.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import stitch
from stitch.cli import compile_main as compile_command
from stitch.errors import CompileError, UsageError
from stitch.frontend.onnx import from_onnx, node_walk
from stitch.graph import ComputationGraph
from stitch.program import Array
from tests.support.onnx.models import BOOL, INT64, drawn, info, model, theirs

node = helper.make_node
HIDDEN, WIDTH = 8, 4


def scans(graph: ComputationGraph) -> list[int]:
    """How many rounds the scans of a graph have."""
    found = [o.attributes["count"] for o in graph.operations if o.op == "Scan"]
    return [count for count in found if isinstance(count, int)]


def ours(proto: Any, arrays: Sequence[Array], **how: Any) -> list[Array]:
    """The results on the host."""
    with stitch.open_device("host") as device:
        made = device.load(stitch.compile(proto, tuple(arrays), target="host", **how))(*arrays)
        return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


def assert_right(proto: Any, arrays: Sequence[Array], kept: Sequence[int]) -> None:
    """A model has these scans, and gives what ONNX's reference does, kept or written out."""
    assert scans(from_onnx(proto, tuple(arrays))) == list(kept)
    assert scans(from_onnx(proto, tuple(arrays), unroll=4096)) == []
    expected = theirs(proto, arrays)
    for found in (ours(proto, arrays), ours(proto, arrays, unroll=4096)):
        assert [a.shape for a in found] == [a.shape for a in expected]
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other, 1e-5, 1e-6)


# Scans ---------------------------------------------------------------------------------------


def lstm(length: int) -> onnx.ModelProto:
    """A Scan of one LSTM cell whose weights are around it."""
    rng = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "W"], ["xw"]), node("MatMul", ["h", "R"], ["hr"]),
        node("Add", ["xw", "hr"], ["gates"]),
        node("Split", ["gates"], ["i", "o", "f", "n"], axis=1, num_outputs=4),
        node("Sigmoid", ["i"], ["si"]), node("Sigmoid", ["o"], ["so"]),
        node("Sigmoid", ["f"], ["sf"]), node("Tanh", ["n"], ["tn"]),
        node("Mul", ["sf", "c"], ["old"]), node("Mul", ["si", "tn"], ["new"]),
        node("Add", ["old", "new"], ["c_out"]), node("Tanh", ["c_out"], ["tc"]),
        node("Mul", ["so", "tc"], ["h_out"]), node("Identity", ["h_out"], ["y"]),
    ]  # fmt: skip
    state = [2, HIDDEN]
    body = helper.make_graph(
        nodes, "cell", [info("h", state), info("c", state), info("x", [2, WIDTH])],
        [info("h_out", state), info("c_out", state), info("y", state)],
    )  # fmt: skip
    weights = {
        "W": rng.standard_normal((WIDTH, 4 * HIDDEN), np.float32),
        "R": rng.standard_normal((HIDDEN, 4 * HIDDEN), np.float32) * np.float32(0.3),
    }
    inputs = [info("h0", state), info("c0", state), info("xs", [length, 2, WIDTH])]
    scan = node("Scan", ["h0", "c0", "xs"], ["hn", "cn", "ys"], body=body, num_scan_inputs=1)
    return model([scan], inputs, ["hn", "cn", "ys"], weights)


def test_an_lstm_cell_in_a_scan_is_right() -> None:
    arrays = [drawn(2, HIDDEN), drawn(2, HIDDEN, seed=4), drawn(9, 2, WIDTH)]
    assert_right(lstm(9), arrays, [9])


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_loops_of_at_most_four_rounds_are_written_out(length: int) -> None:
    arrays = [drawn(2, HIDDEN), drawn(2, HIDDEN), drawn(length, 2, WIDTH)]
    assert scans(from_onnx(lstm(length), arrays)) == ([length] if length > 4 else [])
    assert scans(from_onnx(lstm(length), arrays, unroll=length)) == []
    assert scans(from_onnx(lstm(length), arrays, unroll=0)) == [length]


@pytest.mark.parametrize("backward", [[0, 1], [1, 0]])
@pytest.mark.parametrize("axes", [[0, 0], [1, -1]])
def test_axes_and_directions_of_a_kept_scan(axes: list[int], backward: list[int]) -> None:
    nodes = [node("Add", ["s", "a"], ["t"]), node("Mul", ["t", "b"], ["u"]),
             node("Sub", ["a", "b"], ["v"])]  # fmt: skip
    body = helper.make_graph(
        nodes, "step", [info(name, [6]) for name in "sab"], [info(name, [6]) for name in "tuv"]
    )
    scan = node(
        "Scan", ["x", "as", "bs"], ["y", "us", "vs"], body=body, num_scan_inputs=2,
        scan_input_axes=axes, scan_input_directions=backward, scan_output_axes=[1, -2],
        scan_output_directions=backward[::-1],
    )  # fmt: skip
    proto = model([scan], [info("x", [6]), info("as", [6, 6]), info("bs", [6, 6])],
                  ["y", "us", "vs"])  # fmt: skip
    arrays = [drawn(6), drawn(6, 6), drawn(6, 6, seed=5)]
    assert scans(from_onnx(proto, arrays)) == [6]
    # ONNX's reference knows one direction and axis 0 only.
    for kept, written in zip(ours(proto, arrays), ours(proto, arrays, unroll=6), strict=True):
        np.testing.assert_allclose(kept, written, 1e-6)


def test_a_scan_within_a_scan_reads_names_of_both() -> None:
    inner = helper.make_graph(
        [node("Mul", ["e", "s"], ["p"]), node("Add", ["q", "p"], ["q_out"]),
         node("Mul", ["q_out", "w"], ["r"])], "inner",
        [info("q", [2]), info("e", [2])], [info("q_out", [2]), info("r", [2])],
    )  # fmt: skip
    outer = helper.make_graph(
        [node("Scan", ["s", "row"], ["q_last", "rs"], body=inner, num_scan_inputs=1),
         node("Tanh", ["q_last"], ["s_out"]), node("Add", ["rs", "b"], ["t"])], "outer",
        [info("s", [2]), info("row", [5, 2])], [info("s_out", [2]), info("t", [5, 2])],
    )  # fmt: skip
    outer.initializer.append(helper.make_tensor("b", 1, [2], [0.5, 0.25]))
    nodes = [node("Scan", ["x", "rows"], ["y", "z"], body=outer, num_scan_inputs=1)]
    proto = model(nodes, [info("x", [2]), info("rows", [6, 5, 2]), info("w", [2])], ["y", "z"])
    arrays = [drawn(2), drawn(6, 5, 2), drawn(2, seed=6)]
    graph = from_onnx(proto, arrays)
    assert sum(o.op == "Scan" for body in graph.bodies for o in body.operations) == 1
    assert_right(proto, arrays, [6])


# Loops ---------------------------------------------------------------------------------------


def loop(
    nodes: list[Any], states: dict[str, list[int]], results: dict[str, list[int]], **around: Any
) -> onnx.ModelProto:
    """A Loop of six rounds, which goes on for ever unless its nodes make `go_on`."""
    made = {name for one in nodes for name in one.output}
    goes_on = [] if "go_on" in made else [node("Identity", ["c"], ["go_on"])]
    body = helper.make_graph(
        nodes + goes_on, "rounds",
        [info("i", [], INT64), info("c", [], BOOL), *(info(n, s) for n, s in states.items())],
        [info("go_on", [], BOOL), *(info(n, s) for n, s in results.items())],
    )  # fmt: skip
    names = [f"out{i}" for i in range(len(results))]
    weights = {"m": np.array(6, np.int64), "go": np.array(True), **around}
    return model(
        [node("Loop", ["m", "go", *(f"{name}0" for name in states)], names, body=body)],
        [*(info(f"{name}0", shape) for name, shape in states.items()), info("x", [6, 2])],
        names, weights,
    )  # fmt: skip


def test_a_loop_of_known_length_stays_and_its_number_goes_round() -> None:
    nodes = [
        node("Cast", ["i"], ["f"], to=1), node("Gather", ["x", "i"], ["row"]),
        node("Mul", ["row", "f"], ["scaled"]), node("Add", ["s", "scaled"], ["t"]),
        node("Mul", ["t", "w"], ["seen"]),
    ]  # fmt: skip
    proto = loop(nodes, {"s": [2]}, {"t": [2], "seen": [2]}, w=np.array([2, 3], np.float32))
    assert_right(proto, [drawn(2), drawn(6, 2)], [6])


def test_a_loop_without_states_stays() -> None:
    nodes = [node("Cast", ["i"], ["f"], to=1), node("Mul", ["x", "f"], ["seen"])]
    proto, x = loop(nodes, {}, {"seen": [6, 2]}), drawn(6, 2)
    assert scans(from_onnx(proto, [x])) == [6]
    for how in ({}, {"unroll": 6}):
        (found,) = ours(proto, [x], **how)
        np.testing.assert_allclose(found, np.stack([x * i for i in range(6)]), 1e-6)


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        # The state grows, the number of the round decides a shape, the loop ends after four.
        ([node("Concat", ["s", "s"], ["t"], axis=0)], [128]),
        ([node("Add", ["i", "one"], ["n"]), node("Expand", ["half", "n"], ["h"]),
          node("ReduceSum", ["h"], ["total"], keepdims=0), node("Add", ["s", "total"], ["t"])],
         [2]),
        ([node("Less", ["i", "three"], ["go_on"]), node("Add", ["s", "half"], ["t"])], [2]),
    ],
    ids=["growth", "number", "end"],
)  # fmt: skip
def test_loops_whose_rounds_differ_are_written_out(nodes: list[Any], shape: list[int]) -> None:
    proto = loop(
        nodes, {"s": [2]}, {"t": shape}, one=np.array([1]), half=np.array([0.5], np.float32),
        three=np.array(3),
    )  # fmt: skip
    assert_right(proto, [drawn(2), drawn(6, 2)], [])


def test_a_loop_is_written_out_where_what_follows_must_know_what_it_comes_to() -> None:
    # One state is data, the other becomes a shape.
    body = helper.make_graph(
        [node("Add", ["n", "one"], ["n_out"]), node("Add", ["s", "s"], ["s_out"]),
         node("Identity", ["c"], ["go_on"])], "rounds",
        [info("i", [], INT64), info("c", [], BOOL), info("n", [1], INT64), info("s", [1])],
        [info("go_on", [], BOOL), info("n_out", [1], INT64), info("s_out", [1])],
    )  # fmt: skip
    nodes = [
        node("Loop", ["m", "go", "one", "x"], ["n", "s"], body=body),
        node("Expand", ["s", "n"], ["y"]),
    ]
    weights = {"m": np.array(6, np.int64), "go": np.array(True), "one": np.array([1])}
    assert_right(model(nodes, [info("x", [1])], ["y"], weights), [drawn(1)], [])


def test_more_rounds_than_could_be_written_out() -> None:
    proto = loop([node("Add", ["s", "half"], ["t"])], {"s": [2]}, {"t": [2]},
                 half=np.array([0.5], np.float32), m=np.array(100_000))  # fmt: skip
    (found,) = ours(proto, [np.zeros(2, np.float32), drawn(6, 2)])
    assert found.tolist() == [50_000.0, 50_000.0]


# How it is said ------------------------------------------------------------------------------


def test_the_command_and_the_function_take_unroll(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(lstm(6), path)
    for words, kept in (([], [6]), (["--unroll", "6"], [])):
        assert compile_command([str(path), *words, "-o", str(tmp_path / "m.ttb")]) == 0
        (program,) = stitch.load(tmp_path / "m.ttb").programs
        assert [o.attributes["count"] for o in program.operations if o.op == "Scan"] == kept
    with pytest.raises(UsageError, match="unrolled in ONNX models"):
        stitch.compile(lambda x: x + x, (np.ones(2, np.float32),), unroll=3)


def test_loops_within_loops_ask_for_no_more_bodies_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_walk, "MAX_BODIES", 20)
    assert scans(from_onnx(lstm(21))) == [21]
    assert scans(from_onnx(lstm(20), unroll=64)) == []
    with pytest.raises(CompileError, match="come to more than 20 bodies"):
        from_onnx(lstm(21), unroll=64)

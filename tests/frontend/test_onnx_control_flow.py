"""If, Loop and Scan: inlined, unrolled, or both sides computed; as ONNX's reference has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import stitch
from stitch.errors import CompileError, FormatError, TaskError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import BOOL, INT64, drawn, info, model, ours, theirs
from tests.support.stitched_models import one

node = helper.make_node


def branch(name: str, nodes: list[Any]) -> Any:
    return helper.make_graph(nodes, name, [], [info(nodes[-1].output[0], None)])


def sides(then: list[Any], other: list[Any]) -> dict[str, Any]:
    return {"then_branch": branch("then", then), "else_branch": branch("else", other)}


def if_positive(then: list[Any], other: list[Any]) -> Any:
    """A model that asks whether the sum of x is positive."""
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["c"]),
        node("If", ["c"], ["y"], **sides(then, other)),
    ]
    return model(nodes, [info("x", [4])], ["y"], {"zero": np.zeros((), np.float32)})


@pytest.mark.parametrize("sign", [1, -1])
def test_both_sides_are_computed_where_the_condition_is_data(sign: int) -> None:
    proto = if_positive([node("Neg", ["x"], ["a"])], [node("Exp", ["x"], ["b"])])
    graph = from_onnx(proto)
    assert graph.operations[-1].op == "Where"
    x = np.abs(drawn(4)) * sign
    np.testing.assert_allclose(ours(proto, [x])[0], theirs(proto, [x])[0], rtol=1e-6)


def test_sides_of_other_shapes_or_that_may_fail_are_refused() -> None:
    for other in (
        [node("Shape", ["x"], ["b"])],
        [node("Concat", ["x", "x"], ["b"], axis=0)],
        [node("Cast", ["x"], ["i"], to=INT64), node("Gather", ["x", "i"], ["b"])],
    ):
        with pytest.raises(CompileError, match=r"If is not supported .control flow"):
            from_onnx(if_positive([node("Neg", ["x"], ["a"])], other))


def test_a_condition_that_is_an_input_is_fixed_where_the_sides_differ() -> None:
    both = sides([node("Neg", ["x"], ["a"])], [node("Concat", ["x", "x"], ["b"], axis=0)])
    inputs = [info("x", [3]), info("c", [], BOOL)]
    proto = model([node("If", ["c"], ["y"], **both)], inputs, ["y"])
    x = drawn(3)
    for given in (True, False):
        (found,) = ours(proto, [x, np.array(given)])
        np.testing.assert_array_equal(found, -x if given else np.concatenate([x, x]))
    with stitch.open_device("host") as device:
        program = device.load(stitch.compile(proto, (x, np.array(True)), target="host"))
        with pytest.raises(TaskError, match="'c'"):
            one(program(x, np.array(False))).numpy()


def loop_body() -> Any:
    """The state grows by the round's number and by w; rounds leave what they saw; odd stops."""
    nodes = [
        node("Cast", ["i"], ["f"], to=1),
        node("Add", ["v", "f"], ["a"]),
        node("Add", ["a", "w"], ["b"]),
        node("Less", ["i", "last"], ["c_out"]),
        node("Mul", ["a", "two"], ["seen"]),
    ]
    inputs = [info("i", [], INT64), info("c_in", [], BOOL), info("v", [2])]
    outputs = [info("c_out", [], BOOL), info("b", [2]), info("seen", [2])]
    body = helper.make_graph(nodes, "rounds", inputs, outputs)
    body.initializer.append(helper.make_tensor("two", 1, [], [2.0]))
    return body


def loop_model(limit: int | None, last: int, first: bool | None = None) -> Any:
    weights: dict[str, Array] = {"last": np.array(last, np.int64), "w": np.ones(2, np.float32)}
    if limit is not None:
        weights["m"] = np.array(limit, np.int64)
    if first is not None:
        weights["c"] = np.array(first)
    operands = ["" if limit is None else "m", "" if first is None else "c", "x"]
    nodes = [node("Loop", operands, ["y", "z"], body=loop_body())]
    return model(nodes, [info("x", [2])], ["y", "z"], weights)


@pytest.mark.parametrize(
    ("limit", "last", "first"),
    [(5, 99, True), (5, 2, True), (None, 3, True), (1, 99, True), (7, 0, True)],
)
def test_a_loop_is_unrolled_as_the_reference_runs_it(
    limit: int | None, last: int, first: bool | None
) -> None:
    x = drawn(2)
    proto = loop_model(limit, last, first)
    for mine, other in zip(ours(proto, [x]), theirs(proto, [x]), strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_a_condition_that_is_not_given_is_true() -> None:
    x = drawn(2)
    pairs = zip(ours(loop_model(5, 2), [x]), ours(loop_model(5, 2, True), [x]), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_loop_without_rounds_gives_its_states_and_empty_rows() -> None:
    x = drawn(2)
    for proto in (loop_model(0, 9), loop_model(5, 9, False)):
        y, z = ours(proto, [x])
        np.testing.assert_array_equal(y, x)
        assert z.shape == (0, 2)


def test_a_loop_that_never_ends_is_refused() -> None:
    with pytest.raises(CompileError, match="more than 4096 rounds"):
        from_onnx(loop_model(None, 10**6, True))


def test_trip_counts_that_are_inputs_are_fixed_by_their_examples() -> None:
    nodes = [node("Loop", ["m", "", "x"], ["y", "z"], body=loop_body())]
    weights: dict[str, Array] = {"last": np.array(9, np.int64), "w": np.ones(2, np.float32)}
    proto = model(nodes, [info("m", [], INT64), info("x", [2])], ["y", "z"], weights)
    assert ours(proto, [np.array(3), drawn(2)])[1].shape == (3, 2)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scan_goes_along_its_axes(axis: int, backward: int) -> None:
    nodes = [
        node("Add", ["s", "row"], ["t"]),
        node("Mul", ["t", "w"], ["seen"]),
    ]
    inputs = [info("s", None), info("row", None)]
    body = helper.make_graph(nodes, "step", inputs, [info("t", None), info("seen", None)])
    scan = node(
        "Scan", ["x", "rows"], ["y", "z"], body=body, num_scan_inputs=1, scan_input_axes=[axis],
        scan_input_directions=[backward], scan_output_axes=[1], scan_output_directions=[backward],
    )  # fmt: skip
    rows = drawn(3, 3)
    proto = model([scan], [info("x", [3]), info("rows", [3, 3])], ["y", "z"],
                  {"w": np.full(1, 2, np.float32)})  # fmt: skip
    y, z = ours(proto, [drawn(3), rows])
    lines = [np.take(rows, i, axis) for i in range(3)]
    state, seen = drawn(3), []
    for line in reversed(lines) if backward else lines:
        state = state + line
        seen.append(state * 2)
    np.testing.assert_allclose(y, state, rtol=1e-6)
    wanted = np.stack(list(reversed(seen)) if backward else seen, axis=1)
    np.testing.assert_allclose(z, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (node("Loop", ["m", "", "x"], ["y"]), "Loop lacks its body"),
        (node("Loop", ["m", "", "x", "x"], ["y"], body=loop_body()), "does not fit its operands"),
        (node("Scan", ["x"], ["y"], body=loop_body(), num_scan_inputs=2), "num_scan_inputs"),
        (node("Scan", ["m"], ["y"], body=branch("b", [node("Neg", ["x"], ["n"])]),
              num_scan_inputs=1), "does not fit its operands"),
    ],
)  # fmt: skip
def test_a_node_whose_body_does_not_fit_is_refused(made: Any, words: str) -> None:
    proto = model([made], [info("x", [2])], ["y"], {"m": np.array(2, np.int64)})
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(proto)


def test_a_value_inside_a_body_may_hide_one_outside() -> None:
    body = helper.make_graph(
        [node("Neg", ["v"], ["x"]), node("Identity", ["c_in"], ["c_out"])], "rounds",
        [info("i", [], INT64), info("c_in", [], BOOL), info("v", [2])],
        [info("c_out", [], BOOL), info("x", [2])],
    )  # fmt: skip
    nodes = [node("Loop", ["m", "", "x"], ["n"], body=body), node("Sub", ["n", "x"], ["y"])]
    proto = model(nodes, [info("x", [2])], ["y"], {"m": np.array(3, np.int64)})
    x = drawn(2)
    np.testing.assert_array_equal(ours(proto, [x])[0], -2 * x)

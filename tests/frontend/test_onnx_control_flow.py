"""If, Loop and Scan: inlined, unrolled, or decided by data; as ONNX Runtime and ONNX's reference
have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import stitch
from stitch.errors import CompileError, FormatError, TaskError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.grids import in_turn
from tests.support.onnx.models import BOOL, INT64, drawn, info, model, ours, runtime, theirs
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


def assert_right(proto: Any, *inputs: Sequence[Array]) -> None:
    """One program gives, for each of these inputs, what ONNX Runtime does, on every executor."""
    compiled = stitch.compile(proto, tuple(inputs[0]), target="host")
    for executor in ("numpy", "onnxruntime", "auto"):
        with stitch.open_device("host", executor=executor) as device:
            program = device.load(compiled)
            for arrays in inputs:
                made = program(*arrays)
                found = [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]
                for mine, other in zip(found, runtime(proto, arrays), strict=True):
                    assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
                    np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


POSITIVE, NEGATIVE = [np.abs(drawn(4))], [-np.abs(drawn(4))]


def test_data_choose_between_the_sides_of_an_if() -> None:
    proto = if_positive([node("Neg", ["x"], ["a"])], [node("Exp", ["x"], ["b"])])
    operations = from_onnx(proto).operations
    assert [o.op for o in operations if o.op in ("Neg", "Exp", "Where")] == []
    assert sum(o.op == "Scan" for o in operations) == 2
    assert_right(proto, POSITIVE, NEGATIVE)


def endless() -> Any:
    """The body of a loop that ends when its state, which stays, is not a number."""
    nodes = [
        node("IsNaN", ["v"], ["nan"]), node("Not", ["nan"], ["go"]),
        node("Cast", ["go"], ["go_i"], to=INT64), node("ReduceMin", ["go_i"], ["m"], keepdims=0),
        node("Cast", ["m"], ["c_out"], to=BOOL), node("Identity", ["v"], ["w"]),
    ]  # fmt: skip
    inputs = [info("i", [], INT64), info("c_in", [], BOOL), info("v", [4])]
    return helper.make_graph(
        nodes, "endless", inputs, [info("c_out", [], BOOL), info("w", [4])]
    )  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        # Two thousand million rounds.
        [node("Loop", ["", "", "x"], ["b"], body=endless())],
        # Out of range: an error of every executor.
        [node("Mul", ["x", "big"], ["h"]), node("Cast", ["h"], ["i"], to=INT64),
         node("Gather", ["x", "i"], ["b"])],
    ],
    ids=["endless", "out of range"],
)  # fmt: skip
def test_the_side_that_is_not_taken_is_not_computed(other: list[Any]) -> None:
    proto = if_positive([node("Neg", ["x"], ["a"])], other)
    proto.graph.initializer.append(helper.make_tensor("big", 1, [], [1e6]))
    x = POSITIVE[0] + 1
    compiled = stitch.compile(proto, (x,), target="host")
    for executor in ("numpy", "onnxruntime", "auto"):
        with stitch.open_device("host", executor=executor) as device:
            np.testing.assert_array_equal(one(device.load(compiled)(x)).numpy(), -x)


def test_a_side_may_be_a_value_from_around_as_it_is() -> None:
    proto = if_positive([node("Identity", ["x"], ["a"])], [node("Neg", ["x"], ["b"])])
    (taken,) = (a.g for a in proto.graph.node[-1].attribute if a.name == "then_branch")
    del taken.node[:]
    taken.output[0].CopyFrom(info("x", [4]))
    for x in (*POSITIVE, *NEGATIVE):
        np.testing.assert_array_equal(ours(proto, [x])[0], np.abs(x))


def test_settings_that_sides_read_from_around_are_known_in_them() -> None:
    then = [
        node("Reshape", ["x", "shape"], ["r"]), node("Resize", ["r", "", "scales"], ["s"]),
        node("Reshape", ["s", "flat"], ["a"]),
    ]  # fmt: skip
    other = [node("Concat", ["x", "x"], ["b"], axis=0)]
    proto = if_positive(then, other)
    for name, array in (("shape", np.array([1, 1, 2, 2])), ("flat", np.array([-1])),
                        ("scales", np.array([1, 1, 1, 2], np.float32))):  # fmt: skip
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    assert_right(proto, POSITIVE, NEGATIVE)


def test_sides_may_make_sequences() -> None:
    then = [node("SequenceConstruct", ["x", "x"], ["a"])]
    other = [node("Neg", ["x"], ["n"]), node("SequenceConstruct", ["n", "x"], ["b"])]
    proto = if_positive(then, other)
    proto.graph.node[-1].output[0] = "list"
    proto.graph.node.append(node("SequenceAt", ["list", "first"], ["y"]))
    proto.graph.initializer.append(helper.make_tensor("first", INT64, [], [0]))
    for x in (*POSITIVE, *NEGATIVE):
        np.testing.assert_array_equal(ours(proto, [x])[0], np.abs(x))


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


def test_a_loop_without_rounds_gives_its_states_and_empty_rows() -> None:
    x = drawn(2)
    for proto in (loop_model(0, 9), loop_model(5, 9, False)):
        y, z = ours(proto, [x])
        np.testing.assert_array_equal(y, x)
        assert z.shape == (0, 2)


def test_trip_counts_that_are_inputs_are_fixed_by_their_examples() -> None:
    nodes = [node("Loop", ["m", "", "x"], ["y", "z"], body=loop_body())]
    weights: dict[str, Array] = {"last": np.array(9, np.int64), "w": np.ones(2, np.float32)}
    proto = model(nodes, [info("m", [], INT64), info("x", [2])], ["y", "z"], weights)
    assert ours(proto, [np.array(3), drawn(2)])[1].shape == (3, 2)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scan_goes_along_its_axes(axis: int, backward: int) -> None:
    nodes = [node("Add", ["s", "row"], ["t"]), node("Mul", ["t", "w"], ["seen"])]
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


# Loops that end by data --------------------------------------------------------------------------

ASKED: dict[str, Array] = {
    "hundred": np.array(100, np.float32),
    "w": np.array([1, 0.5], np.float32),
}


def doubling(*, counted: bool = False, asked: list[int] | None = None) -> Any:
    """A round adds its state, `w` and, if counted, its number to the state; the loop goes on while
    the sum is below a hundred. `asked`: the shape of its numbers."""
    nodes = [
        node("Add", ["v", "v"], ["a"]), node("Add", ["a", "w"], ["b"]),
        node("Cast", ["i"], ["f"], to=1), node("Add", ["b", "f"], ["n"]),
        node("Identity", ["n" if counted else "b"], ["out"]),
        node("ReduceSum", ["out"], ["s"], keepdims=0), node("Less", ["s", "hundred"], ["less"]),
        node("Reshape", ["less", "asked"], ["c_out"]),
    ]  # fmt: skip
    shape = asked or []
    inputs = [info("i", shape, INT64), info("c_in", shape, BOOL), info("v", [2])]
    body = helper.make_graph(
        nodes, "rounds", inputs, [info("c_out", shape, BOOL), info("out", [2])]
    )
    body.initializer.append(helper.make_tensor("asked", INT64, [len(shape)], shape))
    return body


def until_hundred(
    limit: int | str, first: bool | str | None, *, shape: list[int] | None = None, **how: Any
) -> Any:
    """A model of one such loop; `limit` and `first` are constants, inputs, or `computed`."""
    weights: dict[str, Array] = dict(ASKED)
    inputs, nodes = [info("x", [2])], []
    if isinstance(limit, int):
        weights["m"] = np.full(shape or [], limit)
    elif limit == "input":
        inputs.append(info("m", shape or [], INT64))
    else:
        nodes += [node("ReduceMax", ["x"], ["top"], keepdims=0),
                  node("Cast", ["top"], ["m"], to=INT64)]  # fmt: skip
    if isinstance(first, bool):
        weights["c"] = np.full(shape or [], first)
    elif first is not None:
        nodes += [node("ReduceSum", ["x"], ["sum"], keepdims=0),
                  node("Less", ["sum", "hundred"], ["c"])]  # fmt: skip
    operands = ["" if limit == "" else "m", "" if first is None else "c", "x"]
    nodes.append(node("Loop", operands, ["y"], body=doubling(asked=shape, **how)))
    return model(nodes, inputs, ["y"], weights)


SMALL, LARGE, THREE = ([np.array(x, np.float32)] for x in ([1, 2], [90, 20], [3, -40]))


@pytest.mark.parametrize(
    ("counted", "first", "limit"),
    in_turn([False, True], [None, True, False, "computed"], [2, 60, 2**62, "computed"]),
)
def test_a_loop_ends_where_its_condition_or_its_computed_trip_count_says(
    limit: int | str, first: bool | str | None, counted: bool
) -> None:
    assert_right(until_hundred(limit, first, counted=counted), SMALL, LARGE, THREE)


def test_numbers_of_a_loop_may_have_one_axis() -> None:
    assert_right(until_hundred(5, True, shape=[1], counted=True), SMALL, LARGE, THREE)


def test_a_trip_count_that_is_an_input_decides_at_each_call() -> None:
    counts = [[*SMALL, np.array(count)] for count in (3, 0, 7, 1)]
    assert_right(until_hundred("input", None), *counts)


def test_a_loop_that_ends_by_data_stays_in_the_body_of_a_scan() -> None:
    nodes = [node("Add", ["state", "e"], ["x"]),
             node("Loop", ["", "", "x"], ["t"], body=doubling()),
             node("Mul", ["t", "w"], ["o"]), node("Mul", ["t", "small"], ["u"])]  # fmt: skip
    step = helper.make_graph(nodes, "step", [info("state", [2]), info("e", [2])],
                             [info("u", [2]), info("o", [2])])  # fmt: skip
    scan = node("Scan", ["x0", "rows"], ["y", "z"], body=step, num_scan_inputs=1)
    inputs = [info("x0", [2]), info("rows", [6, 2])]
    proto = model([scan], inputs, ["y", "z"], ASKED | {"small": np.array(0.01, np.float32)})
    assert_right(proto, [drawn(2), np.abs(drawn(6, 2))], [drawn(2), np.abs(drawn(6, 2)) * 30])


def test_results_of_rounds_that_nobody_reads_are_not_collected() -> None:
    body = doubling()
    body.node.append(node("Neg", ["out"], ["seen"]))
    body.output.append(info("seen", [2]))
    for results in (["y"], ["y", ""]):
        nodes = [node("Loop", ["", "", "x"], results, body=body)]
        proto = model(nodes, [info("x", [2])], ["y"], ASKED)
        (found,) = ours(proto, SMALL)
        np.testing.assert_array_equal(found, runtime(until_hundred(2**62, True), SMALL)[0])
    nodes = [node("Loop", ["", "", "x"], ["y", "z"], body=body)]
    with pytest.raises(CompileError, match="the size of its result depends on data"):
        from_onnx(model(nodes, [info("x", [2])], ["y", "z"], ASKED))


def test_a_state_that_changes_its_type_in_a_loop_by_data_is_refused() -> None:
    body = doubling()
    body.node.append(node("Concat", ["out", "out"], ["longer"], axis=0))
    body.output[1].CopyFrom(info("longer", None))
    nodes = [node("Loop", ["", "", "x"], ["y"], body=body)]
    with pytest.raises(CompileError, match="Loop is not supported"):
        from_onnx(model(nodes, [info("x", [2])], ["y"], ASKED))

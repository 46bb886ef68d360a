"""Sequences and optional values of ONNX models: bookkeeping while reading, tensors at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import stitch
from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import FLOAT, INT64, drawn, info, model

node = helper.make_node


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def scalar(value: int) -> Array:
    return np.array(value, np.int64)


def run(proto: Any, *given: Any) -> list[Array]:
    """The outputs, those of sequences one by one."""
    with stitch.open_device("host") as device:
        program = device.load(stitch.compile(proto, given, target="host"))
        flat = [x for one in given for x in (one if isinstance(one, list) else [one])]
        made = program(*[x for x in flat if x is not None])
        return [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]


def sequence(name: str, shape: list[int | str] | None = None) -> Any:
    return helper.make_tensor_sequence_value_info(name, FLOAT, shape)


def test_a_sequence_comes_in_and_goes_out_as_its_tensors() -> None:
    nodes = [node("SequenceInsert", ["s", "x", "p"], ["t"])]
    proto = model(nodes, [sequence("s", ["n"]), info("x", [2])], ["t"], {"p": scalar(0)})
    given = [drawn(3), drawn(4)]
    graph = from_onnx(proto, (given, drawn(2)))
    assert [slot.name for slot in graph.inputs] == ["s[0]", "s[1]", "x"]
    assert [slot.name for slot in graph.outputs] == ["t[0]", "t[1]", "t[2]"]
    assert [a.shape for a in run(proto, given, drawn(2))] == [(2,), (3,), (4,)]


def test_a_position_that_is_an_input_is_fixed_by_its_example() -> None:
    nodes = [node("SequenceConstruct", ["x", "y"], ["s"]), node("SequenceAt", ["s", "p"], ["out"])]
    proto = model(nodes, [info("x", [2]), info("y", [3]), info("p", [], INT64)], ["out"])
    x, y = drawn(2), drawn(3)
    np.testing.assert_array_equal(run(proto, x, y, scalar(1))[0], y)
    np.testing.assert_array_equal(run(proto, x, y, scalar(0))[0], x)


@pytest.mark.parametrize("there", [True, False])
def test_an_optional_value_takes_the_form_of_its_example(there: bool) -> None:
    given = helper.make_value_info(
        "o", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    )
    branches = {
        "then_branch": helper.make_graph(
            [node("OptionalGetElement", ["o"], ["a"])], "then", [], [info("a", None)]
        ),
        "else_branch": helper.make_graph(
            [node("Neg", ["x"], ["b"])], "else", [], [info("b", None)]
        ),
    }
    nodes = [
        node("OptionalHasElement", ["o"], ["has"]),
        node("If", ["has"], ["y"], **branches),
        node("Identity", ["has"], ["h"]),
    ]
    proto = model(nodes, [given, info("x", [2])], ["y", "h"])
    o, x = drawn(2), drawn(2, seed=9)
    y, has = run(proto, o if there else None, x)
    assert bool(has) is there
    np.testing.assert_array_equal(y, o if there else -x)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("SequenceAt", ["s", "far"], ["y"])], "position out of range"),
        ([node("SequenceErase", ["e"], ["t"]), node("SequenceLength", ["t"], ["y"])], "empty"),
        ([node("SequenceInsert", ["s", "far"], ["y"])], "have one type"),
        ([node("SequenceLength", ["x"], ["y"])], "operand 0 of SequenceLength is a sequence"),
        ([node("SequenceAt", ["s"], ["y"])], "operand 1 of SequenceAt is a tensor"),
        ([node("SplitToSequence", ["x", "parts"], ["y"])], "do not make up the axis"),
        ([node("SplitToSequence", ["x"], ["y"], axis=4)], "has no axis 4"),
        ([node("ConcatFromSequence", ["e"], ["y"], axis=0)], "of an empty sequence"),
        ([node("OptionalGetElement", ["none"], ["y"])], "empty optional value"),
        ([node("SequenceMap", ["x"], ["y"], body=helper.make_graph([], "b", [], []))],
         "operand 0 of SequenceMap is a sequence"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sequence_is_said(nodes: list[Any], words: str) -> None:
    before = [
        node("SequenceConstruct", ["x", "x"], ["s"]),
        node("SequenceEmpty", [], ["e"]),
        node("Optional", [], ["none"], type=helper.make_tensor_type_proto(FLOAT, [2])),
    ]
    weights = {"far": scalar(2), "parts": ints(1, 2)}
    proto = model([*before, *nodes], [info("x", [2])], ["y"], weights)
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(proto)


def test_a_packed_initializer_is_unpacked() -> None:
    """Two int4 in a byte, and an odd number of them; four uint2."""
    for name in ("int4", "uint2"):
        kind = stitch.DataType.parse(name)
        array = np.array([1, 3, 2, 1, 0, 3, 1]).astype(kind.dtype)
        proto = model([node("Cast", ["w"], ["y"], to=FLOAT)], [], ["y"])
        proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
        assert len(proto.graph.initializer[0].raw_data) < 7
        assert run(proto)[0].tolist() == array.astype(np.float32).tolist()

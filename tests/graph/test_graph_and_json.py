"""The graph's own checks, and its JSON form: round trips, and whatever text comes in."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CompileError, FormatError
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    as_json,
    check_types,
    from_json,
    parse_placement,
    trace,
)
from stitch.program import (
    Array,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
    host_layout,
)

F32 = DataType.FLOAT32
X = ValueType((2, 3), F32)


def rich_graph() -> ComputationGraph:
    b = ComputationGraphBuilder("rich \u00e9")
    x = b.input("x", (2, 6), "float32", InputKind.STATE, Ownership.DONATE)
    w = b.parameter("w", np.array([[np.nan, -0.0, np.inf, 1, 2, 3]], np.float32))
    half = b.cast(x, "bfloat16")
    best, places = b.topk(x * w, 2)
    b.output("half", half + b.constant(np.ones((6,), half.dtype)))
    b.output("best", b.op("Elu", best, alpha=0.1))
    b.output("places", places)
    b.output("mask", b.op("Clip", x, None, 6.0) > 0)
    b.output("new", b.leaky_relu(x, float("inf")), aliases_input=0)
    b.place(parse_placement("input.x.shard_spec=2x1,32x64"), parse_placement("output.0.space=l1"))
    return b.build()


def test_the_json_form_reads_back_as_the_same_graph() -> None:
    graph = rich_graph()
    again = from_json(as_json(graph))
    assert again.values == graph.values
    assert again.constants == graph.constants
    assert again.operations == graph.operations
    assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
    assert again.placement == graph.placement
    assert again.text() == graph.text()


def test_constants_may_be_left_out_and_given_by_name() -> None:
    graph = rich_graph()
    names = {graph.values[c.value].name: c.data for c in graph.constants}
    text = as_json(graph, with_data=False)
    assert '"data"' not in text
    assert from_json(text, names).constants == graph.constants
    with pytest.raises(FormatError, match="passed no array 'w'"):
        from_json(text)
    with pytest.raises(FormatError, match="constant_type"):
        from_json(text, {**names, "w": np.zeros(3)})


def edited(**changes: Any) -> str:
    body = json.loads(as_json(trace(lambda x: x * 2, X)))
    body.update(changes)
    return json.dumps(body)


BAD = {
    "": "an empty text",
    "[]": "format",
    "{}": "no computation graph",
    '{"a": 1, "a": 2}': "duplicate key",
    "[" * 100_000: "nested too deeply",
    edited(version=2): "version 2",
    edited(name=3): "a value of the wrong type\n  where: graph.name\n  expected: a string",
    edited(colour=1): "colour",
    edited(constants=[{"is": 1, "value": 0, "data": ""}]): "a surplus 'is'",
    edited(values=[{"name": "x", "shape": [-1], "data_type": "float32"}]): "negative",
    edited(values=[{"name": "x", "shape": [2], "data_type": "flaot32"}]): "values[0].data_type\n",
    edited(values=7): "expected: a list",
    edited(operations=[{"op": "Relu"}]): "Operation has no 'attributes'",
    edited(operations=[7]): "expected: Operation",
    edited(constants=[{"value": 1, "data": "!!"}]): "expected: a string of base64",
    edited(constants=[{"value": 1, "data": "AAAA"}]): "4 bytes, got 3",
    edited(
        values=[{"name": "x", "shape": [2], "data_type": "bool"}],
        constants=[{"value": 0, "data": "AAI="}],
    ): "not a valid bool",
    edited(constants=[{"value": 99, "data": ""}]): "no value 99",
    edited(placement=["input.z.space=l1"]): "there is no input",
    edited(placement=[3]): "placement[0]",
    edited(outputs=[{"name": "y", "value": 77, "aliases_input": None}]): "undefined",
    edited(inputs=[{"name": "x", "value": True, "kind": "activation"}]): "ownership",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_json_that_is_no_graph_is_a_format_error_that_says_why(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        from_json(text)
    assert BAD[text] in str(caught.value)


def test_nesting_near_the_recursion_limit_is_a_format_error() -> None:
    # The parser reads some texts whose `repr` then exceeds the limit.
    text = edited(name="deep")
    for depth in range(800, 1000):
        with pytest.raises(FormatError):
            from_json(text.replace('"deep"', "[" * depth + "]" * depth))


SMALL = as_json(trace(lambda x: x.builder.op("Elu", x * 2, alpha=0.5), X))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_text_is_a_graph_or_a_format_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(SMALL) - 1))
    end = data.draw(st.integers(at, min(len(SMALL), at + 12)))
    put = data.draw(st.sampled_from(["", "0", "-1", "1e999", "null", "[]", "{}", '"', "99999999"]))
    try:
        graph = from_json(SMALL[:at] + put + SMALL[end:])
    except FormatError:
        return
    assert isinstance(graph, ComputationGraph)


def test_a_graph_that_is_not_well_formed_says_everything_that_is_wrong() -> None:
    with pytest.raises(CompileError) as caught:
        ComputationGraph(
            "g",
            (InputSlot("x", 0),),
            (OutputSlot("y", 5),),
            (Value("x", X, host_layout(F32)), Value("y", X)),
            (Operation("Relu", (1,), (1,)),),
            placement=(parse_placement("input.z.space=l1"),),
        )
    for kind in ("undefined", "placed", "unknown_slot"):
        assert kind in str(caught.value)


def graph_of(*operations: Operation, types: tuple[ValueType, ...]) -> ComputationGraph:
    values = tuple(Value(f"v{i}", kind) for i, kind in enumerate(types))
    return ComputationGraph(
        "g", (InputSlot("x", 0),), (OutputSlot("y", len(types) - 1),), values, operations
    )


def test_a_type_check_reports_every_mismatch_and_every_failure() -> None:
    wrong = ValueType((3, 3), F32)
    graph = graph_of(
        Operation("Relu", (0,), (1,), location="a.py:1"),
        Operation("Rleu", (1,), (2,), location="a.py:2"),
        Operation("Neg", (2,), (3,)),
        types=(X, wrong, X, ValueType((2, 3), DataType.INT32)),
    )
    problems = check_types(graph)
    assert [p.kind for p in problems] == ["type_mismatch", "no_type", "type_mismatch"]
    assert "v1 is 3x3xf32, inferred 2x3xf32" in str(problems[0])
    assert "a.py:2" in str(problems[1])


def test_a_type_check_follows_shapes_that_are_computed() -> None:
    b = ComputationGraphBuilder("g")
    x = b.input("x", (2, 3), "float32")
    doubled = b.op("Mul", b.op("Shape", x), [1, 2])
    b.output("y", b.op("Expand", x[:, :1], b.op("Sub", doubled, [0, 2])))
    graph = b.build()
    assert graph.output_type(0).shape == (2, 4)
    assert check_types(graph) == ()


def test_a_very_long_chain_is_typed_without_recursion() -> None:
    b = ComputationGraphBuilder("long")
    total = b.constant(np.zeros(1, np.int64))
    for i in range(3000):
        total = total + i % 2
    x = b.input("x", (1500,), "float32")
    b.output("y", b.op("Reshape", x, b.op("Concat", total, [1], axis=0)))
    graph = b.build()
    assert graph.output_type(0).shape == (1500, 1)
    assert check_types(graph) == ()


def test_read_only_arrays_are_kept_and_writable_ones_are_copied() -> None:
    kept: Array = np.zeros(5000, np.float32)
    kept.flags.writeable = False
    changing = np.zeros(5000, np.float32)
    b = ComputationGraphBuilder("g")
    b.output("y", b.parameter("a", kept) + b.parameter("b", changing))
    first, second = b.build().constants
    assert np.shares_memory(first.data, kept)
    assert not np.shares_memory(second.data, changing)


def test_one_large_array_of_integers_is_one_constant() -> None:
    b, weight = ComputationGraphBuilder("g"), np.zeros((100, 100), np.int8)
    assert b.constant(weight) is not b.constant(weight.copy())
    b.output("y", b.constant(weight) + b.constant(weight))
    graph = b.build()
    assert len(set(graph.operations[0].inputs)) == 1 and len(graph.constants) == 2


def test_big_endian_arrays_become_native_constants() -> None:
    b = ComputationGraphBuilder("g")
    b.output("y", b.constant(np.arange(3, dtype=">f4")) + 1)
    data = b.build().constants[0].data
    assert data.dtype.isnative
    assert data.tolist() == [0, 1, 2]


@pytest.mark.parametrize("source", [-1, 7, 2**62])
def test_an_output_that_aliases_an_input_that_is_not_there_is_a_defect(source: int) -> None:
    form = json.loads(as_json(rich_graph()))
    form["outputs"][0]["aliases_input"] = source
    with pytest.raises(FormatError, match=f"aliases input {source}, but the graph has 1 input"):
        from_json(json.dumps(form))


def test_a_text_that_is_not_well_formed_is_refused_in_short() -> None:
    text = (
        '{"format": "stitch.computation_graph", "version": 1, "name": "%s", "inputs": [], '
        '"outputs": [{"name": "y", "value": 3, "aliases_input": null}], "values": [], '
        '"operations": [], "constants": [], "placement": []}'
    )
    with pytest.raises(FormatError, match="is not well formed") as caught:
        from_json(text % ("n" * 100_000))
    assert len(str(caught.value)) < 3_000

"""Splitting: the parts in a chain are the whole, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.compiler import CompileOptions, compile_graph, split_graph
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, check_types, parse_placement
from stitch.linker import chain_wires, wire
from stitch.machine import load_machine
from stitch.program import InputKind
from stitch.testing import evaluate_graph as run
from tests.support.gradients.running import Feeds, inputs_of


def chained(parts: Sequence[ComputationGraph], given: Feeds) -> Feeds:
    """The outputs of the last part: activations from earlier parts, other inputs by name."""
    made: Feeds = {}
    outputs: Feeds = {}
    for index, part in enumerate(parts):
        outputs = run(part, {
            slot.name: (made if index and slot.kind is InputKind.ACTIVATION else given)[slot.name]
            for slot in part.inputs
        })  # fmt: skip
        assert not made.keys() & outputs.keys() or index == len(parts) - 1
        made |= outputs
    return outputs


def assert_same(graph: ComputationGraph, parts: Sequence[ComputationGraph]) -> None:
    given = inputs_of(graph, 5)
    whole, found = run(graph, given), chained(parts, given)
    assert [*found] == [*whole]
    assert all(found[name].tobytes() == whole[name].tobytes() for name in whole)
    assert all(check_types(part) == () for part in parts)


def tower(layers: int = 4, width: int = 8) -> ComputationGraph:
    """Layers that are narrow between them and wide inside."""
    b = ComputationGraphBuilder("tower")
    h = b.input("x", (4, width), "float32")
    rng = np.random.default_rng(1)
    for k in range(layers):
        up, down = (rng.standard_normal(s).astype(np.float32)
                    for s in ((width, 4 * width), (4 * width, width)))  # fmt: skip
        with b.at(f"tower:layer{k}"):
            h = b.op("MatMul", b.op("Relu", b.op("MatMul", h, up)), down)
    b.output("y", h)
    return b.build()


@st.composite
def graphs(draw: st.DrawFn) -> ComputationGraph:
    """Graphs with fan-out, early outputs, several inputs of two kinds, shapes from shapes."""
    b = ComputationGraphBuilder("g")
    tensors = [b.input(f"x{i}", (2, 3), "float32") for i in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        tensors.append(b.input("w", (2, 3), "float32", InputKind.PARAMETER))
    tensors.append(b.parameter("c", np.arange(6, dtype=np.float32).reshape(2, 3)))
    for _ in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from(["Add", "Mul", "Neg", "Tanh", "Reshape", "Split"]))
        chosen = [draw(st.sampled_from(tensors)) for _ in range(2)]
        if op in ("Add", "Mul"):
            tensors.append(b.op(op, *chosen))
        elif op == "Reshape":
            tensors.append(b.op("Reshape", chosen[0], b.op("Shape", chosen[1])))
        elif op == "Split":
            left, right = b.apply("Split", (chosen[0], [1, 2]), 2, {"axis": 1})
            tensors.append(b.op("Concat", right, left, axis=1))
        else:
            tensors.append(b.op(op, chosen[0]))
    for k, tensor in enumerate(draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))):
        b.output(f"y{k}", tensor)
    return b.build()


def own_results(graph: ComputationGraph) -> list[str]:
    """What the operations that can be parted make; copies of constants to outputs come on top."""
    (whole,) = split_graph(graph, 1)
    names = [whole.values[o.outputs[0]].name for o in whole.operations]
    return [name for name in names if not name.endswith("_passed")]


@settings(max_examples=50, deadline=None)
@given(graph=graphs(), data=st.data())
def test_parts_in_a_chain_equal_the_whole(graph: ComputationGraph, data: st.DataObject) -> None:
    most = max(len(own_results(graph)), 1)
    parts = split_graph(graph, data.draw(st.integers(1, most)))
    assert_same(graph, parts)


@settings(max_examples=25, deadline=None)
@given(graph=graphs(), data=st.data())
def test_parts_cut_at_named_nodes_equal_the_whole(
    graph: ComputationGraph, data: st.DataObject
) -> None:
    names = own_results(graph)[:-1]
    if not names:
        assert_same(graph, split_graph(graph, 1))
        return
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    parts = split_graph(graph, chosen)
    assert len(parts) == len(chosen) + 1
    assert_same(graph, parts)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), data=st.data())
def test_parts_give_what_others_take_and_take_what_they_use(
    graph: ComputationGraph, data: st.DataObject
) -> None:
    parts = split_graph(graph, data.draw(st.integers(1, max(len(own_results(graph)), 1))))
    wires = chain_wires([compile_graph(part, load_machine("host")).program for part in parts])
    fed = {(link.consumer, link.input) for link in wires}
    used = {(link.producer, link.output) for link in wires}
    for k, part in enumerate(parts):
        read = {v for operation in part.operations for v in operation.inputs}
        for i, slot in enumerate(part.inputs):
            assert k == 0 or slot.value in read
            assert ((k, i) in fed) == (k > 0 and slot.kind is InputKind.ACTIVATION)
        assert k == len(parts) - 1 or all((k, o) in used for o in range(len(part.outputs)))


def around() -> ComputationGraph:
    """A sum of what the first of three products gives and what the last gives."""
    b = ComputationGraphBuilder("around")
    rng = np.random.default_rng(2)
    h = x = b.op("Tanh", b.input("x", (4, 8), "float32"))
    for k in range(3):
        with b.at(f"around:layer{k}"):
            h = b.op("MatMul", h, rng.standard_normal((8, 8)).astype(np.float32))
    b.output("y", b.op("Add", h, x))
    return b.build()


def test_a_value_goes_around_a_part_that_does_not_use_it() -> None:
    first, middle, last = split_graph(around(), ["layer0", "layer1"])
    assert [slot.name for slot in first.outputs] == ["tanh", "matmul"]
    assert [slot.name for slot in middle.inputs] == ["matmul"]
    assert [operation.op for operation in middle.operations] == ["MatMul"]
    assert [slot.name for slot in last.inputs] == ["tanh", "matmul_1"]
    assert_same(around(), [first, middle, last])


def test_cuts_lie_where_least_passes_over() -> None:
    parts = split_graph(tower(), 4)
    assert [len(part.operations) for part in parts] == [3, 3, 3, 3]
    assert [part.name for part in parts] == [f"tower_{k}" for k in range(4)]
    assert all(part.input_type(0).shape == (4, 8) for part in parts)


@pytest.mark.parametrize("name", ["tower:layer1", "layer1", "matmul_3"])
def test_a_node_is_named_by_location_or_value(name: str) -> None:
    parts = split_graph(tower(), [name])
    assert [len(part.operations) for part in parts] == [6, 6]


def test_a_name_of_the_program_is_that_of_its_node() -> None:
    b = ComputationGraphBuilder("twice")
    x = b.input("x", (2,), "float32")
    # The passes merge both sums, of which a number is free for the next one.
    first, again = (b.op("Tanh", b.op("Add", x, 1.0)) for _ in range(2))
    with b.at("twice:total"):
        total = b.op("Add", first, again)
    b.output("y", b.op("Neg", total))
    b.output("add", x)  # An input as a result: a value of the program has this name.
    graph = b.build()
    program = compile_graph(graph, load_machine("host")).program
    (value,) = next(o for o in program.operations if o.location == "twice:total").outputs
    part, _ = split_graph(graph, [program.values[value].name])
    assert [o.location for o in part.operations if o.op != "Identity"][-1] == "twice:total"


def test_values_without_a_name_pass_a_cut_under_one() -> None:
    b = ComputationGraphBuilder("twice")
    x = b.input("x", (2,), "float32")
    first, again = (b.op("Tanh", x) for _ in range(2))  # The whole program has one of them.
    b.output("y", b.op("Neg", b.op("Add", first, again)))
    graph = b.build()
    values = tuple([replace(value, name="") for value in graph.values])
    parts = split_graph(replace(graph, values=values), 4)
    assert all(slot.name for part in parts for slot in part.outputs)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (0, "cannot be split into 0 parts"),
        (13, "cannot be split into 13 parts"),
        (["layer9"], "no node 'layer9' to cut after"),
        (["layer3"], "it is at the end"),
        (["layer1", "matmul_3"], "it is the same as after 'layer1'"),
    ],
)
def test_cuts_that_cannot_be(cuts: int | list[str], words: str) -> None:
    with pytest.raises(CompileError, match=words):
        split_graph(tower(), cuts)


def test_parts_link_by_position_with_their_placement() -> None:
    placement = ["input.x.space=dram", "output.y.space=l1", "output.y.data_type=bfloat16"]
    graph = tower().with_placement(*map(parse_placement, placement))
    machine = load_machine("wormhole_n150")
    programs = [compile_graph(part, machine).program for part in split_graph(graph, 3)]
    assert programs[0].input_desc(0).layout.space.value == "dram"
    assert programs[-1].output_desc(0).layout.data_type.value == "bfloat16"
    for one, two in pairwise(programs):
        assert wire(one, two) == ((0, 0),)


def test_a_buffer_is_handed_over_within_a_part_only() -> None:
    b = ComputationGraphBuilder("update")
    x, s = b.input("x", (4,), "float32"), b.input("s", (4,), "float32", InputKind.STATE)
    h = b.op("Neg", s)
    b.output("s_next", b.op("Add", b.op("Tanh", h), x))
    graph = b.build().with_placement(
        parse_placement("input.s.ownership=donate"), parse_placement("output.s_next.alias=s")
    )
    with pytest.raises(CompileError, match="a cut separates them"):
        split_graph(graph, 2)
    assert len(split_graph(graph, 1)) == 1


def test_a_state_enters_the_part_that_reads_it() -> None:
    b = ComputationGraphBuilder("late")
    x, s = b.input("x", (4,), "float32"), b.input("s", (4,), "float32", InputKind.STATE)
    h = b.op("Neg", b.op("Tanh", x))
    b.output("s_next", b.op("Add", s, h))
    b.output("y", h)
    graph = b.build().with_placement(
        parse_placement("input.s.ownership=donate"), parse_placement("output.s_next.alias=s")
    )
    first, second = split_graph(graph, ["neg"])
    assert [slot.name for slot in first.inputs] == ["x"]
    assert [slot.name for slot in second.inputs] == ["neg", "s"]
    made = compile_graph(second, load_machine("wormhole_n150"), CompileOptions())
    assert made.program.outputs[0].aliases_input == 1

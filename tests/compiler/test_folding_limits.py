"""What folding may cost: neither memory nor time that the graph's constants do not justify."""

from __future__ import annotations

import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stitch.compiler import compile_graph
from stitch.compiler.passes.simplification import ConstantFolder, fold_constants
from stitch.errors import FormatError
from stitch.frontend import module_from_text
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.machine import load_machine

MIB = 1 << 20


def module(*operations: str) -> ComputationGraph:
    """A module over x: 2x3 float32 whose output is y."""
    lines = "".join(f"  - {line}\n" for line in operations)
    head = "inputs:\n  x: {shape: [2, 3], type: float32}\n"
    return module_from_text(f"{head}operations:\n{lines}outputs: [y]\n", Path(), "m.yaml")


#: Chains on constants that end in one number; what they make on the way is large or takes long.
CHAINS = {
    "a range of 10^9": ("r = Range(0, 1000000000, 1)", "s = Cast(r, to=1)"),
    "a filled shape": ("s = ConstantOfShape([100000, 10000])",),
    "an expanded number": ("s = Expand(1.5, [1000000000])",),
    "a tile": ("a = ConstantOfShape([1000])", "s = Tile(a, [1000000])"),
    "padding": ("a = ConstantOfShape([1000])", "s = Pad(a, [0, 1000000000])"),
    "one hot": ("r = Range(0, 50000, 1)", "s = OneHot(r, 50000, [0.0, 1.0])"),
    "a large kernel": (
        "a = ConstantOfShape([1, 1, 400, 400])",
        "w = ConstantOfShape([1, 1, 200, 200])",
        "s = Conv(a, w)",
    ),
    "sums over five indices": (
        "a = ConstantOfShape([1000])",
        "s = Einsum(a, a, a, a, a, equation='a,b,c,d,e->')",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_constants_that_are_large_or_slow_to_make_stay_in_the_program(name: str) -> None:
    graph = module(*CHAINS[name], "t = ReduceSum(s)", "y = Add(x, t)")
    tracemalloc.start()
    try:
        program = compile_graph(graph, load_machine("wormhole_n150")).program
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB
    last = CHAINS[name][-1].split(" = ")[1].split("(")[0]
    assert last in {operation.op for operation in program.operations}


def test_large_constants_that_were_given_are_still_rearranged() -> None:
    text = """
        inputs:
          x: {shape: [2, 3000], type: float32}
        parameters:
          w: {shape: [3000, 3000], init: randn}
        operations:
          - t = Transpose(w)
          - y = MatMul(x, t)
        outputs: [y]
        """
    graph = module_from_text(textwrap.dedent(text), Path(), "m.yaml")
    assert [o.op for o in fold_constants(graph, 0).operations] == ["MatMul"]


@pytest.mark.parametrize("op", ["Shape", "Size"])
def test_the_shape_of_a_large_value_is_known_without_the_value(op: str) -> None:
    graph = module(
        "a = Expand(x, [100000, 2, 3])", f"s = {op}(a)", "t = Cast(s, to=1)", "u = ReduceSum(t)",
        "y = Add(x, u)",
    )  # fmt: skip
    tracemalloc.start()
    try:
        folded = fold_constants(graph, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert op not in {operation.op for operation in folded.operations}


@pytest.mark.parametrize(
    "operation",
    [
        "r = Range(0, 4000000000000000000, 1)",
        "r = Range(0.0, 1.0e38, 1.0e-38)",
        "r = ConstantOfShape([3000000000000000000, 3])",
        "r = Expand(x, [9223372036854775807, 9223372036854775807, 1, 1])",
        "r = Pad(x, [0, 0, 4000000000000000000, 1])",
        "r = Tile(x, [100000000000, 100000000000])",
    ],
)
def test_a_result_beyond_any_memory_is_refused_where_it_is_written(operation: str) -> None:
    with pytest.raises(FormatError, match=r"m\.yaml:4: result of .* is too large"):
        module(operation, "y = ReduceSum(r)")


@pytest.mark.parametrize(
    ("op", "shape"), [("Reshape", [3, 2]), ("Unsqueeze", [0]), ("Expand", [1, 2, 3])]
)
def test_a_folded_operation_that_keeps_the_order_shares_memory(op: str, shape: list[int]) -> None:
    builder = ComputationGraphBuilder("shared")
    weights = builder.parameter("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    builder.output("y", builder.op("Relu", builder.op(op, weights, shape)))
    graph = builder.build()
    known, _ = ConstantFolder(graph, 0).fold(graph, {})
    made = graph.operations[0].outputs[0]
    assert known[made].tolist() == np.arange(6).reshape(graph.values[made].type.shape).tolist()
    assert np.shares_memory(known[made], graph.constants[0].data)

"""Lifting: a body or a graph, written once for many lanes, gives what it gives lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, VmapResult, trace, vmap
from stitch.ops import BatchingContext
from stitch.program import Array, DataType, Operation, ValueType
from tests.support.operators.lanes import one_after_the_other

LANES = 4
Run = Callable[..., dict[str, Array]]


def real(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def refused(operation: Operation, context: BatchingContext) -> Sequence[Any]:
    raise AssertionError(f"{operation.op} has a rule")


def vmapped(
    graph: ComputationGraph,
    batched: Sequence[bool],
    write_unbatched: Any = refused,
    lanes: int = LANES,
) -> tuple[ComputationGraph, VmapResult]:
    builder = ComputationGraphBuilder("vmapped")
    operands = []
    for slot, varies in zip(graph.inputs, batched, strict=True):
        kind = graph.values[slot.value].type
        shape = (lanes, *kind.shape) if varies else kind.shape
        operands.append(builder.input(slot.name, shape, kind.data_type))
    done = vmap(graph, operands, batched, lanes, builder, write_unbatched)
    for output, result in zip(graph.outputs, done.results, strict=True):
        builder.output(output.name, result.tensor)
    return builder.build(), done


def layer(x: Any, w: Any, b: Any) -> Any:
    return np.maximum(x @ w + b, np.float32(0))


def attention(x: Any, w: Any) -> Any:
    q, k, v = ((x @ w[i]).reshape(5, 2, 4).transpose(1, 0, 2) for i in range(3))
    scores = np.exp(q @ k.transpose(0, 2, 1) / np.float32(2))
    weights = scores / scores.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(5, 8)


def statistics(x: Any, w: Any) -> Any:
    """Shapes that are asked for on the way."""
    centred = x - x.mean(axis=0, keepdims=True)
    return {"first": np.concatenate([centred, w[None]], axis=0)[::-1], "second": w * w.sum()}


CASES: dict[str, tuple[Any, tuple[Array, ...]]] = {
    "layer": (layer, (real(3, 8), real(8, 6, seed=1), real(6, seed=2))),
    "attention": (attention, (real(5, 8), real(3, 8, 8, seed=1))),
    "statistics": (statistics, (real(5, 8), real(8, seed=1))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_a_graph_for_many_lanes_is_the_graph_lane_by_lane(name: str, which: str, run: Run) -> None:
    function, arrays = CASES[name]
    graph = trace(function, *arrays)
    last = len(arrays) - 1
    batched = [which == "all" or i == (0 if which == "first" else last) for i in range(last + 1)]
    whole, done = vmapped(graph, batched)
    assert done.without_rule == ()
    stacks = [
        real(LANES, *a.shape, seed=9) if v else a for a, v in zip(arrays, batched, strict=True)
    ]
    ours = run(whole, *stacks)
    for lane in range(LANES):
        own = [s[lane] if v else s for s, v in zip(stacks, batched, strict=True)]
        theirs = run(graph, *own)
        for slot, result in zip(graph.outputs, done.results, strict=True):
            made = ours[slot.name][lane] if result.is_batched else ours[slot.name]
            np.testing.assert_allclose(made, theirs[slot.name], rtol=2e-5, atol=2e-6)


def recurrent() -> ComputationGraph:
    b = ComputationGraphBuilder("recurrent")
    x, w, r = (b.input(n, s, "float32") for n, s in (("x", (5, 2, 3)), ("w", (1, 4, 3)),
                                                     ("r", (1, 4, 4))))  # fmt: skip
    y, h = b.apply("RNN", [b.op("Tanh", x), w, r], 2, {})
    b.output("y", y)
    b.output("h", b.op("Neg", h))
    return b.build()


def test_an_operation_without_a_rule_is_the_callers(run: Run) -> None:
    graph, arrays = recurrent(), (real(5, 2, 3), real(1, 4, 3, seed=1), real(1, 4, 4, seed=2))
    asked: list[BatchingContext] = []

    def loop(operation: Operation, context: BatchingContext) -> Sequence[Any]:
        asked.append(context)
        return one_after_the_other(operation, context)

    _, done = vmapped(graph, [True, False, False])
    assert done.without_rule == ()
    whole, done = vmapped(graph, [False, True, False], loop)
    assert [operation.op for operation in done.without_rule] == ["RNN"]
    (context,) = asked
    assert context.batched == (False, True, False)
    assert context.input_types[1] == ValueType((1, 4, 3), DataType.FLOAT32)
    assert context.attributes["direction"] == "forward"
    stack = real(LANES, 1, 4, 3, seed=3)
    ours = run(whole, arrays[0], stack, arrays[2])
    for lane in range(LANES):
        theirs = run(graph, arrays[0], stack[lane], arrays[2])
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name][lane], array)


def test_an_operand_of_another_type_is_refused() -> None:
    graph = trace(layer, real(3, 8), real(8, 6), real(6))
    builder = ComputationGraphBuilder("vmapped")
    x, w, b = (builder.input(n, s, "float32") for n, s in (("x", (3, 3, 8)), ("w", (8, 6)),
                                                           ("b", (6,))))  # fmt: skip
    with pytest.raises(CompileError, match="'x' does not fit a batch of 4") as raised:
        vmap(graph, [x, w, b], [True, False, False], LANES, builder, refused)
    assert "4x3x8xf32" in str(raised.value)


def test_no_lanes_are_results_of_no_lanes(run: Run) -> None:
    whole, done = vmapped(recurrent(), [True, False, True], lanes=0)
    assert done.without_rule == ()
    ours = run(whole, real(0, 5, 2, 3), real(1, 4, 3), real(0, 1, 4, 4))
    assert [ours[name].shape for name in ("y", "h")] == [(0, 5, 1, 2, 4), (0, 1, 2, 4)]

"""FlexFlow's operators as builder methods, compared with NumPy or with ONNX's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stitch import ops
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, trace
from stitch.program import ABSENT, Array

Run = Callable[..., dict[str, Array]]
RANDOM = np.random.default_rng(7)


def numbers(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def reference(graph: ComputationGraph, *arrays: Array) -> list[Array]:
    """What ONNX's own reference evaluator makes of a graph."""

    def name(index: int) -> str:
        return "" if index == ABSENT else f"v{index}"

    def info(index: int) -> onnx.ValueInfoProto:
        kind = graph.values[index].type
        return helper.make_tensor_value_info(name(index), ops.onnx_code(kind.data_type), kind.shape)

    nodes = [
        helper.make_node(
            o.op, [name(i) for i in o.inputs], [name(i) for i in o.outputs], **dict(o.attributes)
        )
        for o in graph.operations
    ]
    body = helper.make_graph(
        nodes,
        "g",
        [info(slot.value) for slot in graph.inputs],
        [info(slot.value) for slot in graph.outputs],
        [numpy_helper.from_array(np.array(c.data), name(c.value)) for c in graph.constants],
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 26)])
    onnx.checker.check_model(model)
    feeds = {name(slot.value): a for slot, a in zip(graph.inputs, arrays, strict=True)}
    return [np.asarray(r) for r in ReferenceEvaluator(model).run(None, feeds)]


X2 = numbers(4, 6)
X3 = numbers(2, 5, 8)
IMAGE = numbers(2, 4, 8, 12)
POSITIVE = np.abs(numbers(3, 4)) + 0.1
WHOLE = np.array([[3, -4, 5], [7, 0, -9]], np.int32)
INDICES = np.array([[0, 3, 1], [2, 2, 0]], np.int64)
HEADS = [numbers(8, 8) / 3 for _ in range(4)]
BIASES = [numbers(8) for _ in range(4)]

METHODS: dict[str, tuple[Callable[[Any, Any], Any], Array]] = {
    "linear": (lambda b, x: b.linear(x, HEADS[0][:3, :6], BIASES[0][:3]), X2),
    "linear without bias": (lambda b, x: b.dense(x, HEADS[0][:3, :6], activation="relu"), X2),
    "linear on three axes": (lambda b, x: b.linear(x, HEADS[0], BIASES[0]), X3),
    "conv2d": (lambda b, x: b.conv2d(x, numbers(6, 2, 3, 3), numbers(6), groups=2), IMAGE),
    "conv2d strided": (
        lambda b, x: b.conv2d(x, numbers(3, 4, 3, 2), stride=(2, 3), padding=(1, 0), dilation=2),
        IMAGE,
    ),
    "max pool": (lambda b, x: b.pool2d(x, (2, 3), stride=2, padding=1), IMAGE),
    "average pool": (lambda b, x: b.pool2d(x, 3, padding=1, kind="average"), IMAGE),
    "average pool without pad": (
        lambda b, x: b.pool2d(x, 3, padding=1, kind="average", count_include_pad=False),
        IMAGE,
    ),
    "batch norm": (
        lambda b, x: b.batch_norm(x, numbers(4), numbers(4), numbers(4), POSITIVE[0], relu=True),
        IMAGE,
    ),
    "layer norm": (lambda b, x: b.layer_norm(x, BIASES[0], BIASES[1]), X3),
    "layer norm over two axes": (lambda b, x: b.layer_norm(x, axis=-2, epsilon=1e-3), X3),
    "rms norm": (lambda b, x: b.rms_norm(x, BIASES[2]), X3),
    "embedding": (lambda b, x: b.embedding(x, X2), INDICES),
    "embedding sum": (lambda b, x: b.embedding(x, X2, "sum"), INDICES),
    "embedding mean": (lambda b, x: b.embedding(x, X2, "mean"), INDICES),
    "attention": (lambda b, x: b.multi_head_attention(x, x, x, HEADS, BIASES, heads=2), X3),
    "causal attention": (
        lambda b, x: b.multi_head_attention(x, x, x, HEADS, heads=4, causal=True),
        X3,
    ),
    "masked attention": (
        lambda b, x: b.scaled_dot_product_attention(x, x, x, np.tri(5, dtype=bool), scale=0.5),
        X3,
    ),
    "softmax": (lambda b, x: b.softmax(x, 1), X3),
    "log softmax": (lambda b, x: b.log_softmax(x), X3),
    "dropout": (lambda b, x: b.dropout(x, 0.3), X2),
    "flat": (lambda b, x: b.flat(x), IMAGE),
    "flatten": (lambda b, x: b.flatten(x, 1, 2), IMAGE),
    "flatten of a batch": (lambda b, x: b.flatten(x), IMAGE),
    "relu": (lambda b, x: b.relu(x), X2),
    "leaky relu": (lambda b, x: b.leaky_relu(x, 0.2), X2),
    "gelu": (lambda b, x: b.gelu(x), X2),
    "gelu tanh": (lambda b, x: b.gelu(x, "tanh"), X2),
    "sigmoid": (lambda b, x: b.sigmoid(x), X2),
    "tanh": (lambda b, x: b.tanh(x), X2),
    "elu": (lambda b, x: b.elu(x, 0.5), X2),
    "silu": (lambda b, x: b.silu(x), X2),
    "softplus": (lambda b, x: b.softplus(x), X2),
    "erf": (lambda b, x: b.erf(x), X2),
    "identity": (lambda b, x: b.identity(x), X2),
    "noop": (lambda b, x: b.noop(x), X2),
    "exp": (lambda b, x: b.exp(x), X2),
    "log": (lambda b, x: b.log(x), POSITIVE),
    "sqrt": (lambda b, x: b.sqrt(x), POSITIVE),
    "rsqrt": (lambda b, x: b.rsqrt(x), POSITIVE),
    "reciprocal": (lambda b, x: b.reciprocal(x), POSITIVE),
    "sin and cos": (lambda b, x: b.add(b.sin(x), b.cos(x)), X2),
    "pow": (lambda b, x: b.pow(x, 2.5), POSITIVE),
    "mean": (lambda b, x: b.mean(x, 1), X3),
    "add": (lambda b, x: b.add(x, X2), X2),
    "sub": (lambda b, x: b.sub(X2, x), X2),
    "mul": (lambda b, x: b.mul(x, x), X2),
    "div": (lambda b, x: b.div(x, POSITIVE[0, 0]), X2),
    "broadcast": (lambda b, x: b.broadcast(x, (3, 4, 6)), X2),
    "cast": (lambda b, x: b.cast(x, "int64"), X2),
    "concat": (lambda b, x: b.concat([x, X2, x], 1), X2),
    "split": (lambda b, x: b.split(x, 3, 2), X3),
    "split by sizes": (lambda b, x: b.split(x, [1, 4], 1), X3),
    "chunk": (lambda b, x: b.chunk(x, 2, 1), X3),
    "gather": (lambda b, x: b.gather(x, [[1, 0], [-1, 2]], 1), X3),
    "gather elements": (lambda b, x: b.gather_elements(x[:, :3], INDICES, 0), X2),
    "reshape": (lambda b, x: b.reshape(x, (4, -1)), X3),
    "reverse": (lambda b, x: b.reverse(x, (0, 2)), X3),
    "transpose": (lambda b, x: b.transpose(x, (2, 0, 1)), X3),
    "topk": (lambda b, x: b.topk(x, 3, 1), X3),
    "smallest": (lambda b, x: b.topk(x, 2, largest=False), X2),
    "clip": (lambda b, x: b.clip(x, -0.5, 0.5), X2),
    "reduce sum": (lambda b, x: b.reduce_sum(x, (0, 2)), X3),
    "reduce max": (lambda b, x: b.reduce_max(x, 1, keepdims=True), X3),
    "reduce kinds": (
        lambda b, x: tuple(
            b.reduce(k, x, -1) for k in ("min", "prod", "l1", "l2", "sum_square", "log_sum_exp")
        ),
        X2,
    ),
    "reduce no axes": (lambda b, x: b.reduce_sum(x, ()), X2),
    "floor division": (lambda b, x: b.floordiv(x, 0.5), X2),
    "integer floor division": (lambda b, x: b.floordiv(x, -2), WHOLE),
    "integer modulo": (lambda b, x: b.mod(x, -4), WHOLE),
    "einsum": (lambda b, x: b.einsum("bij,bkj->bik", x, x), X3),
    "where": (lambda b, x: b.where(b.greater(x, 0), x, 0.0), X2),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_valid_onnx_and_gives_what_onnx_gives(name: str, run: Run) -> None:
    f, array = METHODS[name]
    graph = trace(lambda x: f(x.builder, x), array)
    expected = reference(graph, array)
    found = list(run(graph, array).values())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_linear_gives_flexflows_reference_values(run: Run) -> None:
    x = np.array([[3, 3, 6], [2, 1, 5], [1, 2, -2], [8, 0.5, -3]], np.float32)
    w = np.array([[1, 2, 1.5], [0.5, 4, -1]], np.float32)
    bias = np.array([3, -1], np.float32)
    found = run(trace(lambda t: t.builder.linear(t, w, bias), x), x)["output"]
    assert found.tolist() == [[21, 6.5], [14.5, -1], [5, 9.5], [7.5, 8]]


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "pool kind": (lambda b, x: b.pool2d(x, 2, kind="median"), "unknown pooling"),
    "kernel": (lambda b, x: b.pool2d(x, (2, 2, 2)), "one or two numbers"),
    "weight": (lambda b, x: b.linear(x, X2), "does not fit its input"),
    "activation": (lambda b, x: b.activation(x, "rleu"), "unknown activation"),
    "reduction": (lambda b, x: b.reduce("median", x), "unknown reduction"),
    "heads": (lambda b, x: b.multi_head_attention(X3, X3, X3, HEADS, heads=3), "batch, length"),
    "weights": (lambda b, x: b.multi_head_attention(x, x, x, [], heads=2), "4 and 4"),
    "aggregate": (lambda b, x: b.embedding(INDICES, x, "max"), "unknown aggregation"),
    "concat": (lambda b, x: b.concat([]), "at least one"),
    "transpose": (lambda b, x: b.transpose(x, (0, 1)), "every axis"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_of_a_method_is_a_compile_error(name: str) -> None:
    f, message = WRONG[name]
    with pytest.raises(CompileError, match=message):
        trace(lambda x: f(x.builder, x), IMAGE)


def test_flatten_keeps_the_batch_axis_as_a_layer_does() -> None:
    b = ComputationGraphBuilder("flat")
    x = b.input("x", (8, 28, 28), "float32")
    assert b.flatten(x).shape == (8, 784)
    assert b.flatten(x, 0).shape == (6272,)
    assert b.flatten(b.input("row", (5,), "float32")).shape == (5,)


def test_dense_with_a_number_of_outputs_has_parameters_of_its_own(run: Run) -> None:
    def built() -> ComputationGraph:
        b = ComputationGraphBuilder("net")
        x = b.input("x", (8, 28, 28), "float32")
        hidden = b.dense(b.flatten(x), 512, activation="relu")
        b.output("y", b.dense(hidden, 10))
        return b.build()

    graph = built()
    named = {graph.values[c.value].name: c.data for c in graph.constants}
    drawn = {name: data for name, data in named.items() if name.startswith("dense")}
    assert [*drawn][:2] == ["dense.weight", "dense.bias"]
    assert [d.shape for d in drawn.values()] == [(512, 784), (512,), (10, 512), (10,)]
    assert all(0 < np.abs(data).max() <= 1 / 16 for data in drawn.values())
    y = run(graph, np.ones((8, 28, 28), np.float32))["y"]
    assert y.shape == (8, 10) and np.abs(y).max() > 0
    again = {c.value: c.data.tobytes() for c in built().constants}
    assert {c.value: c.data.tobytes() for c in graph.constants} == again
    b = ComputationGraphBuilder("wrong")
    with pytest.raises(CompileError, match="creates its parameters"):
        b.dense(b.input("x", (2, 3), "float32"), 0)

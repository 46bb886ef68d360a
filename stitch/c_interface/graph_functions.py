"""The functions of the C interface that build computation graphs, one operator at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stitch.c_interface.table import FunctionTable
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, as_json, from_json
from stitch.program import Array, DataType

TABLE = FunctionTable()
_GRAPH = "stitch_computation_graph_t graph"
_ADD = "stitch_computation_graph_add_"


class Graph:
    """A graph under construction, or one that was read; `tensors` are those that C programs hold.

    `loss` is what a training minimizes.
    """

    def __init__(self, source: ComputationGraphBuilder | ComputationGraph) -> None:
        self._source = source
        self.tensors: list[Any] = []
        self.loss: Any = None

    @property
    def builder(self) -> Any:
        """The builder; raises `UsageError` for a graph that was read from JSON."""
        if isinstance(self._source, ComputationGraph):
            raise UsageError("a graph that was read from JSON is complete: nothing can be added")
        return self._source

    def build(self) -> ComputationGraph:
        """Return the graph; nothing can be added to it afterwards."""
        source = self._source
        return source if isinstance(source, ComputationGraph) else source.build()


def parsed_json(text: str, what: str) -> Any:
    """Return JSON of a C program as Python data; raise `UsageError`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what} is no JSON: {error}", got=text[:60]) from error


def config_of(text: str, what: str) -> Any:
    """Return a configuration: a name, or an object as JSON."""
    return parsed_json(text, what) if text.lstrip().startswith("{") else text


TABLE.section = "Computation graphs"


@TABLE.function(
    "stitch_computation_graph_create(const char *name, stitch_computation_graph_t *out)", "name"
)
def create(name: str | None) -> Graph:
    """Begin a computation graph."""
    return Graph(ComputationGraphBuilder(name or "graph"))


@TABLE.function(f"stitch_computation_graph_destroy({_GRAPH})")
def destroy(graph: Graph) -> None:
    """Release a graph and its tensors; what was compiled from it stays."""


@TABLE.function(
    f"{_ADD}input({_GRAPH}, const char *name, int type, const int64_t *shape, size_t rank, "
    "stitch_tensor_t *out)"
)
def add_input(graph: Graph, name: str, kind: DataType, shape: list[int]) -> Any:
    """Add a named input of a stitch_data_type_t."""
    return graph.builder.input(name, shape, kind)


@TABLE.function(
    f"{_ADD}parameter({_GRAPH}, const char *name, const stitch_array_t *value, "
    "stitch_tensor_t *out)"
)
def add_parameter(graph: Graph, name: str, value: Array) -> Any:
    """Add a named parameter with its initial value, which is copied."""
    return graph.builder.parameter(name, value)


@TABLE.function(f"{_ADD}output({_GRAPH}, const char *name, stitch_tensor_t tensor)")
def add_output(graph: Graph, name: str, tensor: Any) -> None:
    """Add a named output."""
    graph.builder.output(name, tensor)


@TABLE.function(
    f"{_ADD}op({_GRAPH}, const char *op, const char *domain, const stitch_tensor_t *inputs, "
    "size_t n_inputs, const char *attributes, stitch_tensor_t *outputs, size_t n_outputs)",
    "domain", "inputs", "attributes",
)  # fmt: skip
def add_op(
    graph: Graph, op: str, domain: str | None, inputs: list[Any], attributes: str | None,
    outputs: int,
) -> Any:  # fmt: skip
    """Add an operator by its ONNX name; attributes are a JSON object, a zero input is absent."""
    given = parsed_json(attributes or "{}", "attributes")
    if not isinstance(given, dict):
        raise UsageError('attributes are an object, such as {"axis": 1}', got=str(given)[:60])
    return graph.builder.apply(op, inputs, outputs, given, domain or "")


def _add_operator(
    name: str, parameters: str, doc: str, method: Callable[..., Any], *nullable: str
) -> None:
    """Add `..._add_op_NAME`, whose implementation gets the builder."""
    TABLE.add(
        f"{_ADD}op_{name}({_GRAPH}, {parameters}, stitch_tensor_t *out)", doc,
        lambda graph, *arguments: method(graph.builder, *arguments), *nullable,
    )  # fmt: skip


_X = "stitch_tensor_t input"

for _name, _method in (
    ("relu", "relu"), ("sigmoid", "sigmoid"), ("tanh", "tanh"), ("gelu", "gelu"), ("elu", "elu"),
    ("identity", "identity"), ("exp", "exp"), ("sin", "sin"), ("cos", "cos"), ("rsqrt", "rsqrt"),
    ("flat", "flat"),
):  # fmt: skip
    _add_operator(
        _name, _X, f"`{_method}` of each element." if _name != "flat" else
        "Join all axes but the first.", getattr(ComputationGraphBuilder, _method),
    )  # fmt: skip
for _name, _method in (
    ("add", "add"), ("subtract", "sub"), ("multiply", "mul"), ("divide", "div"),
    ("max", "maximum"), ("min", "minimum"), ("batch_matmul", "matmul"),
):  # fmt: skip
    _add_operator(
        _name, "stitch_tensor_t a, stitch_tensor_t b",
        f"`{_method}` of two tensors of one data type, as NumPy broadcasts them.",
        getattr(ComputationGraphBuilder, _method),
    )  # fmt: skip
for _name, _method in (
    ("pow", "pow"), ("scalar_add", "add"), ("scalar_sub", "sub"), ("scalar_multiply", "mul"),
    ("scalar_truediv", "div"),
):  # fmt: skip
    _add_operator(
        _name, f"{_X}, double scalar", f"`{_method}` of each element and a number.",
        getattr(ComputationGraphBuilder, _method),
    )  # fmt: skip
for _name, _method in (("mean", "reduce_mean"), ("reduce_sum", "reduce_sum")):
    _add_operator(
        _name, f"{_X}, const int64_t *axes, size_t n_axes, int keepdims",
        f"`{_method}` over axes; those that are reduced stay with length 1 if keepdims is not 0.",
        lambda b, x, axes, keepdims, _method=_method: getattr(b, _method)(x, axes, bool(keepdims)),
    )  # fmt: skip
_add_operator(
    "dense", f"{_X}, int64_t out_dim, const char *activation",
    "A linear layer that creates its parameters (`dense.weight`, `dense.bias`); activation: "
    "`relu`, `gelu`, ..., NULL for none.",
    lambda b, x, out_dim, activation: b.dense(x, out_dim, activation=activation), "activation",
)  # fmt: skip
_add_operator(
    "linear",
    f"{_X}, stitch_tensor_t weight, stitch_tensor_t bias, const char *activation",
    "input weight^T + bias: input [..., in], weight [out, in], bias [out], zero for none.",
    lambda b, x, weight, bias, activation: b.linear(x, weight, bias, activation),
    "bias", "activation",
)  # fmt: skip
_add_operator(
    "conv2d",
    f"{_X}, stitch_tensor_t weight, stitch_tensor_t bias, int64_t stride_h, int64_t stride_w, "
    "int64_t padding_h, int64_t padding_w, int64_t groups, const char *activation",
    "2-D convolution: input [N, C, H, W], weight [M, C / groups, kH, kW], bias [M], zero for none.",
    lambda b, x, weight, bias, stride_h, stride_w, padding_h, padding_w, groups, activation:
        b.conv2d(x, weight, bias, stride=(stride_h, stride_w), padding=(padding_h, padding_w),
                 groups=groups, activation=activation),
    "bias", "activation",
)  # fmt: skip
_add_operator(
    "pool2d",
    f"{_X}, int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w, "
    "int64_t padding_h, int64_t padding_w, const char *kind",
    "2-D pooling of [N, C, H, W]; kind: `max` or `average`.",
    lambda b, x, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, kind: b.pool2d(
        x, (kernel_h, kernel_w), stride=(stride_h, stride_w), padding=(padding_h, padding_w),
        kind=kind),
)  # fmt: skip
_add_operator(
    "batch_norm",
    f"{_X}, stitch_tensor_t scale, stitch_tensor_t bias, stitch_tensor_t mean, "
    "stitch_tensor_t variance, double epsilon, int relu",
    "Batch normalization by given statistics, with a relu if relu is not 0.",
    lambda b, x, scale, bias, mean, variance, epsilon, relu: b.batch_norm(
        x, scale, bias, mean, variance, epsilon=epsilon, relu=bool(relu)),
)  # fmt: skip
_add_operator(
    "layer_norm",
    f"{_X}, stitch_tensor_t scale, stitch_tensor_t bias, int64_t axis, double epsilon",
    "Layer normalization over the axes from `axis` on; scale and bias may be zero.",
    lambda b, x, scale, bias, axis, epsilon: b.layer_norm(
        x, scale, bias, axis=axis, epsilon=epsilon),
    "scale", "bias",
)  # fmt: skip
_add_operator(
    "embedding", "stitch_tensor_t indices, stitch_tensor_t table, const char *aggregate",
    "Rows of a table [entries, width]; aggregate: `sum`, `mean`, NULL for none.",
    lambda b, indices, table, aggregate: b.embedding(indices, table, aggregate), "aggregate",
)  # fmt: skip
_add_operator(
    "multihead_attention",
    "stitch_tensor_t query, stitch_tensor_t key, stitch_tensor_t value, "
    "const stitch_tensor_t *weights, size_t n_weights, const stitch_tensor_t *biases, "
    "size_t n_biases, int64_t heads, int causal",
    "Attention over [batch, length, width]; four weights [out, in] and biases (no biases: NULL, "
    "0), of query, key, value and output.",
    lambda b, query, key, value, weights, biases, heads, causal: b.multi_head_attention(
        query, key, value, weights, biases or (None,) * 4, heads=heads, causal=bool(causal)),
    "biases",
)  # fmt: skip
_add_operator(
    "softmax", f"{_X}, int64_t axis", "Softmax along an axis.",
    lambda b, x, axis: b.softmax(x, axis),
)  # fmt: skip
_add_operator(
    "dropout", f"{_X}, double rate", "Dropout, in training only.",
    lambda b, x, rate: b.dropout(x, rate),
)  # fmt: skip
_add_operator(
    "cast", f"{_X}, int type", "Conversion to a stitch_data_type_t.",
    lambda b, x, kind: b.cast(x, kind),
)  # fmt: skip
_add_operator(
    "gather", f"{_X}, stitch_tensor_t indices, int64_t axis",
    "One element per index along an axis.",
    lambda b, x, indices, axis: b.gather_elements(x, indices, axis),
)  # fmt: skip
_add_operator(
    "concat", "const stitch_tensor_t *inputs, size_t n_inputs, int64_t axis",
    "Join tensors along an axis.", lambda b, inputs, axis: b.concat(inputs, axis),
)  # fmt: skip
_add_operator(
    "reshape", f"{_X}, const int64_t *shape, size_t rank",
    "The same elements in another shape; one length may be -1.",
    lambda b, x, shape: b.reshape(x, shape),
)  # fmt: skip
_add_operator(
    "transpose", f"{_X}, const int64_t *axes, size_t n_axes", "Axes in another order.",
    lambda b, x, axes: b.transpose(x, axes),
)  # fmt: skip
_add_operator(
    "reverse", f"{_X}, int64_t axis", "Elements along an axis in reverse order.",
    lambda b, x, axis: b.reverse(x, axis),
)  # fmt: skip


@TABLE.function(
    f"{_ADD}op_split({_GRAPH}, {_X}, const int64_t *sizes, size_t n_sizes, int64_t axis, "
    "stitch_tensor_t *outputs, size_t n_outputs)"
)
def add_split(graph: Graph, x: Any, sizes: list[int], axis: int, outputs: int) -> Any:
    """Split along an axis into parts of these sizes."""
    return graph.builder.split(x, sizes, axis)


@TABLE.function(
    f"{_ADD}op_topk({_GRAPH}, {_X}, int64_t k, int sorted, stitch_tensor_t *outputs, "
    "size_t n_outputs)"
)
def add_topk(graph: Graph, x: Any, k: int, is_sorted: int, outputs: int) -> Any:
    """The k largest elements along the last axis, and their int64 indices: two outputs."""
    return graph.builder.topk(x, k, sorted=bool(is_sorted))


@TABLE.function(
    f"stitch_tensor_name({_GRAPH}, stitch_tensor_t tensor, char *text, size_t capacity, "
    "size_t *needed)"
)
def tensor_name(graph: Graph, tensor: Any) -> str:
    """The name of a tensor in its graph, by which stitch_get_tensor_float reads it."""
    return str(graph.builder.name_of(tensor.index))


@TABLE.function(f"stitch_computation_graph_set_loss({_GRAPH}, const char *loss)")
def set_loss(graph: Graph, loss: str) -> None:
    """Set the loss for training: its name (`mse`, `sparse_categorical_crossentropy`, ...), or a
    JSON object with `loss` and its settings."""
    graph.loss = config_of(loss, "loss")


@TABLE.function(
    f"stitch_computation_graph_as_json({_GRAPH}, char *text, size_t capacity, size_t *needed)"
)
def graph_as_json(graph: Graph) -> str:
    """The graph as JSON; nothing can be added to it afterwards."""
    return as_json(graph.build())


@TABLE.function(
    "stitch_computation_graph_from_json(const char *json, stitch_computation_graph_t *out)"
)
def graph_from_json(text: str) -> Graph:
    """Read a graph from JSON."""
    return Graph(from_json(text))

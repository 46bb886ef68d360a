"""The functions of the C interface that build computation graphs, one operator at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stitch.c_interface.table import FunctionTable
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, as_json, from_json

TABLE = FunctionTable()
#: Results of one operator.
MAX_OUTPUTS = 10_000


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


def _add(prototype: str, doc: str, implementation: Callable[..., Any], *nullable: str) -> None:
    """Add `stitch_computation_graph_...`, whose first parameter is the graph."""
    name, _, rest = prototype.partition("(")
    first = f"stitch_computation_graph_{name}(stitch_computation_graph_t graph"
    TABLE.add(first + (", " if rest != ")" else "") + rest, doc, implementation, *nullable)


def _add_op(
    name: str, parameters: str, doc: str, method: Callable[..., Any] | str, *nullable: str
) -> None:
    """Add `..._add_op_NAME`; the method gets the builder, and returns a tensor."""
    function = getattr(ComputationGraphBuilder, method) if isinstance(method, str) else method
    _add(
        f"add_op_{name}({parameters}, stitch_tensor_t *out)", doc,
        lambda graph, *arguments: function(graph.builder, *arguments), *nullable,
    )  # fmt: skip


TABLE.add(
    "stitch_computation_graph_create(const char *name, stitch_computation_graph_t *out)",
    "Begin a computation graph.",
    lambda name: Graph(ComputationGraphBuilder(name or "graph")), "name",
)  # fmt: skip
_add("destroy()", "Release a graph and its tensors; what was compiled from it stays.",
     lambda graph: None)  # fmt: skip
_add("add_input(const char *name, int type, const int64_t *shape, size_t rank, "
     "stitch_tensor_t *out)", "Add a named input of a stitch_data_type_t.",
     lambda graph, name, kind, shape: graph.builder.input(name, shape, kind))  # fmt: skip
_add("add_parameter(const char *name, const stitch_array_t *value, stitch_tensor_t *out)",
     "Add a named parameter with its initial value, which is copied.",
     lambda graph, name, value: graph.builder.parameter(name, value))  # fmt: skip
_add("add_output(const char *name, stitch_tensor_t tensor)", "Add a named output.",
     lambda graph, name, tensor: graph.builder.output(name, tensor))  # fmt: skip


def add_operator(
    graph: Graph, op: str, domain: str | None, inputs: list[Any], attributes: str | None,
    outputs: int,
) -> Any:  # fmt: skip
    """Apply an operator with attributes as JSON."""
    given = parsed_json(attributes or "{}", "attributes")
    if not isinstance(given, dict):
        raise UsageError('attributes are an object, such as {"axis": 1}', got=str(given)[:60])
    if outputs > MAX_OUTPUTS:
        raise UsageError(f"an operator has at most {MAX_OUTPUTS} outputs", got=str(outputs))
    return graph.builder.apply(op, inputs, outputs, given, domain or "")


_add("add_op(const char *op, const char *domain, const stitch_tensor_t *inputs, "
     "size_t n_inputs, const char *attributes, stitch_tensor_t *outputs, size_t n_outputs)",
     "Add an operator by its ONNX name; attributes are a JSON object, a zero input is absent.",
     add_operator, "domain", "inputs", "attributes")  # fmt: skip

_X, _AB = "stitch_tensor_t input", "stitch_tensor_t a, stitch_tensor_t b"
for _name in (
    "relu", "sigmoid", "tanh", "gelu", "elu", "identity", "exp", "sin", "cos", "rsqrt",
):  # fmt: skip
    _add_op(_name, _X, f"`{_name}` of each element.", _name)
for _name, _method in {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "max": "maximum",
    "min": "minimum", "batch_matmul": "matmul",
}.items():  # fmt: skip
    _add_op(_name, _AB, f"`{_method}` of two tensors of one data type; axes broadcast.", _method)
for _name, _method in {
    "pow": "pow", "scalar_add": "add", "scalar_sub": "sub", "scalar_multiply": "mul",
    "scalar_truediv": "div",
}.items():  # fmt: skip
    _add_op(_name, f"{_X}, double scalar", f"`{_method}` of each element and a number.", _method)
for _name, _method in {"mean": "reduce_mean", "reduce_sum": "reduce_sum"}.items():
    _add_op(_name, f"{_X}, const int64_t *axes, size_t n_axes, int keepdims",
            f"`{_method}` over axes, which stay with length 1 if keepdims is not 0.",
            lambda b, x, axes, keepdims, reduce=_method: getattr(b, reduce)(
                x, axes, bool(keepdims)))  # fmt: skip
_add_op("flat", _X, "Join all axes but the first.", "flat")
_add_op("dense", f"{_X}, int64_t out_dim, const char *activation",
        "A linear layer that creates its parameters (`dense.weight`, `dense.bias`); activation: "
        "`relu`, `gelu`, ..., NULL for none.",
        lambda b, x, width, activation: b.dense(x, width, activation=activation),
        "activation")  # fmt: skip
_add_op("linear",
        f"{_X}, stitch_tensor_t weight, stitch_tensor_t bias, const char *activation",
        "A linear layer: input [..., in], weight [out, in], bias [out], zero for none.",
        "linear", "bias", "activation")  # fmt: skip
_add_op("conv2d",
        f"{_X}, stitch_tensor_t weight, stitch_tensor_t bias, int64_t stride_h, "
        "int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t groups, "
        "const char *activation",
        "2-D convolution: input [N, C, H, W], weight [M, C / groups, kH, kW], bias [M], zero for "
        "none.",
        lambda b, x, weight, bias, sh, sw, ph, pw, groups, activation: b.conv2d(
            x, weight, bias, stride=(sh, sw), padding=(ph, pw), groups=groups,
            activation=activation),
        "bias", "activation")  # fmt: skip
_add_op("pool2d",
        f"{_X}, int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w, "
        "int64_t padding_h, int64_t padding_w, const char *kind",
        "2-D pooling of [N, C, H, W]; kind: `max` or `average`.",
        lambda b, x, kh, kw, sh, sw, ph, pw, kind: b.pool2d(
            x, (kh, kw), stride=(sh, sw), padding=(ph, pw), kind=kind))  # fmt: skip
_add_op("batch_norm",
        f"{_X}, stitch_tensor_t scale, stitch_tensor_t bias, stitch_tensor_t mean, "
        "stitch_tensor_t variance, double epsilon, int relu",
        "Batch normalization by given statistics, with a relu if relu is not 0.",
        lambda b, x, scale, bias, mean, variance, epsilon, relu: b.batch_norm(
            x, scale, bias, mean, variance, epsilon=epsilon, relu=bool(relu)))  # fmt: skip
_add_op("layer_norm",
        f"{_X}, stitch_tensor_t scale, stitch_tensor_t bias, int64_t axis, double epsilon",
        "Layer normalization over the axes from `axis` on; scale and bias may be zero.",
        lambda b, x, scale, bias, axis, epsilon: b.layer_norm(
            x, scale, bias, axis=axis, epsilon=epsilon), "scale", "bias")  # fmt: skip
_add_op("embedding", "stitch_tensor_t indices, stitch_tensor_t table, const char *aggregate",
        "Rows of a table [entries, width]; aggregate: `sum`, `mean`, NULL for none.",
        "embedding", "aggregate")  # fmt: skip
_add_op("multihead_attention",
        "stitch_tensor_t query, stitch_tensor_t key, stitch_tensor_t value, "
        "const stitch_tensor_t *weights, size_t n_weights, const stitch_tensor_t *biases, "
        "size_t n_biases, int64_t heads, int causal",
        "Attention over [batch, length, width]; four weights [out, in] and biases (NULL, 0 for "
        "none), of query, key, value and output.",
        lambda b, query, key, value, weights, biases, heads, causal: b.multi_head_attention(
            query, key, value, weights, biases or (None,) * 4, heads=heads,
            causal=bool(causal)), "biases")  # fmt: skip
_add_op("softmax", f"{_X}, int64_t axis", "Softmax along an axis.", "softmax")
_add_op(
    "dropout",
    f"{_X}, double rate",
    "Dropout for inference: x; not for training if the rate is above 0.",
    "dropout",
)
_add_op("cast", f"{_X}, int type", "Conversion to a stitch_data_type_t.", "cast")
_add_op("gather", f"{_X}, stitch_tensor_t indices, int64_t axis",
        "One element per index along an axis.", "gather_elements")  # fmt: skip
_add_op("concat", "const stitch_tensor_t *inputs, size_t n_inputs, int64_t axis",
        "Join tensors along an axis.", "concat")  # fmt: skip
_add_op("reshape", f"{_X}, const int64_t *shape, size_t rank",
        "The same elements in another shape; one length may be -1.", "reshape")  # fmt: skip
_add_op("transpose", f"{_X}, const int64_t *axes, size_t n_axes", "Axes in another order.",
        "transpose")  # fmt: skip
_add_op("reverse", f"{_X}, int64_t axis", "Elements along an axis in reverse order.", "reverse")
_add(f"add_op_split({_X}, const int64_t *sizes, size_t n_sizes, int64_t axis, "
     "stitch_tensor_t *outputs, size_t n_outputs)",
     "Split along an axis into parts of these sizes.",
     lambda graph, x, sizes, axis, outputs: graph.builder.split(x, sizes, axis))  # fmt: skip
_add(f"add_op_topk({_X}, int64_t k, int sorted, stitch_tensor_t *outputs, size_t n_outputs)",
     "The k largest elements along the last axis, and their int64 indices: two outputs.",
     lambda graph, x, k, is_sorted, outputs: graph.builder.topk(
         x, k, sorted=bool(is_sorted)))  # fmt: skip

TABLE.add(
    "stitch_tensor_name(stitch_computation_graph_t graph, stitch_tensor_t tensor, char *text, "
    "size_t capacity, size_t *needed)",
    "The name of a tensor in its graph, by which stitch_get_tensor_float reads it.",
    lambda graph, tensor: graph.builder.name_of(tensor.index),
)


def set_loss(graph: Graph, loss: str) -> None:
    """Set the loss of a graph, by name or configuration."""
    from stitch.training import loss_of

    graph.loss = loss_of(config_of(loss, "loss"))


_add("set_loss(const char *loss)",
     "Set the loss for training: its name (`mse`, `sparse_categorical_crossentropy`, ...), or a "
     "JSON object with `loss` and its settings.", set_loss)  # fmt: skip
_add("as_json(char *text, size_t capacity, size_t *needed)",
     "The graph as JSON; nothing can be added to it afterwards.",
     lambda graph: as_json(graph.build()))  # fmt: skip
TABLE.add(
    "stitch_computation_graph_from_json(const char *json, stitch_computation_graph_t *out)",
    "Read a graph from JSON.", lambda text: Graph(from_json(text)),
)  # fmt: skip

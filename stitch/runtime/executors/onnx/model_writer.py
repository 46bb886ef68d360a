"""Write an ONNX model node by node, and look up operator schemas.

A model imports one opset per domain; an operator has its newest definition up to that opset.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as library

from stitch.errors import CompileError, FormatError
from stitch.ops import lookup, onnx_code
from stitch.program import (
    ABSENT,
    Array,
    AttributeValue,
    DataType,
    Operation,
    Program,
    ValueType,
)
from stitch.runtime.executors.host import computable, compute_type

# Operator schemas


@cache
def _definitions() -> Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]:
    """Return the attribute types of each operator by (domain, name) and version, ascending."""
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for schema in library.get_all_operator_schema():
        kinds = {name: attribute.type for name, attribute in schema.attributes.items()}
        found.setdefault((schema.domain, schema.name), {})[int(schema.since_version)] = kinds
    return {key: dict(sorted(versions.items())) for key, versions in found.items()}


def draws_random_numbers(op: str, domain: str) -> bool:
    """Whether an operator's results differ from run to run."""
    # An integer `seed` is that of a hash function.
    real = library.schemadef.OpSchema.AttrType.FLOAT
    versions = _definitions().get((domain, op), {})
    return any(kinds.get("seed") == real for kinds in versions.values())


def is_tensor_attribute(op: str, domain: str, version: int, name: str) -> bool:
    """Whether an attribute of an operator is a tensor at a version of its domain.

    >>> is_tensor_attribute("LabelEncoder", "ai.onnx.ml", 4, "keys_tensor")
    True
    """
    kinds = _definitions().get((domain, op), {}).get(version, {})
    return bool(kinds.get(name) == library.schemadef.OpSchema.AttrType.TENSOR)


def defining_version(op: str, domain: str, opset: int) -> int:
    """Return the version that defines an operator at an opset of its domain; 0 if none does.

    >>> defining_version("LabelEncoder", "ai.onnx.ml", 3), defining_version("Nothing", "", 20)
    (2, 0)
    """
    versions = list(_definitions().get((domain, op), {}))
    index = bisect_right(versions, opset)
    return versions[index - 1] if index else 0


# Writing

Attributes = Mapping[str, AttributeValue]

OPSET = 26
IR_VERSION = 13
#: Constants up to this size are written into the model: optimisers read them (shapes, scalars).
EMBEDDED_NBYTES = 1024
#: Wrong (1.31) for a Pad with zeros before a MaxPool, whose own padding is below every number.
PAD_FUSION = "Pad_Fusion"
#: Wrong (1.31) for float64: it stores the scale as float32.
SCALE_FUSION = "MatMulScaleFusion"
#: Wrong (1.32) for int8 at opset 21 and newer: the model is refused, as another optimiser changes
#: the pairs' type to uint8 but not their type attribute.
PAIRS_PROPAGATION = "QDQPropagationTransformer"
#: Wrong (1.32) for weights without one scale for the whole tensor, which it quantizes to int8.
WEIGHTS_QUANTIZATION = "WeightBiasQuantization"
#: Wrong (1.32) for a mean of single elements with a longer scale: the kernel fails.
NORM_FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """A serialized ONNX model, the program's values that are its inputs and outputs, its weights.

    Attributes:
        weights: Large constants by name, which the session refers to.
        chunked: Outputs that the model returns in another shape, with the same elements.
        without: Optimisers to disable, as they would change the results.
    """

    serialized: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[tuple[str, Array], ...]
    chunked: Mapping[int, tuple[int, ...]]
    without: tuple[str, ...] = ()


def value_name(value: int) -> str:
    """Return the name of a value in the model; names from the program's file are never used."""
    return f"v{value}"


def value_info(value: int, kind: ValueType, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    """Declare an input or output of a model."""
    return helper.make_tensor_value_info(value_name(value), onnx_code(compute_type(kind)), shape)


def placeholder(name: str, data: Array) -> TensorProto:
    """Declare a large constant, whose array the session's options supply under its name."""
    code = onnx_code(DataType.from_dtype(data.dtype))
    tensor = TensorProto(
        name=name, data_type=code, dims=data.shape, data_location=TensorProto.EXTERNAL
    )
    facts = {"location": "constants", "offset": "0", "length": str(data.nbytes)}
    for key, text in facts.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def attribute_protos(operation: Operation) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of a foreign operation; raises `FormatError` for a malformed tensor."""
    for name, value in sorted(operation.attributes.items()):
        if is_tensor_attribute(operation.op, operation.domain, operation.opset, name):
            yield helper.make_attribute(name, _tensor_of(str(value), name, operation))
        else:
            yield helper.make_attribute(name, list(value) if isinstance(value, tuple) else value)


def tensor_text(data: Array) -> str:
    """Encode a tensor as an attribute of a foreign operation: its proto in base64."""
    return base64.b64encode(numpy_helper.from_array(data).SerializeToString()).decode()


def _tensor_of(text: str, name: str, operation: Operation) -> TensorProto:
    try:
        return TensorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        raise FormatError(
            f"attribute {name!r} of {operation.title} is not an encoded tensor",
            where=operation.location, expected="a TensorProto in base64", got=text[:40],
        ) from error  # fmt: skip


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their inner graphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g.node)


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node and its inner graphs read."""
    for each in all_nodes([node]):
        yield from each.input


def as_lists(attributes: Attributes) -> dict[str, Any]:
    """Return attributes as `make_node` takes them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}


class ModelWriter:
    """An ONNX model under construction; `constants` are those that its operations read."""

    def __init__(self, program: Program, constants: dict[int, Array]) -> None:
        self.program = program
        self.constants = constants
        #: Types of the values of inner graphs, which are numbered after the program's values.
        self.inner_types: list[ValueType] = []
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.weights: list[tuple[str, Array]] = []
        #: The values that nodes refer to.
        self.used: set[int] = set()
        #: Names of values that nodes read under another name than `value_name`.
        self.named: dict[int, str] = {}
        self.chunked: dict[int, tuple[int, ...]] = {}
        #: The opset of each foreign operator in the model, by domain and name.
        self.foreign: dict[tuple[str, str], int] = {}
        self._names = 0
        self._body_constants: dict[tuple[int, int], int] = {}

    def number_body_values(self, index: int, outer: Mapping[int, int]) -> dict[int, int]:
        """Number the values of a body in the model, so that every name is unique.

        Args:
            index: The body.
            outer: Numbers of body values that are values of the surrounding graph.

        Returns:
            The number of each body value. Constants are shared by all uses of the body.
        """
        body, at = self.program.bodies[index], {ABSENT: ABSENT, **outer}
        for constant in body.constants:
            key = index, constant.value
            if key not in self._body_constants:
                self._body_constants[key] = number = self._add_value(
                    body.values[constant.value].type
                )
                self.constants[number] = constant.data
            at[constant.value] = self._body_constants[key]
        for value, described in enumerate(body.values):
            if value not in at:
                at[value] = self._add_value(described.type)
        return at

    def _add_value(self, kind: ValueType) -> int:
        self.inner_types.append(kind)
        return len(self.program.values) + len(self.inner_types) - 1

    def type_of(self, value: int) -> ValueType:
        values = self.program.values
        return values[value].type if value < len(values) else self.inner_types[value - len(values)]

    def known(self, value: int) -> Array | None:
        """Return the data of a constant; None for other values."""
        return self.constants.get(value)

    def fresh(self) -> str:
        """Return an unused name."""
        self._names += 1
        return f"t{self._names}"

    def operand(self, value: int) -> str:
        """Return the name of an operand, writing a constant on first use."""
        if value == ABSENT:
            return ""
        data = self.constants.get(value)
        if data is not None and value not in self.used:
            kind = self.type_of(value)
            if kind.data_type.is_narrow:
                # ONNX packs two elements into a byte, so the array cannot be referred to.
                self.initializers.append(numpy_helper.from_array(data, value_name(value)))
            else:
                self._write_constant(value_name(value), computable(data, kind))
        self.used.add(value)
        return self.named.get(value) or value_name(value)

    def constant(self, data: Array) -> str:
        """Add a constant and return its name."""
        name = self.fresh()
        self._write_constant(name, data)
        return name

    def node(self, op: str, inputs: Sequence[str], output: str | None = None,
             **attributes: object) -> str:  # fmt: skip
        """Add a node with one output and return the output's name."""
        output = output or self.fresh()
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def give(
        self, operation: Operation, op: str, inputs: Sequence[str], **attributes: object
    ) -> Literal[True]:
        """Add a node whose output is the operation's result; return True for rewrites."""
        self.node(op, inputs, value_name(operation.outputs[0]), **attributes)
        return True

    def scalar(self, number: object, kind: type[np.generic]) -> str:
        """Add a scalar constant and return its name."""
        return self.constant(np.array(number, kind))

    def ints(self, *numbers: int) -> str:
        """Add a constant int64 vector and return its name."""
        return self.constant(np.array(numbers, np.int64))

    def second_output(self, op: str, inputs: Sequence[str], **attributes: object) -> str:
        """Add a node with two outputs and return the name of the second."""
        outputs = [self.fresh(), self.fresh()]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, **attributes))
        return outputs[1]

    def cast(self, name: str, kind: DataType, output: str | None = None) -> str:
        """Add a Cast and return the output's name."""
        return self.node("Cast", [name], output, to=onnx_code(kind))

    def over_chunks(
        self,
        operands: Sequence[int],
        results: Sequence[int],
        count: int,
        write: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        """Compute long elementwise operations in chunks that stay in the caches, by a `Scan`.

        Args:
            operands: Values of the results' type and size.
            results: The values that `write` computes.
            count: Number of chunks.
            write: Adds the nodes for one chunk: names of the operands' chunks to those of the
                results' chunks.
        """
        kind = self.type_of(results[0])
        cut = self.ints(count, -1)
        chunks = [self.node("Reshape", [self.operand(v), cut]) for v in operands]
        rows, size = [self.fresh() for _ in operands], math.prod(kind.shape) // count
        outer, self.nodes = self.nodes, []
        inner = write(rows)
        body, self.nodes = self.nodes, outer
        scanned = [self.output_name_as(v, (count, size)) for v in results]
        code = onnx_code(kind.data_type)
        slots = (
            [helper.make_tensor_value_info(name, code, (size,)) for name in names]
            for names in (rows, inner)
        )
        graph = helper.make_graph(body, "chunk", *slots)
        node = helper.make_node("Scan", chunks, scanned, body=graph, num_scan_inputs=len(chunks))
        self.nodes.append(node)
        for value, name in zip(results, scanned, strict=True):
            self.restore_shape(value, name)

    def output_name_as(self, value: int, shape: tuple[int, ...]) -> str:
        """Return the name for a result computed in another shape of the same bytes.

        A model output is returned in that shape: a Reshape would copy it.
        """
        if value not in {s.value for s in self.program.outputs}:
            return self.fresh()
        self.chunked[value] = shape
        return value_name(value)

    def restore_shape(self, value: int, name: str) -> None:
        """Reshape a result named by `output_name_as` for its readers within the model."""
        if value not in self.chunked or any(value in o.inputs for o in self.program.operations):
            whole = value_name(value) if value not in self.chunked else self.fresh()
            self.node("Reshape", [name, self.ints(*self.type_of(value).shape)], whole)
            self.named[value] = whole

    def plain(self, operation: Operation, attributes: Attributes) -> None:
        """Add an operation as a node of the same operator."""
        outputs = [value_name(v) if v != ABSENT else "" for v in operation.outputs]
        least = lookup(operation.op, operation.domain).outputs[0]
        while len(outputs) > least and not outputs[-1]:
            outputs.pop()
        # An empty list has no type; for every ONNX attribute it means the same as absence.
        written = as_lists({k: v for k, v in attributes.items() if v != ()})
        inputs = [self.operand(v) for v in operation.inputs]
        named = [name or self.fresh() for name in outputs]
        self.nodes.append(helper.make_node(operation.op, inputs, named, **written))

    def plain_foreign(self, operation: Operation) -> None:
        """Add a foreign operation on operands of their own types, not of their compute types."""
        key = operation.domain, operation.op
        if self.foreign.setdefault(key, operation.opset) != operation.opset:
            raise CompileError(
                f"one model cannot hold {operation.title} of opset {operation.opset} and of "
                f"opset {self.foreign[key]}"
            )
        for value in operation.inputs:
            data = self.constants.get(value)
            if data is not None and not data.size:
                # Kernels read the first element when they are created.
                raise CompileError("ONNX Runtime crashes for an empty constant operand here")
        inputs = [self._in_own_type(v) for v in operation.inputs]
        outputs, rounded = [], []
        for value in operation.outputs:
            name = "" if value == ABSENT else value_name(value)
            if name and compute_type(self.type_of(value)) is not self.type_of(value).data_type:
                name = self.fresh()
                rounded.append((name, value))
            outputs.append(name)
        node = helper.make_node(operation.op, inputs, outputs, domain=operation.domain)
        node.attribute.extend(attribute_protos(operation))
        self.nodes.append(node)
        for name, value in rounded:
            self.cast(name, compute_type(self.type_of(value)), value_name(value))

    def _in_own_type(self, value: int) -> str:
        """Return the name of an operand in its own type, not its compute type."""
        if value == ABSENT:
            return ""
        kind, name = self.type_of(value), self.operand(value)
        return name if compute_type(kind) is kind.data_type else self.cast(name, kind.data_type)

    def _write_constant(self, name: str, data: Array) -> None:
        if data.nbytes <= EMBEDDED_NBYTES:
            self.initializers.append(numpy_helper.from_array(data, name))
            return
        self.initializers.append(placeholder(name, data))
        self.weights.append((name, np.ascontiguousarray(data)))

    def versions(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[str, int]:
        """Return the opset of each domain; raises `CompileError` if operators have no common one,
        and for inputs or outputs of narrow types, which ONNX packs several into a byte."""
        for kind in (self.type_of(value).data_type for value in (*inputs, *outputs)):
            if kind.is_narrow:
                raise CompileError(f"{kind.value} tensors cannot be inputs or outputs of a model")
        domains = sorted({node.domain for node in all_nodes(self.nodes) if node.domain})
        return {domain: self._version(domain) for domain in ("", *domains)}

    def finish(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> OnnxModel:
        """Build the model; raises what `versions` raises."""
        versions = self.versions(inputs, outputs)
        graph = helper.make_graph(
            self._in_order(), "program", [self._info(v) for v in inputs],
            [self._info(v) for v in outputs], self.initializers,
        )  # fmt: skip
        opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return OnnxModel(
            model.SerializeToString(), inputs, outputs, tuple(self.weights), self.chunked,
            self._wrong_optimisers(),
        )  # fmt: skip

    def _version(self, domain: str) -> int:
        """Return the opset at which all foreign operators of a domain have their definitions."""
        found = {op: version for (its, op), version in self.foreign.items() if its == domain}
        newest = max(found.values(), default=1) if domain else OPSET
        for op, version in found.items():
            if defining_version(op, domain, newest) != version:
                raise CompileError(
                    f"one model cannot hold {op} of opset {version} and operators of "
                    f"{domain or 'ai.onnx'} of opset {newest}, which redefines it"
                )
        return newest

    def _wrong_optimisers(self) -> tuple[str, ...]:
        nodes = list(all_nodes(self.nodes))
        padded = {name for node in nodes if node.op_type == "Pad" for name in node.output}
        pools_padding = any(n.op_type == "MaxPool" and n.input[0] in padded for n in nodes)
        is_double = any(self.type_of(v).data_type is DataType.FLOAT64 for v in self.used)
        quantizes = any(node.op_type == "QuantizeLinear" for node in nodes)
        is_int8 = quantizes and any(self.type_of(v).data_type is DataType.INT8 for v in self.used)
        optimizers = {
            PAD_FUSION: pools_padding, SCALE_FUSION: is_double, PAIRS_PROPAGATION: is_int8,
            WEIGHTS_QUANTIZATION: quantizes,
            **dict.fromkeys(NORM_FUSIONS, any(map(self._is_mean_of_one, nodes))),
        }  # fmt: skip
        return tuple(name for name, is_wrong in optimizers.items() if is_wrong)

    def _is_mean_of_one(self, node: onnx.NodeProto) -> bool:
        """Whether a node takes means of single elements."""
        if node.op_type != "ReduceMean":
            return False
        count = len(self.program.values) + len(self.inner_types)
        kinds = {value_name(v): self.type_of(v) for v in range(count)}
        ends = [kinds.get(name) for name in (node.input[0], node.output[0])]
        sizes = {math.prod(kind.shape) for kind in ends if kind is not None}
        return len(sizes) == 1 and None not in ends

    def _in_order(self) -> list[onnx.NodeProto]:
        """Order the nodes so that ONNX Runtime runs leaf nodes early, as the program does.

        It walks back from the leaf nodes (read by no other), the last one first. In program order,
        a backward pass would compute all weight gradients at its end.
        """
        read = {name for node in self.nodes for name in names_read(node)}
        ends = [node for node in self.nodes if read.isdisjoint(node.output)]
        others = [node for node in self.nodes if not read.isdisjoint(node.output)]
        return others + ends[::-1]

    def _info(self, value: int) -> onnx.ValueInfoProto:
        kind = self.type_of(value)
        return value_info(value, kind, self.chunked.get(value, kind.shape))

"""Write an ONNX model node by node: names, constants, types, and the schemas of its operators.

A model imports one version of a domain; an operator has the newest definition that is not newer.
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
    """By domain and name, the versions that define an operator anew, in rising order, each with the
    kinds of its attributes."""
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for schema in library.get_all_operator_schema():
        kinds = {name: attribute.type for name, attribute in schema.attributes.items()}
        found.setdefault((schema.domain, schema.name), {})[int(schema.since_version)] = kinds
    return {key: dict(sorted(versions.items())) for key, versions in found.items()}


def draws_random_numbers(op: str, domain: str) -> bool:
    """Whether an operator's results differ from run to run."""
    # Whole numbers are the seeds of hash functions.
    real = library.schemadef.OpSchema.AttrType.FLOAT
    versions = _definitions().get((domain, op), {})
    return any(kinds.get("seed") == real for kinds in versions.values())


def is_tensor_attribute(op: str, domain: str, version: int, name: str) -> bool:
    """Whether an attribute of an operator, as this version defines it, is a tensor.

    >>> is_tensor_attribute("LabelEncoder", "ai.onnx.ml", 4, "keys_tensor")
    True
    """
    kinds = _definitions().get((domain, op), {}).get(version, {})
    return bool(kinds.get(name) == library.schemadef.OpSchema.AttrType.TENSOR)


def defining_version(op: str, domain: str, opset: int) -> int:
    """The version that defines an operator as of an opset of its domain; 0 where none does.

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
#: Constants up to here are written into the model: optimisations look at them (shapes, scalars).
EMBEDDED_NBYTES = 1024
#: Makes one of a Pad and what reads it, also of a Pad with zeros and a MaxPool (1.31), whose own
#: padding counts as less than every number: of numbers below 0 the result would not be 0.
PAD_FUSION = "Pad_Fusion"
#: Makes one of a product and a number beside it, which it keeps as float32: of float64 (1.31) half
#: of the digits would be lost.
SCALE_FUSION = "MatMulScaleFusion"
#: Puts pairs of QuantizeLinear and DequantizeLinear around what only moves elements; those of int8
#: at opset 21 and newer (1.32) have the type as an attribute too, which another optimizer, that
#: makes them uint8, leaves as it was: the model is refused.
PAIRS_PROPAGATION = "QDQPropagationTransformer"
#: Makes weights of float32 between a DequantizeLinear and a QuantizeLinear int8, one scale for the
#: whole tensor (1.32): weights that have a scale a channel, or none, would be others.
WEIGHTS_QUANTIZATION = "WeightBiasQuantization"
#: Make one of what normalises and the scale behind it, also of a mean along axes of one element and
#: a scale that makes it longer (1.32): the kernel stops.
NORM_FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")


@dataclass(frozen=True, slots=True, eq=False)
class OnnxForm:
    """A model, the values that are its inputs and outputs, and its constants by name.

    `chunked` has the outputs that the model gives in another shape, the same elements; `without`
    names the optimizers that would change what the model computes; `is_optimised` models are run as
    they are.
    """

    model: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[tuple[str, Array], ...]
    chunked: Mapping[int, tuple[int, ...]]
    without: tuple[str, ...] = ()
    is_optimised: bool = False


def value_name(value: int) -> str:
    """The name of a value in the model: names of a file are data and stay out."""
    return f"v{value}"


def value_info(value: int, kind: ValueType, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    """The declaration of a value that goes in or out of a model."""
    return helper.make_tensor_value_info(value_name(value), onnx_code(compute_type(kind)), shape)


def placeholder(name: str, data: Array) -> TensorProto:
    """What stands for a large constant: ONNX Runtime is given the array itself under this name, by
    the session's options."""
    code = onnx_code(DataType.from_dtype(data.dtype))
    tensor = TensorProto(
        name=name, data_type=code, dims=data.shape, data_location=TensorProto.EXTERNAL
    )
    facts = {"location": "constants", "offset": "0", "length": str(data.nbytes)}
    for key, text in facts.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def attribute_protos(operation: Operation) -> Iterator[onnx.AttributeProto]:
    """The attributes of a foreign operation; raises `FormatError` for one that is not the text of
    a tensor, where its operator has a tensor."""
    for name, value in sorted(operation.attributes.items()):
        if is_tensor_attribute(operation.op, operation.domain, operation.opset, name):
            yield helper.make_attribute(name, _tensor_of(str(value), name, operation))
        else:
            yield helper.make_attribute(name, list(value) if isinstance(value, tuple) else value)


def tensor_text(data: Array) -> str:
    """A tensor as the value of an attribute of a foreign operation: its proto in base64."""
    return base64.b64encode(numpy_helper.from_array(data).SerializeToString()).decode()


def _tensor_of(text: str, name: str, operation: Operation) -> TensorProto:
    try:
        return TensorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        raise FormatError(
            f"attribute {name!r} of {operation.title} is not the text of a tensor",
            where=operation.location, expected="a TensorProto in base64", got=text[:40],
        ) from error  # fmt: skip


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those within their bodies."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g.node)


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, also from within its bodies."""
    for each in all_nodes([node]):
        yield from each.input


class FormWriter:
    """A model under construction; rewrites of operators write their nodes through it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = dict(program.constant_data())
        #: Types of the program's values, and of those of bodies, which get new numbers.
        self.types = [value.type for value in program.values]
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.weights: list[tuple[str, Array]] = []
        #: The values that nodes refer to.
        self.used: set[int] = set()
        #: Values that nodes know by another name, and those that go out as so many chunks.
        self.named: dict[int, str] = {}
        self.chunked: dict[int, tuple[int, ...]] = {}
        #: Foreign operators in the model, by domain and name: the version that defines each.
        self.foreign: dict[tuple[str, str], int] = {}
        self._names = 0
        self._body_constants: dict[tuple[int, int], int] = {}

    def entered(self, index: int, given: Mapping[int, int]) -> dict[int, int]:
        """New numbers for the values of a body, by its own, but for inputs that are `given` theirs.

        So no two values of the model have one name, and a body reads what is around it by name. Its
        constants are the model's, once for all that carry it.
        """
        body, at = self.program.bodies[index], {ABSENT: ABSENT, **given}
        for constant in body.constants:
            key = index, constant.value
            if key not in self._body_constants:
                self._body_constants[key] = number = self._new(body.values[constant.value].type)
                self.constants[number] = constant.data
            at[constant.value] = self._body_constants[key]
        for value, described in enumerate(body.values):
            if value not in at:
                at[value] = self._new(described.type)
        return at

    def _new(self, kind: ValueType) -> int:
        self.types.append(kind)
        return len(self.types) - 1

    def type_of(self, value: int) -> ValueType:
        """The type of a value."""
        return self.types[value]

    def known(self, value: int) -> Array | None:
        """The data of a constant; None for other values."""
        return self.constants.get(value)

    def fresh(self) -> str:
        """A name that nothing has yet."""
        self._names += 1
        return f"t{self._names}"

    def operand(self, value: int) -> str:
        """The name of an operand; a constant is written when it is first used."""
        if value == ABSENT:
            return ""
        data = self.constants.get(value)
        if data is not None and value not in self.used:
            kind = self.type_of(value)
            if kind.data_type.is_narrow:
                # Two elements a byte there, so it cannot take the array itself.
                self.initializers.append(numpy_helper.from_array(data, value_name(value)))
            else:
                self._write_constant(value_name(value), computable(data, kind))
        self.used.add(value)
        return self.named.get(value) or value_name(value)

    def constant(self, data: Array) -> str:
        """The name of a new constant."""
        name = self.fresh()
        self._write_constant(name, data)
        return name

    def node(self, op: str, inputs: Sequence[str], output: str | None = None,
             **attributes: object) -> str:  # fmt: skip
        """Add a node with one output; gives the output's name."""
        output = output or self.fresh()
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def give(
        self, operation: Operation, op: str, inputs: Sequence[str], **attributes: object
    ) -> Literal[True]:
        """Add a node that gives an operation's result: the operation is rewritten."""
        self.node(op, inputs, value_name(operation.outputs[0]), **attributes)
        return True

    def scalar(self, number: object, kind: type[np.generic]) -> str:
        """The name of a constant without dimensions."""
        return self.constant(np.array(number, kind))

    def ints(self, *numbers: int) -> str:
        """The name of a constant vector of whole numbers."""
        return self.constant(np.array(numbers, np.int64))

    def second(self, op: str, inputs: Sequence[str], **attributes: object) -> str:
        """Add a node with two outputs; gives the name of the second."""
        outputs = [self.fresh(), self.fresh()]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, **attributes))
        return outputs[1]

    def cast(self, name: str, kind: DataType, output: str | None = None) -> str:
        """Add a node that converts to a type; gives the output's name."""
        return self.node("Cast", [name], output, to=onnx_code(kind))

    def over_chunks(
        self,
        operands: Sequence[int],
        results: Sequence[int],
        count: int,
        write: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        """Long operands in chunks, a `Scan` over them, and its results, all of one type.

        ONNX Runtime computes every node over the whole of its operands, so each of a dozen passes
        goes by way of memory; the rows of a `Scan` are views, and stay in the caches. `write` is
        given the names of one chunk of each operand, writes nodes, and gives the names of the
        results.
        """
        kind = self.type_of(results[0])
        cut = self.ints(count, -1)
        chunks = [self.node("Reshape", [self.operand(v), cut]) for v in operands]
        rows, size = [self.fresh() for _ in operands], math.prod(kind.shape) // count
        outer, self.nodes = self.nodes, []
        inner = write(rows)
        body, self.nodes = self.nodes, outer
        scanned = [self.given_as(v, (count, size)) for v in results]
        code = onnx_code(kind.data_type)
        slots = (
            [helper.make_tensor_value_info(name, code, (size,)) for name in names]
            for names in (rows, inner)
        )
        graph = helper.make_graph(body, "chunk", *slots)
        node = helper.make_node("Scan", chunks, scanned, body=graph, num_scan_inputs=len(chunks))
        self.nodes.append(node)
        for value, name in zip(results, scanned, strict=True):
            self.shaped_back(value, name)

    def given_as(self, value: int, shape: tuple[int, ...]) -> str:
        """The name under which a node gives a value in another shape, the same bytes. So it goes
        out of the model: a node that gave it its shape back would copy it."""
        if value not in {s.value for s in self.program.outputs}:
            return self.fresh()
        self.chunked[value] = shape
        return value_name(value)

    def shaped_back(self, value: int, name: str) -> None:
        """Give who reads a value within the model its shape back, where a node has given it under a
        name by `given_as`."""
        if value not in self.chunked or any(value in o.inputs for o in self.program.operations):
            whole = value_name(value) if value not in self.chunked else self.fresh()
            self.node("Reshape", [name, self.ints(*self.type_of(value).shape)], whole)
            self.named[value] = whole

    def plain(self, operation: Operation, attributes: Attributes) -> None:
        """Add an operation as it is."""
        outputs = [value_name(v) if v != ABSENT else "" for v in operation.outputs]
        least = lookup(operation.op, operation.domain).outputs[0]
        while len(outputs) > least and not outputs[-1]:
            outputs.pop()
        # An empty list does not say of what: no attribute of ONNX's means more by one than by none.
        written = {
            k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items() if v != ()
        }
        inputs = [self.operand(v) for v in operation.inputs]
        named = [name or self.fresh() for name in outputs]
        self.nodes.append(helper.make_node(operation.op, inputs, named, **written))

    def plain_foreign(self, operation: Operation) -> None:
        """Add an operation of a foreign operator, on operands of their own types."""
        key = operation.domain, operation.op
        if self.foreign.setdefault(key, operation.opset) != operation.opset:
            raise CompileError(
                f"one model cannot hold {operation.title} of opset {operation.opset} and of "
                f"{self.foreign[key]}"
            )
        for value in operation.inputs:
            data = self.constants.get(value)
            if data is not None and not data.size:
                # Its kernels read the first element while they are made.
                raise CompileError("a constant without elements is not given to it")
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
        """The name of an operand in the type that it has, not in the one that it is computed in."""
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

    def form(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> OnnxForm:
        """The finished model; raises `CompileError` where a narrow type would go in or out: it
        packs several elements into a byte."""
        for kind in (self.type_of(value).data_type for value in (*inputs, *outputs)):
            if kind.is_narrow:
                raise CompileError(f"tensors of type {kind.value} are not given to it")
        graph = helper.make_graph(
            self._in_order(), "program", [self._info(v) for v in inputs],
            [self._info(v) for v in outputs], self.initializers,
        )  # fmt: skip
        domains = sorted({node.domain for node in all_nodes(self.nodes) if node.domain})
        versions = {domain: self._version(domain) for domain in ("", *domains)}
        opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return OnnxForm(
            model.SerializeToString(), inputs, outputs, tuple(self.weights), self.chunked,
            self._without(),
        )  # fmt: skip

    def _version(self, domain: str) -> int:
        """The version of a domain at which all foreign operators of it mean what they should."""
        found = {op: version for (its, op), version in self.foreign.items() if its == domain}
        newest = max(found.values(), default=1) if domain else OPSET
        for op, version in found.items():
            if defining_version(op, domain, newest) != version:
                raise CompileError(
                    f"one model cannot hold {op} of opset {version} beside operators of "
                    f"{domain or 'ai.onnx'} of opset {newest}, where it is another"
                )
        return newest

    def _without(self) -> tuple[str, ...]:
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
        kinds = {value_name(v): self.type_of(v) for v in range(len(self.types))}
        ends = [kinds.get(name) for name in (node.input[0], node.output[0])]
        sizes = {math.prod(kind.shape) for kind in ends if kind is not None}
        return len(sizes) == 1 and None not in ends

    def _in_order(self) -> list[onnx.NodeProto]:
        """The nodes, those that no other reads at the end, the last of them first.

        ONNX Runtime goes back from such nodes, beginning with the last, and runs what each needs.
        So it runs them soon after what they read was made and while it is in the cache, as the
        program has it; a backward pass would else make the weights' gradients at its very end.
        """
        read = {name for node in self.nodes for name in names_read(node)}
        ends = [node for node in self.nodes if read.isdisjoint(node.output)]
        others = [node for node in self.nodes if not read.isdisjoint(node.output)]
        return others + ends[::-1]

    def _info(self, value: int) -> onnx.ValueInfoProto:
        kind = self.type_of(value)
        return value_info(value, kind, self.chunked.get(value, kind.shape))

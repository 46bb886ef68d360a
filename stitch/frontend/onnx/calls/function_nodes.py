"""Operators that are functions: of the model itself, or defined by ONNX through other operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import defs, helper

from stitch import ops
from stitch.errors import FormatError
from stitch.frontend.onnx.protos import NEWEST_OPSET, attribute_value, plain_domain
from stitch.program import ValueType

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A function body, and the values of its attributes for one call."""

    body: Any
    attributes: Mapping[str, Any]
    is_local: bool


class Functions:
    """The functions of one model, and those of ONNX's own schemas."""

    def __init__(self, model: Any, title: str) -> None:
        self._local: dict[Key, Any] = {}
        for function in model.functions:
            key = (plain_domain(function.domain), function.name, function.overload)
            if key in self._local:
                raise FormatError(f"the function {function.name!r} is defined twice", where=title)
            self._local[key] = function

    def local(self, node: Any, attributes: Mapping[str, Any], where: str) -> Expansion | None:
        """The function of the model that a node calls."""
        key = (plain_domain(node.domain), node.op_type, node.overload)
        body = self._local.get(key)
        if body is None:
            return None
        defaults = {a.name: attribute_value(a, where) for a in body.attribute_proto}
        return Expansion(body, defaults | dict(attributes), True)

    def has_schema(self, op: str, domain: str, version: int) -> bool:
        """Whether ONNX defines the operator through others."""
        schema = _schema(op, domain, version)
        return schema is not None and (schema.has_function or schema.has_context_dependent_function)

    def of_schema(
        self,
        node: Any,
        version: int,
        attributes: Mapping[str, Any],
        operands: Sequence[ValueType | None],
        where: str,
    ) -> Expansion | None:
        """The definition of an operator through others, for operands of these types."""
        schema = _schema(node.op_type, node.domain, version)
        if schema is None:
            return None
        try:
            data = _body(schema, version, node, attributes, operands)
        except Exception:
            # The builders of bodies are C++, and look at types that a bad node does not have.
            return None
        if not data:
            return None
        body = onnx.FunctionProto()
        body.ParseFromString(data)
        defaults = {
            name: attribute_value(a.default_value, where)
            for name, a in schema.attributes.items()
            if a.default_value.type != onnx.AttributeProto.UNDEFINED
        }
        return Expansion(body, defaults | dict(attributes), False)


def _schema(op: str, domain: str, version: int) -> Any:
    try:
        return defs.get_schema(op, version, plain_domain(domain))
    except defs.SchemaError:
        return None


def _body(
    schema: Any,
    version: int,
    node: Any,
    attributes: Mapping[str, Any],
    operands: Sequence[ValueType | None],
) -> bytes:
    """The serialized body; empty if there is none for this call."""
    plain, contextual = (
        schema.function_opset_versions,
        schema.context_dependent_function_opset_versions,
    )
    if plain:
        usable = [v for v in plain if v <= version] or [v for v in plain if v <= NEWEST_OPSET]
        if usable:
            return bytes(schema.get_function_with_opset_version(max(version, min(usable))))
    usable = [v for v in contextual if v <= version] or list(contextual[:1])
    if not usable:
        return b""
    call = onnx.NodeProto()
    call.CopyFrom(node)
    del call.attribute[:]
    call.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    types = [_type(operand).SerializeToString() for operand in operands]
    return bytes(
        schema.get_context_dependent_function_with_opset_version(
            max(usable), call.SerializeToString(), types
        )
    )


def _type(operand: ValueType | None) -> Any:
    if operand is None:
        return onnx.TypeProto()
    return helper.make_tensor_type_proto(ops.onnx_code(operand.data_type), operand.shape)

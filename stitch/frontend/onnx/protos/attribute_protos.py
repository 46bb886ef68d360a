"""Attributes of ONNX nodes as Python values.

Comes in: `AttributeProto`s, and the attributes of the function call that they may refer to. Goes
out: numbers, strings, lists, and protos for tensors and graphs. Must not know: operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import AttributeProto

from stitch.errors import CompileError, FormatError

Attributes = dict[str, Any]


def text_of(raw: bytes | str, where: str) -> str:
    """A string of a model; raises `FormatError` where it is no UTF-8."""
    if isinstance(raw, str):
        return raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("a string is no UTF-8 text", where=where, got=repr(raw[:40])) from error


def attribute_value(attribute: Any, where: str) -> Any:
    """The value of one attribute; raises for the kinds that Stitch does not take."""
    kind, at = attribute.type, f"{where}, attribute {attribute.name!r}"
    plain = {
        AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.TENSOR: "t",
        AttributeProto.GRAPH: "g", AttributeProto.TYPE_PROTO: "tp",
    }  # fmt: skip
    if kind in plain:
        return getattr(attribute, plain[kind])
    if kind == AttributeProto.STRING:
        return text_of(attribute.s, at)
    if kind == AttributeProto.FLOATS:
        return tuple(float(value) for value in attribute.floats)
    if kind == AttributeProto.INTS:
        return tuple(int(value) for value in attribute.ints)
    if kind == AttributeProto.STRINGS:
        return tuple(text_of(value, at) for value in attribute.strings)
    known = kind in AttributeProto.AttributeType.values()
    name = AttributeProto.AttributeType.Name(kind).lower() if known else str(kind)
    raise CompileError(f"attributes of kind {name} are not supported", where=at)


def attributes_of(
    written: Iterable[Any], called_with: Mapping[str, Any] | None, where: str
) -> Attributes:
    """The attributes of a node by name.

    Inside a function an attribute may refer to one of the call's, and is absent where that is.
    """
    attributes: Attributes = {}
    for attribute in written:
        if attribute.name in attributes:
            raise FormatError(f"the attribute {attribute.name!r} is given twice", where=where)
        if not attribute.ref_attr_name:
            attributes[attribute.name] = attribute_value(attribute, where)
        elif called_with is None:
            raise FormatError(
                f"the attribute {attribute.name!r} refers to a function's attribute "
                f"{attribute.ref_attr_name!r}, but stands in no function",
                where=where,
            )
        elif attribute.ref_attr_name in called_with:
            attributes[attribute.name] = called_with[attribute.ref_attr_name]
    return attributes

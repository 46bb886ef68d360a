"""Computation graphs as JSON.

Version 1 is an object with `format` ("stitch.computation_graph"), `version`, `name`,
`inputs` [{name, value, kind, ownership}], `outputs` [{name, value, aliases_input}],
`values` [{name, shape, data_type}], `operations` [{op, domain, inputs, outputs, attributes,
location, body, opset}], `constants` [{value, data}], `placement` ["input.x.space=l1"], `bodies`
[{inputs, outputs, values, operations, constants}] and `initial_state` [{value, data}]. `body`,
`opset`, `bodies` and `initial_state` are optional. Attributes are {kind, value}; kind is int,
float, string, ints, floats or strings; the strings "nan", "inf" and "-inf" are floats. Constant
data is little-endian, row-major, base64; if it is absent, the caller passes the arrays by value
name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from stitch.errors import FormatError
from stitch.frozen_json import check_format, from_plain, located, read_json, to_plain
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.placement import parse_placement
from stitch.program import (
    ABSENT,
    Array,
    AttributeValue,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
)

FORMAT: Final = "stitch.computation_graph"
VERSION: Final = 1
_ATTRIBUTES: Mapping[str, Any] = {
    "int": int, "float": float, "string": str,
    "ints": tuple[int, ...], "floats": tuple[float, ...], "strings": tuple[str, ...],
}  # fmt: skip


class _Value(NamedTuple):
    name: str
    shape: tuple[int, ...]
    data_type: DataType
    is_numbered: bool = False


class _Input(NamedTuple):
    name: str
    value: int
    kind: InputKind
    ownership: Ownership


class _Output(NamedTuple):
    name: str
    value: int
    aliases_input: int | None


class _Attribute(NamedTuple):
    kind: Literal["int", "float", "string", "ints", "floats", "strings"]
    value: Any


class _Operation(NamedTuple):
    op: str
    domain: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, _Attribute]
    location: str
    body: int = ABSENT
    opset: int = 0


class _Constant(NamedTuple):
    value: int
    data: bytes | None = None


class _Body(NamedTuple):
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: tuple[_Value, ...]
    operations: tuple[_Operation, ...]
    constants: tuple[_Constant, ...]


class _Graph(NamedTuple):
    format: Literal["stitch.computation_graph"]
    version: Literal[1]
    name: str
    inputs: tuple[_Input, ...]
    outputs: tuple[_Output, ...]
    values: tuple[_Value, ...]
    operations: tuple[_Operation, ...]
    constants: tuple[_Constant, ...]
    placement: tuple[str, ...]
    bodies: tuple[_Body, ...] = ()
    initial_state: tuple[_Constant, ...] = ()


def as_json(graph: ComputationGraph, *, with_data: bool = True) -> str:
    """Return the graph as JSON text; `with_data=False` leaves out the data of constants."""
    body = as_data(graph, with_data=with_data)
    return json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def as_data(graph: ComputationGraph, *, with_data: bool = True) -> dict[str, Any]:
    """Return the content of `as_json` as dictionaries, lists, strings and numbers."""
    values = {slot.name: slot.value for slot in graph.inputs}
    body: dict[str, Any] = to_plain(_Graph(
        FORMAT, VERSION, graph.name,
        tuple([_Input(s.name, s.value, s.kind, s.ownership) for s in graph.inputs]),
        tuple([_Output(s.name, s.value, s.aliases_input) for s in graph.outputs]),
        *_contents_out(graph, with_data),
        tuple([option.text() for option in graph.placement]),
        # Constants of bodies are operator settings: always written with data.
        tuple([_Body(b.inputs, b.outputs, *_contents_out(b, True)) for b in graph.bodies]),
        tuple([
            _constant_out(Constant(values[name], array), with_data)
            for name, array in graph.initial_state.items()
        ]),
    ))  # fmt: skip
    return body


def _contents_out(
    part: ComputationGraph | Body, with_data: bool
) -> tuple[tuple[_Value, ...], tuple[_Operation, ...], tuple[_Constant, ...]]:
    return (
        tuple([_Value(v.name, v.type.shape, v.type.data_type, v.is_numbered) for v in part.values]),
        tuple([
            _Operation(
                o.op, o.domain, o.inputs, o.outputs,
                {name: _attribute_out(o.attributes[name]) for name in sorted(o.attributes)},
                o.location, o.body, o.opset,
            )
            for o in part.operations
        ]),
        tuple([_constant_out(constant, with_data) for constant in part.constants]),
    )  # fmt: skip


def _attribute_out(value: AttributeValue) -> _Attribute:
    item = (value[0] if value else 0) if isinstance(value, tuple) else value
    kind = {int: "int", float: "float", str: "string"}[type(item)]
    return _Attribute(f"{kind}s" if isinstance(value, tuple) else kind, value)  # type: ignore[arg-type]  # one of the kinds


def _constant_out(constant: Constant, with_data: bool) -> _Constant:
    data = np.ascontiguousarray(constant.data).tobytes() if with_data else None
    return _Constant(constant.value, data)


def from_json(text: str | bytes, constants: Mapping[str, Array] | None = None) -> ComputationGraph:
    """Read a graph.

    Args:
        text: What `as_json` wrote.
        constants: Arrays by value name, for constants without data in the text.

    Raises:
        FormatError: The text is no valid graph; the error names the first defect.
    """
    return from_data(read_json(text, "computation graph"), constants)


def from_data(data: Any, constants: Mapping[str, Array] | None = None) -> ComputationGraph:
    """Read what `as_data` returned, as `from_json`."""
    check_format(data, "computation graph", format=FORMAT, version=VERSION)
    form = from_plain(_Graph, data, "graph")
    values, given = _values_in(form.values), constants or {}
    names = {slot.value: slot.name for slot in form.inputs}
    begun = _constants_in(form.initial_state, values, "graph.initial_state", given)
    bodies = []
    for i, body in enumerate(form.bodies):
        inner, where = _values_in(body.values), f"graph.bodies[{i}]"
        bodies.append(Body(
            body.inputs, body.outputs, inner, _operations_in(body.operations, where),
            tuple(_constants_in(body.constants, inner, f"{where}.constants", {})),
        ))  # fmt: skip
    with located("graph"):
        return ComputationGraph(
            form.name,
            tuple([InputSlot(*slot) for slot in form.inputs]),
            tuple([OutputSlot(*slot) for slot in form.outputs]),
            values,
            _operations_in(form.operations, "graph"),
            bodies=tuple(bodies),
            constants=tuple(_constants_in(form.constants, values, "graph.constants", given)),
            placement=tuple(map(parse_placement, form.placement)),
            initial_state={names.get(one.value, ""): one.data for one in begun},
        )


def _values_in(values: Sequence[_Value]) -> tuple[Value, ...]:
    for v in values:
        if min(v.shape, default=0) < 0:
            raise FormatError(f"value {v.name[:60]!r} has a negative dimension")
    return tuple(
        [Value(v.name, ValueType(v.shape, v.data_type), None, v.is_numbered) for v in values]
    )


def _operations_in(operations: Sequence[_Operation], where: str) -> tuple[Operation, ...]:
    return tuple([
        Operation(
            o.op, o.inputs, o.outputs,
            {
                name: from_plain(
                    _ATTRIBUTES[one.kind], one.value, f"{where}.operations[{i}].attributes.{name}"
                )
                for name, one in o.attributes.items()
            },
            o.domain, o.location, o.body, opset=o.opset,
        )
        for i, o in enumerate(operations)
    ])  # fmt: skip


def _constants_in(
    constants: Sequence[_Constant], values: Sequence[Value], where: str, given: Mapping[str, Array]
) -> Iterator[Constant]:
    for i, (index, data) in enumerate(constants):
        with located(f"{where}[{i}]"):
            if not 0 <= index < len(values):
                raise FormatError(f"there is no value {index} of {len(values)}")
            name, kind = values[index].name, values[index].type
            if data is None and name not in given:
                raise FormatError(f"no data, and the caller passed no array {name!r}")
            yield Constant(
                index, np.array(given[name]) if data is None else array_of_bytes(data, kind)
            )


def array_of_bytes(data: bytes, kind: ValueType) -> Array:
    """Return the array of its bytes; raise `StitchError` if they are not of its type."""
    if min(kind.shape, default=0) < 0 or len(data) != kind.nbytes:
        raise FormatError(f"{kind.text()} has {kind.nbytes} bytes, got {len(data)}")
    if not kind.data_type.holds(np.frombuffer(data, np.uint8)):
        raise FormatError(f"a byte is not a valid {kind.data_type.value}")
    return np.frombuffer(data, kind.data_type.dtype).reshape(kind.shape)

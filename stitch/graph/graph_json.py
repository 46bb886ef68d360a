"""Computation graphs as JSON, and a checked reader for JSON of any kind.

Reading untrusted text gives a graph, or one `FormatError` that lists every defect.

Version 1 is an object with `format` ("stitch.computation_graph"), `version`, `name`,
`inputs` [{name, value, kind, ownership}], `outputs` [{name, value, aliases_input}],
`values` [{name, shape, data_type}], `operations` [{op, domain, inputs, outputs, attributes,
location, body}], `constants` [{value, data}], `bodies` [{inputs, outputs, values, operations,
constants}], `placement` ["input.x.space=l1"] and `initial_state` [{value, data}]. `body`, `bodies`
and `initial_state` are optional. Attributes are {kind, value}; kind is int, float, string, ints,
floats or strings; the strings "nan", "inf" and "-inf" are floats. Constant data is little-endian,
row-major, base64; if it is absent, the caller passes the arrays by value name.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from stitch.errors import (
    CompileError,
    FormatError,
    LayoutError,
    Problem,
    StitchError,
    UsageError,
    closest,
)
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

_T = TypeVar("_T")
#: Maximum number of defects listed in one error.
MAX_PROBLEMS = 50
#: Maximum length of the location and of the detail of a defect.
MAX_CHARACTERS = 240


def reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Hook for `json.loads`; raise `ValueError` for an object with duplicate keys."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        some = [shorten(key, 40) for key in sorted(fields)[:8]]
        raise ValueError(f"duplicate key in one object, among {some}")
    return fields


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return at most `most` characters: the beginning and the end of a longer text.

    >>> shorten("values 1, 2, 3, 4, 5, 6, 7, 8 and 9", 20)
    'values 1 ... 8 and 9'
    """
    if len(text) <= most:
        return text
    kept = most - len(" ... ")
    return f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}"


class JsonObject:
    """A JSON object and its location.

    Getters check the type of a field. They note a defect and return a default if it is wrong.
    """

    __slots__ = ("_fields", "_problems", "where")

    def __init__(self, data: object, where: str, problems: list[Problem]) -> None:
        self.where = where
        self._problems = problems
        self._fields: Mapping[str, object] = {}
        if isinstance(data, dict):
            self._fields = data
        else:
            self._note("not_an_object", where, f"expected an object, got {_shown(data)}")

    @property
    def is_full(self) -> bool:
        """Whether further defects will not be listed."""
        return len(self._problems) >= MAX_PROBLEMS

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str) -> object:
        """The unchecked field, or None."""
        return self._fields.get(key)

    def problem(self, kind: str, key: str, detail: str) -> None:
        """Note a defect of a field."""
        self._note(kind, f"{self.where}.{key}", detail)

    def more_problems(self, problems: Iterable[Problem]) -> None:
        """Note defects; take no more from the iterable than are listed."""
        for problem in islice(problems, MAX_PROBLEMS - len(self._problems)):
            self._note(problem.kind, problem.where, problem.detail)

    def text(self, key: str) -> str:
        value = self._fields.get(key)
        if isinstance(value, str):
            return value
        self._wrong(key, "a string", value)
        return ""

    def integer(self, key: str) -> int:
        value = self._fields.get(key)
        if _is_integer(value):
            return int(value)  # type: ignore[call-overload, no-any-return]  # checked above
        self._wrong(key, "an integer of 64 bits", value)
        return 0

    def number(self, key: str) -> float:
        value = self._fields.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        self._wrong(key, "a finite number", value)
        return 0.0

    def data(self, key: str) -> bytes | None:
        """The bytes of a base64 string; None if it is invalid."""
        text = self._fields.get(key)
        if not isinstance(text, str):
            self._wrong(key, "a string of base64", text)
            return None
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            self.problem("bad_value", key, f"not base64: {error}")
            return None

    def made(self, key: str, make: Callable[[Any], _T]) -> _T | None:
        """Convert a field with `make`; None, and a defect, if that raises a `StitchError`."""
        if key not in self._fields:
            self._wrong(key, "a value", None)
            return None
        try:
            return make(self._fields[key])
        except StitchError as error:
            self.problem("bad_value", key, "; ".join(map(str.strip, str(error).splitlines())))
            return None

    def integers(self, key: str) -> tuple[int, ...]:
        items = self.items(key)
        if all(_is_integer(item) for item in items):
            return tuple(int(item) for item in items)  # type: ignore[call-overload]  # checked
        self._wrong(key, "a list of integers of 64 bits", items)
        return ()

    def items(self, key: str) -> Sequence[object]:
        value = self._fields.get(key)
        if isinstance(value, list):
            return value
        self._wrong(key, "a list", value)
        return ()

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.items(key)
        if all(isinstance(item, str) for item in items):
            return tuple(str(item) for item in items)
        self._wrong(key, "a list of strings", items)
        return ()

    def records(self, key: str) -> list[JsonObject]:
        return [
            JsonObject(item, f"{self.where}.{key}[{i}]", self._problems)
            for i, item in enumerate(self.items(key))
        ]

    def record(self, key: str) -> JsonObject:
        return JsonObject(self._fields.get(key), f"{self.where}.{key}", self._problems)

    def fields(self, key: str) -> Mapping[str, object]:
        value = self._fields.get(key)
        if isinstance(value, dict):
            return value
        self._wrong(key, "an object", value)
        return {}

    def named_records(self, key: str) -> dict[str, JsonObject]:
        return {
            str(name): JsonObject(item, f"{self.where}.{key}.{name}", self._problems)
            for name, item in self.fields(key).items()
        }

    def choice(self, key: str, choices: Mapping[str, _T], otherwise: _T) -> _T:
        """The choice that a string names; `otherwise`, and a defect, for another value."""
        value = self._fields.get(key)
        if isinstance(value, str) and value in choices:
            return choices[value]
        near = "" if self.is_full or not isinstance(value, str) else closest(value, choices)
        self._wrong(key, " or ".join(choices) + (f" ({near})" if near else ""), value)
        return otherwise

    def refuse_other_keys(self, allowed: Iterable[str]) -> None:
        """Note a defect for every key that is not in `allowed`."""
        words = tuple(allowed)
        for key in self._fields:
            if self.is_full:
                return
            if key not in words:
                near = closest(key, words) or f"expected {', '.join(words)}"
                self.problem("unknown_key", key, f"this key is unknown; {near}")

    def bad_value(self, key: str, wanted: str, value: object) -> None:
        """Note that a part of a field has the wrong type."""
        self.problem("bad_value", key, f"expected {wanted}, got {_shown(value)}")

    def _wrong(self, key: str, wanted: str, value: object) -> None:
        if key in self._fields:
            self.bad_value(key, wanted, value)
        else:
            self.problem("missing_key", key, f"expected {wanted}, got nothing")

    def _note(self, kind: str, where: str, detail: str) -> None:
        if not self.is_full:
            self._problems.append(Problem(kind, shorten(where), shorten(detail)))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"


# Computation graphs ------------------------------------------------------------------------------

FORMAT = "stitch.computation_graph"
VERSION = 1
#: The keys of each part.
_INPUT = ("name", "value", "kind", "ownership")
_OUTPUT = ("name", "value", "aliases_input")
_TYPE = ("shape", "data_type")
_OPERATION = ("op", "domain", "inputs", "outputs", "attributes", "location")
_BODY = ("inputs", "outputs", "values", "operations", "constants")


def as_json(graph: ComputationGraph, *, with_data: bool = True) -> str:
    """Return the graph as JSON text; `with_data=False` leaves out the data of constants."""
    body = as_data(graph, with_data=with_data)
    return json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def as_data(graph: ComputationGraph, *, with_data: bool = True) -> dict[str, Any]:
    """Return the content of `as_json` as dictionaries, lists, strings and numbers."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "inputs": [_fields_out(slot, _INPUT) for slot in graph.inputs],
        "outputs": [_fields_out(slot, _OUTPUT) for slot in graph.outputs],
        **_contents_out(graph, with_data),
        "placement": [option.text() for option in graph.placement],
    }
    if graph.bodies:
        body["bodies"] = [
            # Constants of bodies are operator settings: always written with data.
            {"inputs": list(b.inputs), "outputs": list(b.outputs), **_contents_out(b, True)}
            for b in graph.bodies
        ]
    if graph.initial_state:
        values = {slot.name: slot.value for slot in graph.inputs}
        body["initial_state"] = [
            _constant_out(Constant(values[name], array), with_data)
            for name, array in graph.initial_state.items()
        ]
    return body


def _contents_out(part: ComputationGraph | Body, with_data: bool) -> dict[str, Any]:
    return {
        "values": [{"name": value.name, **_fields_out(value.type, _TYPE)} for value in part.values],
        "operations": [_operation_out(operation) for operation in part.operations],
        "constants": [_constant_out(constant, with_data) for constant in part.constants],
    }


def from_json(text: str | bytes, constants: Mapping[str, Array] | None = None) -> ComputationGraph:
    """Read a graph.

    Args:
        text: What `as_json` wrote.
        constants: Arrays by value name, for constants without data in the text.

    Raises:
        FormatError: The text is no valid graph; the error lists every defect.
    """
    problems: list[Problem] = []
    root = JsonObject(_parsed(text), "graph", problems)
    if root.text("format") != FORMAT or root.integer("version") != VERSION:
        raise FormatError(
            "this JSON is not a computation graph, or of another version",
            expected=f"format {FORMAT!r}, version {VERSION}",
            got=f"format {root.get('format')!r}, version {root.get('version')!r}"[:200],
        )
    values = _all(root, "values", _value_in)
    parts: dict[str, Any] = {
        "name": root.text("name"),
        "inputs": _all(root, "inputs", _input_in),
        "outputs": _all(root, "outputs", _output_in),
        "values": values,
        "operations": _all(root, "operations", _operation_in),
        "constants": _all(root, "constants", lambda r: _constant_in(r, values, constants or {})),
        "placement": tuple(_placement_in(root)),
    }
    if root.get("bodies") is not None:
        parts["bodies"] = _all(root, "bodies", _body_in)
    if root.get("initial_state") is not None:
        begun = _all(root, "initial_state", lambda r: _constant_in(r, values, constants or {}))
        names = {slot.value: slot.name for slot in parts["inputs"]}
        parts["initial_state"] = {names.get(one.value, ""): one.data for one in begun}
    root.refuse_other_keys(("format", "version", *parts))
    if problems:
        raise FormatError("this computation graph is not valid", problems=tuple(problems))
    try:
        return ComputationGraph(**parts)
    except CompileError as error:
        raise FormatError(shorten(error.what, 8 * MAX_CHARACTERS)) from error


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except RecursionError as error:
        raise FormatError("JSON nested too deeply for a computation graph") from error
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error


def _all(root: JsonObject, key: str, read: Callable[[JsonObject], _T]) -> tuple[_T, ...]:
    return tuple(read(record) for record in root.records(key))


def _value_in(record: JsonObject) -> Value:
    record.refuse_other_keys(("name", *_TYPE))
    shape = record.integers("shape")
    if any(d < 0 or d >= 2**63 for d in shape):
        record.problem("bad_value", "shape", "a dimension is negative or too large")
    kind = record.choice("data_type", {t.value: t for t in DataType}, DataType.FLOAT32)
    return Value(record.text("name"), ValueType(shape, kind))


def _input_in(record: JsonObject) -> InputSlot:
    record.refuse_other_keys(_INPUT)
    kind = record.choice("kind", {k.value: k for k in InputKind}, InputKind.ACTIVATION)
    owner = record.choice("ownership", {o.value: o for o in Ownership}, Ownership.BORROW)
    return InputSlot(record.text("name"), record.integer("value"), kind, owner)


def _output_in(record: JsonObject) -> OutputSlot:
    record.refuse_other_keys(_OUTPUT)
    alias = None if record.get("aliases_input") is None else record.integer("aliases_input")
    return OutputSlot(record.text("name"), record.integer("value"), alias)


def _body_in(record: JsonObject) -> Body:
    record.refuse_other_keys(_BODY)
    values = _all(record, "values", _value_in)
    return Body(
        record.integers("inputs"),
        record.integers("outputs"),
        values,
        _all(record, "operations", _operation_in),
        _all(record, "constants", lambda r: _constant_in(r, values, {})),
    )


def _operation_out(operation: Operation) -> dict[str, Any]:
    body = {} if operation.body == ABSENT else {"body": operation.body}
    opset = {"opset": operation.opset} if operation.is_foreign else {}
    return {**_fields_out(operation, _OPERATION), **body, **opset}


def _operation_in(record: JsonObject) -> Operation:
    record.refuse_other_keys((*_OPERATION, "body", "opset"))
    attributes = {
        name: _attribute_in(part) for name, part in record.named_records("attributes").items()
    }
    return Operation(
        record.text("op"),
        record.integers("inputs"),
        record.integers("outputs"),
        attributes,
        record.text("domain"),
        record.text("location"),
        ABSENT if record.get("body") is None else record.integer("body"),
        opset=0 if record.get("opset") is None else max(0, record.integer("opset")),
    )


def _fields_out(part: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return fields as plain data: values of enumerations, lists for tuples."""
    fields: dict[str, Any] = {}
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Mapping):
            value = {key: _attribute_out(value[key]) for key in sorted(value)}
        elif isinstance(value, tuple):
            value = list(value)
        fields[name] = value.value if isinstance(value, enum.Enum) else value
    return fields


def _attribute_out(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, tuple):
        kind = {int: "ints", float: "floats", str: "strings"}[type(value[0]) if value else int]
        return {"kind": kind, "value": [_number_out(item) for item in value]}
    kind = {int: "int", float: "float", str: "string"}[type(value)]
    return {"kind": kind, "value": _number_out(value)}


def _number_out(value: int | float | str) -> int | float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _attribute_in(record: JsonObject) -> AttributeValue:
    record.refuse_other_keys(("kind", "value"))
    kinds = ("int", "float", "string", "ints", "floats", "strings")
    kind = record.choice("kind", {k: k for k in kinds}, "int")
    if kind == "int":
        return record.integer("value")
    if kind == "string":
        return record.text("value")
    if kind == "float":
        return _float_in(record, record.get("value"))
    if kind == "ints":
        return record.integers("value")
    if kind == "strings":
        return record.texts("value")
    return tuple(_float_in(record, item) for item in record.items("value"))


def _float_in(record: JsonObject, value: object) -> float:
    if value in ("nan", "inf", "-inf") and isinstance(value, str):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e308 * 1.7:
        record.problem("bad_value", "value", f"expected a number, got {value!r:.40}")
        return 0.0
    return float(value)


def _constant_out(constant: Constant, with_data: bool) -> dict[str, Any]:
    if not with_data:
        return {"value": constant.value}
    data = np.ascontiguousarray(constant.data)
    return {"value": constant.value, "data": base64.b64encode(data.tobytes()).decode("ascii")}


def _constant_in(
    record: JsonObject, values: tuple[Value, ...], given: Mapping[str, Array]
) -> Constant:
    record.refuse_other_keys(("value", "data"))
    index = record.integer("value")
    nothing = Constant(index, np.zeros(0, np.uint8))
    if not 0 <= index < len(values):
        record.problem("bad_index", "value", f"there is no value {index} of {len(values)}")
        return nothing
    value = values[index]
    if value.type.data_type.is_block:
        record.problem(
            "constant_type", "value", f"a constant cannot have the type {value.type.text()}"
        )
        return nothing
    if record.get("data") is None:
        if value.name not in given:
            record.problem(
                "no_data",
                "data",
                f"there is no data, and the caller passed no array {value.name!r}",
            )
            return nothing
        return Constant(index, np.array(given[value.name]))
    return _decoded(record, index, value.type) or nothing


def _decoded(record: JsonObject, index: int, kind: ValueType) -> Constant | None:
    data = record.data("data")
    if data is None:
        return None
    wanted = kind.nbytes
    if len(data) != wanted or min(kind.shape, default=0) < 0:
        record.problem("bad_length", "data", f"{kind.text()} has {wanted} bytes, got {len(data)}")
        return None
    if not kind.data_type.holds(np.frombuffer(data, np.uint8)):
        record.problem("bad_value", "data", f"a byte is not a valid {kind.data_type.value}")
        return None
    return Constant(index, np.frombuffer(data, kind.data_type.dtype).reshape(kind.shape))


def _placement_in(root: JsonObject) -> Any:
    for text in root.items("placement"):
        try:
            yield parse_placement(text if isinstance(text, str) else repr(text))
        except (UsageError, LayoutError) as error:
            root.problem("bad_placement", "placement", str(error).replace("\n", ";"))

"""Modules in YAML: a computation graph that people write by hand.

The form::

    name: features                      # the file's name without suffix, if absent
    inputs:
      x: {shape: [64, 64], type: float32, space: l1, layout: tile}
      s: {shape: [64], type: float32, kind: state, ownership: donate}
    parameters:                         # constants of the graph
      w: {file: weights.npz, name: w1}  # .npy, .npz, .safetensors; relative to the YAML file
      b: {shape: [48], type: float32, init: {kind: randn, seed: 0, scale: 0.1}}
      z: {shape: [48], init: zeros}     # type is float32 if absent
      k: {values: [1, 0], type: int64}
    operations:                         # in the order in which they run
      - h = Gemm(x, w, b, transB=1)
      - v, i = TopK(h, [5], axis=-1)    # several results; `_` drops one
      - y = Reshape(h, [1, -1])         # a list of whole numbers is an int64 constant
      - t = Add(y, 1.0)                 # a number takes the first tensor's type
      - c = Clip(t, _, 6.0)             # `_` is an operand that is not there
      - u = Cast(c, to=float16)         # data types by name
      - r = Relu(u)
    outputs:
      r: {space: l1}                    # placement options
      first: {value: v, shape: [64, 5]} # under another name; shape and type are checked if given

Inputs and outputs may carry the placement fields of `stitch.graph.PlacementOption`: space,
data_type (of storage), layout, memory_layout, shard_spec (`8x1,32x64`), address, and `alias` for
outputs. `init` kinds: randn(seed, mean, scale), uniform(seed, low, high), zeros, ones,
arange(start, step), constant(value); a seed left out is the CRC-32 of the parameter's name.
Operators are ONNX's (opset 26), others as `domain.Name(...)`. `outputs` may also be a list of
names.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stitch import ops
from stitch.budget import claim, claim_for
from stitch.errors import (
    CompileError,
    FormatError,
    LayoutError,
    OutOfMemoryError,
    StitchError,
    UsageError,
    closest,
)
from stitch.forms import (
    WORD,
    AsWritten,
    Choice,
    ElementType,
    Field,
    FieldType,
    FormValues,
    JsonType,
    ListOf,
    Node,
    Number,
    Pairs,
    ParseContext,
    ProblemLog,
    Schema,
    SchemaWriter,
    Shape,
    SourceLocation,
    Tagged,
    Whole,
    Word,
    as_written,
    form_text,
    is_word,
    json_schema,
    mapping_of,
    read_array,
    read_yaml,
)
from stitch.graph import (
    PLACEMENT_FIELDS,
    AttributeLike,
    ComputationGraph,
    ComputationGraphBuilder,
    OperandLike,
    PlacementOption,
    Side,
    SymbolicTensor,
)
from stitch.program import Array, DataType, InputKind, Ownership

# --------------------------------------------------------------------------------------------------
# Parameters

_SOURCES = ("file", "init", "values")

#: A made-up parameter beyond this belongs into a file.
MAX_MADE_NBYTES = 1 << 32


def _numbers_form(*rows: Field) -> Schema[dict[str, Any]]:
    """A way of making numbers up: what it takes beside its name."""
    return Schema(as_written, Field("kind", Word(), needed=True), *rows)


_NUMBER = Number(is_finite=False)
_SEED = Field("seed", Whole(0, most=None))
_INITS = {
    "randn": _numbers_form(_SEED, Field("mean", _NUMBER), Field("scale", _NUMBER)),
    "uniform": _numbers_form(_SEED, Field("low", _NUMBER), Field("high", _NUMBER)),
    "zeros": _numbers_form(),
    "ones": _numbers_form(),
    "arange": _numbers_form(Field("start", _NUMBER), Field("step", _NUMBER)),
    "constant": _numbers_form(Field("value", _NUMBER, needed=True)),
}
_PARAMETER = Schema(
    as_written,
    Field("file", Word()),
    Field("init", Tagged("a way of making numbers up", "kind", lambda: _INITS)),
    Field("values", AsWritten()),
    Field("name", Word()),
    Field("shape", Shape()),
    Field("type", ElementType()),
)


def parameter_array(node: Node, place: SourceLocation) -> Array | None:
    """The array of a parameter, or None after noting what is wrong with it."""
    fields = _PARAMETER.fields(node, place)
    place, values = fields.place, fields.values
    sources = [key for key in _SOURCES if key in place.nodes and place.nodes[key].data is not None]
    if len(sources) != 1:
        got = " and ".join(sources) or "none of them"
        place.note("bad_value", f"has one of file, init, values; not {got}")
        return None
    if not fields.sound:
        return None
    if sources == ["file"]:
        return _checked(_from_file(fields), fields)
    if sources == ["values"]:
        return _checked(_inline(values["values"], values["type"], place), fields)
    return _made(fields)


def _from_file(fields: FormValues) -> Array | None:
    values, place = fields.values, fields.place
    log, line = place.reading.log, place.at("file").line
    try:
        file = place.reading.folder / values["file"]
        return read_array(file, values["name"], values["type"], values["shape"])
    except FormatError as error:
        log.note_error("bad_weights", line, error)
    except (OSError, ValueError) as error:
        log.note("bad_weights", line, f"{values['file']}: {error}")
    return None


def _checked(array: Array | None, fields: FormValues) -> Array | None:
    """The array, if it is what the module declares."""
    if array is None:
        return None
    values, place = fields.values, fields.place
    shape, declared = values["shape"], values["type"]
    source = values["file"] or "values"
    title = f"{place.path} ({' '.join(filter(None, (source, values['name'])))})"
    data_type = DataType.from_dtype(array.dtype)
    if shape is not None and array.shape != shape:
        detail = f"{title} has the shape {list(array.shape)}, declared is {list(shape)}"
        place.reading.log.note("wrong_shape", place.at("shape").line, detail)
        return None
    if declared is not None and data_type is not declared:
        detail = (
            f"{title} holds {data_type.value}, declared is {declared.value}; "
            f"convert the file, or leave out type and add a Cast"
        )
        place.reading.log.note("wrong_type", place.at("type").line, detail)
        return None
    return array


def _inline(node: Node, kind: DataType | None, place: SourceLocation) -> Array | None:
    try:
        array: Array = np.asarray(plain(node))
        if array.dtype.kind not in "biuf":
            raise ValueError("not numbers")
        if kind is None:
            kind = {"b": DataType.BOOL, "f": DataType.FLOAT32}.get(array.dtype.kind, DataType.INT64)
        if array.size and array.dtype.kind == "f" and not kind.is_floating:
            raise ValueError(f"not whole numbers, for {kind.value}")
        with np.errstate(all="ignore"):
            narrowed: Array = array.astype(kind.dtype)
        if kind.is_floating:
            lost = np.isinf(narrowed.astype(np.float64)) & np.isfinite(array.astype(np.float64))
        else:
            lost = np.asarray(narrowed != array)
        if lost.any():
            raise ValueError(f"numbers that do not fit {kind.value}")
    except (ValueError, OverflowError) as error:
        place.at("values").wrong(node, f"a rectangular list of numbers ({error})")
        return None
    return narrowed


def plain(node: Node) -> object:
    """A node as nested lists and scalars; mappings are a `ValueError`."""
    if isinstance(node.data, tuple):
        return [plain(item) for item in node.data]
    if isinstance(node.data, Mapping):
        raise ValueError("a mapping among the numbers")
    return node.data


def _made(fields: FormValues) -> Array | None:
    values, place = fields.values, fields.place
    init, shape, data_type = values["init"], values["shape"], values["type"] or DataType.FLOAT32
    at = place.at("shape")
    if shape is None:
        at.wrong(None, "a list of dimensions: init needs one")
    elif math.prod(shape) * data_type.itemsize > MAX_MADE_NBYTES:
        wanted = f"at most {MAX_MADE_NBYTES} bytes in all; put more into a file"
        at.wrong(place.nodes["shape"], wanted, "out_of_range")
    else:
        return _numbers(init, shape, data_type, place)
    return None


def _numbers(
    init: Mapping[str, Any], shape: tuple[int, ...], data_type: DataType, place: SourceLocation
) -> Array | None:
    count, what = math.prod(shape), f"parameter {place.name!r}"
    kind, given = init["kind"], {key: v for key, v in init.items() if v is not None}
    try:
        # Numbers are made in a wide type, compared, and narrowed.
        taken = claim(count * (3 * np.dtype(np.float64).itemsize + data_type.itemsize), what)
        array = _generate(kind, shape, given, given.get("seed", zlib.crc32(place.name.encode())))
        wanted = ""
        with np.errstate(all="ignore"):
            narrowed: Array = array.astype(data_type.dtype)
        if not data_type.is_floating and kind in ("randn", "uniform"):
            wanted = f"arange, zeros, ones or constant for {data_type.value}"
        elif not data_type.is_floating and (narrowed != array).any():
            wanted = f"a way to numbers that {data_type.value} can hold"
    except OutOfMemoryError:
        raise
    except (MemoryError, ValueError, OverflowError, StitchError) as error:
        wanted = f"possible ({error})"
    if wanted:
        node = place.nodes["init"]
        inner = place.at("init").inside(node)
        inner.at("kind").wrong(inner.nodes.get("kind", node), wanted, "refused")
        return None
    taken.dispose()
    claim_for(narrowed, narrowed.nbytes, f"for {what}")
    return narrowed


def _generate(kind: str, shape: tuple[int, ...], given: Mapping[str, Any], seed: int) -> Array:
    random = np.random.Generator(np.random.Philox(seed))
    if kind == "randn":
        return np.asarray(
            given.get("mean", 0) + given.get("scale", 1) * random.standard_normal(shape)
        )
    if kind == "uniform":
        low, high = float(given.get("low", 0.0)), float(given.get("high", 1.0))
        return low + (high - low) * random.random(shape)
    if kind == "arange":
        steps = np.arange(math.prod(shape)).reshape(shape)
        return np.asarray(given.get("start", 0) + given.get("step", 1) * steps)
    value = {"zeros": 0, "ones": 1}.get(kind, given.get("value", 0))
    return np.full(shape, value)


# --------------------------------------------------------------------------------------------------
# Statements

#: A name, a number, or a list of numbers; None for an operand that is not there.
Operand = str | bool | int | float | list[Any] | None


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation as written; an output called `_` is not kept under any name."""

    outputs: tuple[str, ...]
    op: str
    domain: str
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Any]


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./\-]*")
_STATEMENT = re.compile(
    rf"\s*({NAME.pattern}(?:\s*,\s*{NAME.pattern})*)\s*=\s*({NAME.pattern})\s*\((.*)\)\s*",
    re.DOTALL,
)
#: The name of an attribute, outside of quotes.
_ATTRIBUTE = re.compile(r"'[^']*'|\"[^\"]*\"|(?<!\w)([A-Za-z_]\w*)\s*=")
_NUMBERS = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan}
MAX_LENGTH = 20_000


def parse_statement(text: str) -> Statement:
    """The statement that a text holds; raises `FormatError`.

    What stands in the brackets is a list in YAML, of which `name=value` is the entry `name: value`.

    >>> parse_statement("y = Reshape(h, [1, -1], allowzero=0)").operands
    ('h', [1, -1])
    """
    match = _STATEMENT.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise FormatError(
            f"an operation is written y = Elu(x, alpha=1.0), with at most {MAX_LENGTH} characters"
        )
    names, title, written = match.groups()
    given = _ATTRIBUTE.sub(lambda found: f"{found[1]}: " if found[1] else found[0], written)
    root, log = read_yaml(f"[{given}]", "operation")
    operands: list[Operand] = []
    attributes: dict[str, Any] = {}
    for node in root.data if isinstance(root.data, tuple) else ():
        if isinstance(node.data, Mapping):
            twice = attributes.keys() & node.data
            attributes |= {name: _literal(one, log) for name, one in node.data.items()}
            if twice:
                log.note("bad_operation", 1, f"the attribute {min(twice)!r} is given twice")
        elif attributes:
            log.note("bad_operation", 1, "operands come before attributes")
        else:
            operands.append(None if node.raw == "_" else _literal(node, log))
    for problem in log.problems:
        raise FormatError(problem.detail)
    outputs = tuple([name.strip() for name in names.split(",")])
    domain, _, op = title.rpartition(".")
    return Statement(
        outputs, op, "" if domain == "ai.onnx" else domain, tuple(operands), attributes
    )


def _literal(node: Node, log: ProblemLog) -> Any:
    """Nested lists, numbers and words; YAML's words for true and false are names."""
    if isinstance(node.data, tuple):
        return [_literal(item, log) for item in node.data]
    if isinstance(node.data, Mapping):
        log.note("bad_operation", node.line, "a mapping among the values")
    is_word = isinstance(node.data, str | bool) and node.raw not in ("true", "false")
    return _NUMBERS.get(node.raw, node.raw) if is_word else node.data


# --------------------------------------------------------------------------------------------------
# Operations


class OperationReader:
    """Names that are defined so far, and the operations that define more."""

    def __init__(self, builder: ComputationGraphBuilder, log: ProblemLog) -> None:
        self.builder, self.log = builder, log
        self._lines: dict[str, int] = {}
        self._tensors: dict[str, SymbolicTensor] = {}

    def declare(self, name: str, line: int) -> None:
        """A name that is about to be defined; it stays known where its definition is defective."""
        if NAME.fullmatch(name) is None or name in ("_", "true", "false"):
            rule = "letters, digits and . / - after a letter or _"
            self.log.note("bad_name", line, f"{name!r} cannot be the name of a value; {rule}")
        elif name in self._lines:
            detail = f"{name!r} is defined on line {self._lines[name]} already"
            self.log.note("duplicate_name", line, detail)
        self._lines.setdefault(name, line)

    def define(self, name: str, tensor: SymbolicTensor) -> None:
        """Gives a declared name its value."""
        self._tensors.setdefault(name, tensor)

    def value(self, name: str, line: int) -> SymbolicTensor | None:
        """The value of a name; notes a name that is not defined above this line."""
        if name not in self._lines and not self.log.is_full:
            near = closest(name, self._lines)
            hint = near or f"defined: {', '.join(list(self._lines)[:12])}"
            self.log.note("unknown_name", line, f"{name!r} is not defined above; {hint}")
        return self._tensors.get(name)

    def read(self, node: Node) -> None:
        """Adds one operation."""
        statement = self._statement(node)
        if statement is None:
            return
        operands = [self._operand(operand, node.line) for operand in statement.operands]
        for name in statement.outputs:
            if name != "_":
                self.declare(name, node.line)
        attributes = self._attributes(statement, node.line)
        if attributes is None or any(operand is _MISSING for operand in operands):
            return
        names = ["unused" if name == "_" else name for name in statement.outputs]
        try:
            with self.builder.at(f"{self.log.file}:{node.line}"):
                given: list[OperandLike] = [o for o in operands if not isinstance(o, _Missing)]
                results = self.builder.apply(
                    statement.op, given, names, attributes, statement.domain
                )
        except (CompileError, LayoutError) as error:
            self.log.note_error("bad_operation", node.line, error)
            return
        for name, tensor in zip(statement.outputs, results, strict=True):
            self.define(name, tensor)

    def _statement(self, node: Node) -> Statement | None:
        text = node.data if isinstance(node.data, str) else node.describe()
        try:
            return parse_statement(text)
        except FormatError as error:
            self.log.note("bad_operation", node.line, f"in {text[:60]!r}: {error.what}")
            return None

    def _operand(self, operand: Operand, line: int) -> OperandLike | _Missing:
        if isinstance(operand, str):
            tensor = self.value(operand, line)
            return _MISSING if tensor is None else tensor
        if isinstance(operand, list):
            try:
                is_numbers = np.asarray(operand).dtype.kind in "biuf"
            except ValueError:
                is_numbers = False
            if not is_numbers:
                self.log.note("bad_operand", line, f"{operand!r:.60} is no list of numbers")
                return _MISSING
        return operand

    def _attributes(self, statement: Statement, line: int) -> dict[str, AttributeLike] | None:
        """Attributes with data types by name where the operator wants ONNX's number."""
        attributes: dict[str, AttributeLike] = {}
        try:
            declared = ops.lookup(statement.op, statement.domain).attributes
        except CompileError as error:
            self.log.note_error("unknown_operator", line, error)
            return None
        for name, value in statement.attributes.items():
            written: AttributeLike = value  # Nested lists fail in `apply`.
            if isinstance(value, str) and name in declared and declared[name].kind == "int":
                try:
                    written = DataType.parse(value)
                except LayoutError:
                    detail = f"attribute {name!r} of {statement.op} is a whole number"
                    self.log.note("bad_attribute", line, f"{detail}, not {value!r}")
                    return None
            attributes[name] = written
        return attributes


class _Missing:
    """Stands for an operand whose definition is defective."""


_MISSING = _Missing()


# --------------------------------------------------------------------------------------------------
# Module files


def load_module(path: str | Path) -> ComputationGraph:
    """The graph of a YAML file; raises `FormatError` listing every defect.

    Locations of operations are `file:line` of the YAML, without its folder.
    """
    place = Path(path)
    return module_from_text(form_text(place, "module", place.name), place.parent, place.name)


def module_from_text(text: str, folder: Path, file: str = "module.yaml") -> ComputationGraph:
    """The graph of a YAML text whose weight files lie in `folder`; raises `FormatError`."""
    root, log = read_yaml(text, file)
    graph = _ModuleReader(root, ParseContext(log, folder)).graph()
    log.raise_any("module")
    assert graph is not None, "what is missing has been noted"
    return graph


_PLACEMENT = tuple(
    Field(key, Word())
    for key in ("space", "data_type", "layout", "memory_layout", "shard_spec", "address")
)
_INPUT = Schema(
    as_written,
    Field("shape", Shape(), needed=True),
    Field("type", ElementType(), needed=True),
    Field("kind", Choice(tuple(kind.value for kind in InputKind)), default="activation"),
    Field("ownership", Choice(tuple(owner.value for owner in Ownership)), default="borrow"),
    *_PLACEMENT,
)
_OUTPUT = Schema(
    as_written,
    Field("value", Word()),
    Field("shape", Shape()),
    Field("type", ElementType()),
    *_PLACEMENT,
    Field("alias", Word()),
)


class _Outputs(Pairs):
    """Outputs with their placement by name, or a list of names."""

    def json_type(self, writer: SchemaWriter) -> JsonType:
        mapping = mapping_of(writer.value(_OUTPUT.json_type(writer), False), minProperties=1)
        return {"anyOf": [mapping, {"type": "array", "items": WORD, "minItems": 1}]}


def _entries(form: FieldType[Any]) -> Pairs:
    return Pairs(AsWritten(form=form), "a mapping", by_position=False)


_MODULE = Schema(
    as_written,
    Field("name", Word(), default=ParseContext.stem),
    Field("inputs", _entries(_INPUT), default=()),
    Field("parameters", _entries(_PARAMETER), default=()),
    Field("operations", ListOf(AsWritten(form=Word()), "a list of operations"), default=()),
    Field(
        "outputs",
        _Outputs(AsWritten(), "a mapping or a list of names, at least one", least=1),
        needed=True,
        default=(),
    ),
)
MODULE_KEYS = _MODULE.keys


def module_json_schema() -> JsonType:
    """Return the JSON Schema of modules."""
    return json_schema(_MODULE, "A module for Stitch")


class _ModuleReader:
    """Reads one document into a builder."""

    def __init__(self, root: Node, reading: ParseContext) -> None:
        self.log = reading.log
        self.top = _MODULE.fields(root, reading.root)
        self.builder = ComputationGraphBuilder(self.top.values["name"])
        self.operations = OperationReader(self.builder, reading.log)

    def graph(self) -> ComputationGraph | None:
        for name, node in self.top.values["inputs"]:
            self._input(name, node)
        for name, node in self.top.values["parameters"]:
            self.operations.declare(name, node.line)
            array = parameter_array(node, self._entry("parameters", name, node))
            if array is not None:
                self.operations.define(name, self.builder.parameter(name, array))
        for node in self.top.values["operations"]:
            self.operations.read(node)
        for name, node in self.top.values["outputs"]:
            self._output(name, node)
        if self.log.problems:
            return None
        try:
            return self.builder.build()
        except StitchError as error:
            self.log.note_error("bad_module", self.top.place.line, error)
            return None

    def _entry(self, key: str, name: str, node: Node) -> SourceLocation:
        return self.top.place.at(key).entry(name, node)

    def _input(self, name: str, node: Node) -> None:
        self.operations.declare(name, node.line)
        fields = _INPUT.fields(node, self._entry("inputs", name, node))
        self._placement("input", name, fields)
        shape, data_type = fields.values["shape"], fields.values["type"]
        if shape is None or data_type is None:
            return
        role = InputKind(fields.values["kind"])
        owner = Ownership(fields.values["ownership"])
        try:
            with self.builder.at(f"{self.log.file}:{node.line}"):
                tensor = self.builder.input(name, shape, data_type, role, owner)
            self.operations.define(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_input", node.line, error)

    def _output(self, name: str | None, node: Node) -> None:
        if name is None:
            if not is_word(node):
                self.log.note("bad_value", node.line, "outputs: a list holds names only")
                return
            name, node = node.raw, Node(node.line, None)
        fields = _OUTPUT.fields(
            Node(node.line, {}) if node.data is None else node, self._entry("outputs", name, node)
        )
        self._placement("output", name, fields)
        if NAME.fullmatch(name) is None:
            self.log.note("bad_name", node.line, f"{name!r} cannot be the name of an output")
        tensor = self.operations.value(fields.values["value"] or name, node.line)
        shape, data_type = fields.values["shape"], fields.values["type"]
        if tensor is None:
            return
        if shape not in (None, tensor.shape) or data_type not in (None, tensor.data_type):
            text = tensor.type.text()
            detail = f"output {name!r} is {text}, which is not the declared shape or type"
            self.log.note("wrong_type", node.line, detail)
        try:
            with self.builder.at(f"{self.log.file}:{node.line}"):
                self.builder.output(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_output", node.line, error)

    def _placement(self, side: Side, name: str, fields: FormValues) -> None:
        for key in PLACEMENT_FIELDS[side]:
            spelled = fields.values[key]
            if spelled is None or key in ("kind", "ownership"):
                continue
            try:
                self.builder.place(PlacementOption(side, name, key, spelled))
            except (UsageError, LayoutError) as error:
                self.log.note_error("bad_placement", fields.place.at(key).line, error)

"""The operations of a YAML module, compact or long, added to a graph builder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stitch import ops
from stitch.errors import CompileError, LayoutError, closest
from stitch.forms import (
    AsWritten,
    Field,
    ListOf,
    Node,
    Pairs,
    ParseContext,
    Schema,
    Word,
    as_written,
)
from stitch.frontend.yaml.module_parameters import plain
from stitch.frontend.yaml.statement import (
    NAME,
    Literal,
    Operand,
    Statement,
    StatementError,
    ValueName,
    parse_statement,
    split_operator,
)
from stitch.graph import ComputationGraphBuilder, Given, SymbolicTensor, Written
from stitch.program import DataType

_OPERATION = Schema(
    "an operation",
    as_written,
    Field("op", Word("the name of an operator"), needed=True),
    Field("domain", Word(may_be_empty=True), default=""),
    Field("inputs", ListOf(AsWritten(), "a list"), default=()),
    Field("outputs", ListOf(AsWritten(), "a list of names"), needed=True),
    Field("attributes", Pairs(AsWritten(), "a mapping", by_position=False), default=()),
)


class OperationReader:
    """Names that are defined so far, and the operations that define more."""

    def __init__(self, builder: ComputationGraphBuilder, reading: ParseContext) -> None:
        self.builder = builder
        self.reading, self.log = reading, reading.log
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
        statement = self._long(node) if isinstance(node.data, Mapping) else self._compact(node)
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
                given: list[Given] = [o for o in operands if not isinstance(o, _Missing)]
                results = self.builder.apply(
                    statement.op, given, names, attributes, statement.domain
                )
        except (CompileError, LayoutError) as error:
            self.log.note_error("bad_operation", node.line, error)
            return
        for name, tensor in zip(statement.outputs, results, strict=True):
            self.define(name, tensor)

    def _compact(self, node: Node) -> Statement | None:
        if not isinstance(node.data, str):
            detail = f"an operation is written y = Relu(x), not {node.describe()}"
            self.log.note("bad_operation", node.line, detail)
            return None
        try:
            return parse_statement(node.data)
        except StatementError as error:
            self.log.note("bad_operation", node.line, f"in {node.data[:60]!r}: {error}")
            return None

    def _long(self, node: Node) -> Statement | None:
        assert isinstance(node.data, Mapping)
        fused = next((key for key in node.data if "=" in key and "(" in key), None)
        if fused is not None:
            detail = f"{fused[:60]!r} holds ': '; write attributes as name=value in the brackets"
            self.log.note("bad_operation", node.line, detail)
            return None
        values = _OPERATION.fields(node, self.reading.root).values
        op, domain, outputs = values["op"], values["domain"], values["outputs"]
        if op is None or outputs is None:
            return None
        if not domain:
            domain, op = split_operator(op)
        operands = self._listed(values["inputs"], "inputs")
        names = [
            one.text if isinstance(one, ValueName) else "_"
            for one in self._listed(outputs, "outputs")
        ]
        written: list[tuple[str, Literal]] = []
        for key, item in values["attributes"]:
            value = self._plain(item, f"attribute {key!r}")
            if value is not None:
                written.append((key, value))
        return Statement(tuple(names), op, domain, tuple(operands), tuple(written))

    def _listed(self, items: Sequence[Node], key: str) -> list[Operand]:
        operands: list[Operand] = []
        for item in items:
            if item.data is None or item.raw in ("_", ""):
                value = None if not isinstance(item.data, tuple) else self._plain(item, key)
            elif isinstance(item.data, str):
                value = ValueName(item.raw)  # type: ignore[assignment]  # one of Operand's kinds
            else:
                value = self._plain(item, key)
            operands.append(value)  # type: ignore[arg-type]  # strings became names above
        return operands

    def _plain(self, item: Node, what: str) -> Literal | None:
        try:
            return plain(item)  # type: ignore[return-value]  # nested lists of scalars
        except ValueError as error:
            self.log.note("bad_value", item.line, f"{what}: {error}")
            return None

    def _operand(self, operand: Operand, line: int) -> Given | _Missing:
        if isinstance(operand, ValueName):
            tensor = self.value(operand.text, line)
            return _MISSING if tensor is None else tensor
        if isinstance(operand, list):
            return self._list(operand, line)
        return operand

    def _list(self, operand: list[Literal], line: int) -> Given | _Missing:
        try:
            array = np.asarray(operand)
        except ValueError:
            array = np.asarray("unequal lists")
        if array.dtype.kind not in "biuf":
            self.log.note("bad_operand", line, f"{operand!r:.60} is no list of numbers")
            return _MISSING
        return operand  # type: ignore[return-value]  # a rectangular list of numbers

    def _attributes(self, statement: Statement, line: int) -> dict[str, Written] | None:
        """Attributes with data types by name where the operator wants ONNX's number."""
        attributes: dict[str, Written] = {}
        try:
            declared = ops.lookup(statement.op, statement.domain).attributes
        except CompileError as error:
            self.log.note_error("unknown_operator", line, error)
            return None
        for name, value in statement.attributes:
            written: Written = value  # type: ignore[assignment]  # nested lists fail in `apply`
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

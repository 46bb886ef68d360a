"""The compact form of an operation: `h, i = TopK(x, [5], axis=-1)`.

Nothing is evaluated: the grammar knows names, numbers, strings and lists only.

    statement  = name {"," name} "=" operator "(" [argument {"," argument}] ")"
    operator   = [domain "."] name
    argument   = name "=" literal (an attribute) | operand
    operand    = name | "_" (absent) | literal
    literal    = number | string | "true" | "false" | word (attributes only) | "[" literals "]"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Literal = bool | int | float | str | list["Literal"]


@dataclass(frozen=True, slots=True)
class ValueName:
    """A reference to a value."""

    text: str


Operand = ValueName | bool | int | float | list[Literal] | None


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation as written; an output called `_` is not kept under any name."""

    outputs: tuple[str, ...]
    op: str
    domain: str
    operands: tuple[Operand, ...]
    attributes: tuple[tuple[str, Literal], ...]


class StatementError(ValueError):
    """The text is no statement; the message says where and what was expected."""


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./\-]*")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf\b|nan\b))"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_./\-]*)"
    r"|(?P<string>'[^']*'|\"[^\"]*\")"
    r"|(?P<mark>[()\[\],=]))"
)
MAX_LENGTH = 20_000
MAX_NESTING = 8


def parse_statement(text: str) -> Statement:
    """The statement that a text holds; raises `StatementError`.

    >>> parse_statement("y = Reshape(h, [1, -1])").operands
    (ValueName(text='h'), [1, -1])
    """
    return _Parser(text).statement()


def split_operator(text: str) -> tuple[str, str]:
    """Domain and name of `stitch.Foo`, `ai.onnx.Relu` or `Relu`."""
    domain, _, op = text.rpartition(".")
    return ("" if domain == "ai.onnx" else domain), op


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise StatementError(f"an operation is at most {MAX_LENGTH} characters long")
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._wrong(position, "a name, number, string or one of ( ) [ ] , =")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match[kind], match.start(kind)))
            position = match.end()
        self._tokens.append(("end", "", len(text)))
        self._next = 0

    def statement(self) -> Statement:
        outputs = [self._take("name", "the name of a result")]
        while self._skip(","):
            outputs.append(self._take("name", "the name of a result"))
        self._expect("=")
        domain, op = split_operator(self._take("name", "an operator"))
        self._expect("(")
        operands: list[Operand] = []
        attributes: list[tuple[str, Literal]] = []
        while not self._skip(")"):
            if operands or attributes:
                self._expect(",")
            self._argument(operands, attributes)
        if self._peek()[0] != "end":
            raise self._wrong(self._peek()[2], "nothing after the closing bracket")
        return Statement(tuple(outputs), op, domain, tuple(operands), tuple(attributes))

    def _argument(self, operands: list[Operand], attributes: list[tuple[str, Literal]]) -> None:
        kind, text, position = self._peek()
        if kind == "name" and self._tokens[self._next + 1][1] == "=":
            self._next += 2
            if text in dict(attributes):
                raise self._wrong(position, f"the attribute {text!r} once")
            attributes.append((text, self._literal(0, words=True)))
            return
        if attributes:
            raise self._wrong(position, "an attribute (name=value): operands come first")
        if kind == "name" and text not in ("true", "false"):
            self._next += 1
            operands.append(None if text == "_" else ValueName(text))
            return
        value = self._literal(0, words=False)
        if isinstance(value, str):
            raise self._wrong(position, "an operand: a name, a number or a list")
        operands.append(value)

    def _literal(self, depth: int, *, words: bool) -> Literal:
        kind, text, position = self._peek()
        self._next += 1
        if kind == "number":
            return _number(text)
        if kind == "string":
            return text[1:-1]
        if kind == "name" and text in ("true", "false"):
            return text == "true"
        if kind == "name" and words:
            return text
        if text != "[":
            raise self._wrong(position, "a number, a string or a list")
        if depth == MAX_NESTING:
            raise self._wrong(position, f"lists nested at most {MAX_NESTING} deep")
        items: list[Literal] = []
        while not self._skip("]"):
            if items:
                self._expect(",")
            items.append(self._literal(depth + 1, words=words))
        return items

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[min(self._next, len(self._tokens) - 1)]

    def _skip(self, mark: str) -> bool:
        kind, text, _ = self._peek()
        if kind == "mark" and text == mark:
            self._next += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise self._wrong(self._peek()[2], repr(mark))

    def _take(self, kind: str, what: str) -> str:
        stands, text, position = self._peek()
        if stands != kind:
            raise self._wrong(position, what)
        self._next += 1
        return text

    def _wrong(self, position: int, expected: str) -> StatementError:
        near = self._text[position : position + 20] or "the end"
        return StatementError(f"expected {expected} at column {position + 1}, before {near!r}")


def _number(text: str) -> int | float:
    if text.lower().startswith(("0x", "+0x", "-0x")):
        return int(text, 16)
    return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else float(text)

"""Read untrusted YAML as plain data with line numbers.

Constructs only numbers, strings, lists and mappings. The scanner is libyaml's, which every wheel of
PyYAML has: it is four times faster than the one in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.cyaml import CParser  # type: ignore[attr-defined]  # undocumented
from yaml.resolver import Resolver

from stitch.errors import FormatError, Problem, StitchError, closest
from stitch.files import nearest_file, read_text

MAX_NBYTES = 1 << 20
MAX_DEPTH = 16
MAX_EVENTS = 100_000
MAX_NODES = 100_000
#: libyaml's own error, because it scans ahead.
_TOO_DEEP = "exceeded maximum nesting depth"
#: Defects that an error lists.
MAX_PROBLEMS = 50

Data = bool | int | float | str | tuple["Node", ...] | Mapping[str, "Node"] | None


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, list or mapping.

    `line` counts from 1, `raw` is the text of a scalar, `key_line` the line of its key or 0.
    """

    line: int
    data: Data
    raw: str = ""
    key_line: int = 0

    def describe(self) -> str:
        """Describe it for errors."""
        if isinstance(self.data, tuple):
            return f"a list of {len(self.data)}"
        if isinstance(self.data, Mapping):
            return f"a mapping with the keys {', '.join(self.data)}"[:80]
        return "nothing" if self.data is None else repr(self.raw)[:60]


class ProblemLog:
    """The defects of one file."""

    def __init__(self, file: str, problems: Iterable[Problem] = ()) -> None:
        self.file = file
        self.problems = list(problems)
        #: The number of noted defects, also of those that are not listed.
        self.noted = 0

    @property
    def is_full(self) -> bool:
        """Return whether further defects are not listed."""
        return len(self.problems) >= MAX_PROBLEMS

    def note(self, kind: str, line: int, detail: str) -> None:
        """Note a defect on a line."""
        self.noted += 1
        if not self.is_full:
            one_line = "; ".join(part.strip() for part in detail.splitlines())
            self.problems.append(Problem(kind, f"{self.file}:{line}", one_line))

    def raise_any(self, what: str, remedy: str | None = None) -> None:
        """Raise `FormatError` with the noted defects, in file order, if there are any."""
        count = len(self.problems)
        if count:
            raise FormatError(
                f"{self.file} is not a sound {what}: {count} defect{'s' if count != 1 else ''}",
                problems=tuple(sorted(self.problems, key=_line_of)),
                remedy=remedy,
            )

    def note_error(self, kind: str, line: int, error: StitchError) -> None:
        """Note an error of another package."""
        self.note(kind, line, str(error))


def form_text(path: Path, what: str, where: str) -> str:
    """Return the text of a YAML file; raise `FormatError` if it cannot be read."""
    try:
        return read_text(path)
    except OSError as error:
        raise FormatError(
            f"cannot read the {what}: {error.strerror}", where=where,
            remedy=nearest_file(path, (".yaml", ".yml")) or "check the path and its permissions",
        ) from error  # fmt: skip
    except UnicodeDecodeError as error:
        raise FormatError(f"not YAML: not UTF-8 text ({error})", where=path.name) from error


def read_yaml_bytes(content: bytes, file: str, what: str) -> tuple[Node, ProblemLog]:
    """Decode and read the bytes of a `what` as `read_yaml`; raise `FormatError`."""
    if len(content) > MAX_NBYTES:
        raise FormatError(f"this is no {what}", where=file, expected=f"at most {MAX_NBYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"the {what} is no UTF-8 text", where=file, got=error.reason) from error
    return read_yaml(text, file)


def read_yaml(text: str, file: str) -> tuple[Node, ProblemLog]:
    """Return the document and a log with its recoverable defects.

    Raises `FormatError` for text that is not YAML or too large.
    """
    if len(text) > MAX_NBYTES:
        raise FormatError(
            "the YAML file is too long", where=file, expected=f"at most {MAX_NBYTES} characters",
            got=str(len(text)), remedy="store weights in .npz, .npy or .safetensors files",
        )  # fmt: skip
    with _format_errors(file), closing(_Loader(text, file)) as loader:
        root = loader.get_single_node()
    if root is None:
        raise FormatError("the file is empty", where=file)
    walk = _Walk(file)
    return walk.node(root, 0), ProblemLog(file, walk.problems)


def read_entry(text: str, file: str, key: str) -> Node | None:
    """Return the value of a key of the top mapping without reading further, or None.

    Raises `FormatError` for text that is not YAML.
    """
    with _format_errors(file), closing(_Loader(text, file)) as loader:
        opening = [loader.get_event() for _ in range(3)]
        if not isinstance(opening[-1], yaml.MappingStartEvent):
            return None
        while not loader.check_event(yaml.MappingEndEvent):
            name, value = (loader.compose_node(None, 0) for _ in range(2))
            if isinstance(name, yaml.ScalarNode) and name.value == key and value is not None:
                return _Walk(file).node(value, 1)
    return None


@contextmanager
def _format_errors(file: str) -> Iterator[None]:
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = file if mark is None else f"{file}:{mark.line + 1}"
        what = getattr(error, "problem", None) or str(error)
        if what == _TOO_DEEP:
            raise FormatError(f"this YAML goes beyond {MAX_DEPTH} levels", where=where) from error
        raise FormatError(f"not YAML: {what}", where=where) from error
    except (RecursionError, ValueError) as error:
        raise FormatError(f"not YAML: {error}", where=file) from error


def _line_of(problem: Problem) -> int:
    return int(problem.where.rpartition(":")[2])


class _Loader(Composer, Resolver, CParser):
    """Composes the nodes of a text within limits of depth and length."""

    def __init__(self, text: str, file: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self._file = file
        self._depth = self._count = 0

    def get_event(self) -> yaml.Event:
        event: Any = super().get_event()
        if isinstance(event, yaml.CollectionStartEvent):
            self._depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            self._depth -= 1
        if self._depth > MAX_DEPTH or self._count > MAX_EVENTS:
            limit = f"{MAX_DEPTH} levels" if self._depth > MAX_DEPTH else f"{MAX_EVENTS} elements"
            where = f"{self._file}:{_line(event)}"
            raise FormatError(f"this YAML goes beyond {limit}", where=where)
        self._count += 1
        return event  # type: ignore[no-any-return]  # as PyYAML has it

    def close(self) -> None:
        """Break reference cycles."""
        self.dispose()


def _line(written: yaml.Event | yaml.Node) -> int:
    return 1 if written.start_mark is None else written.start_mark.line + 1


class _Walk:
    """Converts PyYAML's nodes, counting every node that aliases repeat."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._count = 0

    def node(self, written: yaml.Node, depth: int) -> Node:
        line = _line(written)
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            raise FormatError(
                "aliases make this YAML too large", where=f"{self.file}:{line}",
                expected=f"at most {MAX_NODES} nodes, {MAX_DEPTH} levels deep",
                remedy="use fewer aliases",
            )  # fmt: skip
        if isinstance(written, yaml.MappingNode):
            return Node(line, self._mapping(written, depth))
        if isinstance(written, yaml.SequenceNode):
            return Node(line, tuple(self.node(item, depth + 1) for item in written.value))
        return Node(line, self._scalar(written, line), str(written.value))

    def _mapping(self, written: yaml.MappingNode, depth: int) -> dict[str, Node]:
        nodes: dict[str, Node] = {}
        for key, value in written.value:
            line = _line(key)
            if not isinstance(key, yaml.ScalarNode):
                self._note("bad_key", line, "a key is a word")
                continue
            if key.value in nodes:
                self._note("duplicate_key", line, f"the key {key.value!r} is defined twice")
                continue
            nodes[key.value] = replace(self.node(value, depth + 1), key_line=line)
        return nodes

    def _scalar(self, written: yaml.Node, line: int) -> bool | int | float | str | None:
        kind = str(written.tag).rpartition(":")[2]
        text = str(written.value)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in ("yes", "true", "on")
        if kind in ("int", "float"):
            return self._number(text, line)
        if kind not in ("str", "timestamp", "merge", "value") or "python" in str(written.tag):
            self._note("tag", line, f"unsupported tag {written.tag}")
        return text if written.style else number_of(text)  # type: ignore[attr-defined]

    def _number(self, text: str, line: int) -> int | float | str:
        number = number_of(text)
        if isinstance(number, str):
            self._note("bad_number", line, f"unsupported number {text[:40]!r}")
            return 0
        return number

    def _note(self, kind: str, line: int, detail: str) -> None:
        self.problems.append(Problem(kind, f"{self.file}:{line}", detail))


def number_of(text: str) -> int | float | str:
    """Return the number of a text (also 0x10, 1e-5, .inf), otherwise the text itself."""
    plain = text.strip().lower()
    if len(plain) > 64 or not plain:
        return text
    try:
        return int(plain, 16 if plain.startswith("0x") else 10)
    except ValueError:
        pass
    if plain.lstrip("+-") in (".inf", ".nan"):
        plain = plain.replace(".", "")
    elif not any(c.isdigit() for c in plain):
        return text
    try:
        return float(plain)
    except ValueError:
        return text


# Source locations, for errors.


@dataclass(eq=False, repr=False, slots=True)
class ParseContext:
    """The state of reading one file.

    Args:
        log: Its defects.
        folder: The folder of its relative paths.
        sources: A list that collects sources: a value may be `{value: .., source: ..}`, and a
            mapping may have a `source` of all values.
    """

    log: ProblemLog
    folder: Path = Path()
    sources: list[tuple[str, str]] | None = None

    @property
    def root(self) -> SourceLocation:
        """Return the location of the whole file."""
        return SourceLocation(self)

    def stem(self) -> str:
        """Return the name of the file without its suffix."""
        return Path(self.log.file).stem


@dataclass(eq=False, repr=False, slots=True)
class SourceLocation:
    """A mapping, or the value of one key of it, for errors.

    Args:
        reading: The file.
        path: The dotted name: `inputs.x.shape`; empty for the whole file.
        line: The line.
        name: The name of an entry among several.
        nodes: The values of the mapping.
    """

    reading: ParseContext
    path: str = ""
    line: int = 1
    name: str = ""
    nodes: Mapping[str, Node] = field(default_factory=dict)

    def at(self, key: str) -> SourceLocation:
        """Return the location of a key's value; of an absent key, on the mapping's line."""
        node = self.nodes.get(key)
        line = self.line if node is None else node.key_line or node.line
        return SourceLocation(self.reading, self._below(key), line)

    def item(self, index: int, node: Node) -> SourceLocation:
        """Return the location of an item of this list."""
        return SourceLocation(self.reading, f"{self.path}[{index}]", node.line, self.name)

    def entry(self, name: str, node: Node) -> SourceLocation:
        """Return the location of a named entry of this mapping."""
        line = node.key_line or node.line
        return SourceLocation(self.reading, self._below(name), line, name)

    def inside(self, node: Node) -> SourceLocation:
        """Return the location of a mapping at this location."""
        nodes = node.data if isinstance(node.data, Mapping) else {}
        line = node.key_line or node.line
        return SourceLocation(self.reading, self.path, line, self.name, nodes)

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def note(self, kind: str, detail: str, line: int = 0) -> None:
        """Note a defect; `detail` follows the name of the location: `must be a number`."""
        text = f"{self.path}: {detail}" if self.path else detail
        self.reading.log.note(kind, line or self.line, text)

    def wrong(self, node: Node | None, wanted: str, kind: str = "wrong_type") -> None:
        """Note a missing or wrong value."""
        if node is None or node.data is None:
            self.note("missing_key", f"must be {wanted}, not nothing")
        else:
            self.note(kind, f"must be {wanted}, not {node.describe()}")

    def unknown_word(self, node: Node, words: Iterable[str]) -> None:
        """Note a word that is not allowed, with the closest allowed one."""
        allowed = tuple(words)
        near = "" if self.reading.log.is_full else closest(node.raw, allowed)
        hint = f" ({near})" if near else ""
        self.wrong(node, f"one of {', '.join(allowed)}{hint}", "unknown_word")

    def only(self, words: Iterable[str]) -> None:
        """Note the unknown keys of this mapping."""
        allowed = tuple(words) if self.reading.sources is None else (*words, "source")
        for key, node in self.nodes.items():
            if key not in allowed:
                near = "" if self.reading.log.is_full else closest(key, allowed, "; ")
                detail = f"there is no such key; allowed: {', '.join(allowed)}{near}"
                self.at(key).note("unknown_key", detail, node.key_line or node.line)

    def bare(self, node: Node) -> Node:
        """Return the value without its source, which is collected."""
        sources = self.reading.sources
        if sources is None or not isinstance(node.data, Mapping) or "value" not in node.data:
            return node
        for extra in [key for key in node.data if key not in ("value", "source")]:
            self.note("unknown_key", f"has the unknown key {extra!r}; allowed: value, source")
        self.keep_source(node.data.get("source"))
        value = node.data["value"]
        return replace(value, key_line=node.key_line or value.key_line)

    def keep_source(self, source: Node | None) -> None:
        """Collect the source of a value or mapping."""
        if source is None or source.data is None or self.reading.sources is None:
            return
        if isinstance(source.data, str):
            self.reading.sources.append((self.path, source.data))
        else:
            self.note("wrong_type", "source must be a text", source.line)

"""Where something stands in a form, so that a defect of it is told with line and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stitch.errors import closest
from stitch.forms.nodes import Node, ProblemLog


@dataclass(eq=False, repr=False, slots=True)
class ParseContext:
    """One file while it is read: its log, and the folder that its paths are relative to.

    Where `sources` is a list, every value may be written as `{value: .., source: ..}`, a mapping
    may have a `source` for all of its values, and each is kept there beside its place. Such places
    are dotted (`l1.banks: must be ..`), the others are titled (`input 'x': shape must be ..`).
    """

    log: ProblemLog
    folder: Path = Path()
    sources: list[tuple[str, str]] | None = None

    @property
    def root(self) -> SourceLocation:
        """The place of the whole file."""
        return SourceLocation(self)

    def stem(self) -> str:
        """The name of the file without its ending."""
        return Path(self.log.file).stem


@dataclass(eq=False, repr=False, slots=True)
class SourceLocation:
    """A mapping of the form (`what`), or the value of one key of it.

    `nodes` are the values of the mapping; `name` is the entry's where it is one of several by name;
    an `is_item` stands in a list or among such entries, and is told of by itself.
    """

    reading: ParseContext
    what: str = ""
    key: str = ""
    line: int = 1
    name: str = ""
    is_item: bool = False
    nodes: Mapping[str, Node] = field(default_factory=dict)

    @property
    def is_dotted(self) -> bool:
        """Whether figures have sources here, and places dots."""
        return self.reading.sources is not None

    @property
    def path(self) -> str:
        """The dotted name of the place."""
        return f"{self.what}.{self.key}" if self.what and self.key else self.what or self.key

    def at(self, key: str) -> SourceLocation:
        """The value of a key of this mapping; on the line of the mapping where it is absent."""
        node = self.nodes.get(key)
        line = self.line if node is None else node.key_line or node.line
        return SourceLocation(self.reading, self.what, key, line)

    def item(self, index: int, node: Node) -> SourceLocation:
        """An item of the list that stands here."""
        key = f"{self.key}[{index}]" if self.is_dotted else self.key
        return SourceLocation(self.reading, self.what, key, node.line, self.name, True)

    def entry(self, name: str, node: Node) -> SourceLocation:
        """One of the entries, by name, of the mapping that stands here."""
        what, key = (self.path, name) if self.is_dotted else (self.what, self.key)
        line = node.key_line or node.line
        return SourceLocation(self.reading, what, key, line, name, True)

    def inside(self, node: Node, what: str, name: str = "") -> SourceLocation:
        """A mapping that stands at this place."""
        nodes = node.data if isinstance(node.data, Mapping) else {}
        return SourceLocation(
            self.reading, what, "", node.key_line or node.line, name, False, nodes
        )

    def note(self, kind: str, detail: str, line: int = 0) -> None:
        """Notes a defect; `detail` goes on after the name of the place: `must be a number`."""
        if self.is_dotted:
            text = f"{self.path}: {detail}" if self.path else detail
        else:
            text = f"{self.what}: {self.key} {detail}" if self.key else f"{self.what} {detail}"
        self.reading.log.note(kind, line or self.line, text)

    def wrong(self, node: Node | None, wanted: str, kind: str = "wrong_type") -> None:
        """Notes that what stands here is not what should."""
        if node is None or node.data is None:
            self.note("missing_key", f"must be {wanted}, not nothing")
        else:
            self.note(kind, f"must be {wanted}, not {node.describe()}")

    def unknown_word(self, node: Node, words: Iterable[str]) -> None:
        """Notes a word that is none of those allowed, with the closest."""
        allowed = tuple(words)
        near = "" if self.reading.log.is_full else closest(node.raw, allowed)
        hint = f" ({near})" if near else ""
        self.wrong(node, f"one of {', '.join(allowed)}{hint}", "unknown_word")

    def only(self, words: Iterable[str]) -> None:
        """Notes every key of this mapping that has no meaning."""
        allowed = (*words, "source") if self.is_dotted else tuple(words)
        for key, node in self.nodes.items():
            if key not in allowed:
                near = "" if self.reading.log.is_full else closest(key, allowed, "; ")
                line = node.key_line or node.line
                if self.is_dotted:
                    detail = f"there is no such key; allowed: {', '.join(allowed)}{near}"
                    self.at(key).note("unknown_key", detail, line)
                else:
                    detail = f"has no key {key!r}; allowed: {', '.join(allowed)}{near}"
                    self.note("unknown_key", detail, line)

    def bare(self, node: Node) -> Node:
        """The value itself where it is written with its source, which is kept."""
        sources = self.reading.sources
        if sources is None or not isinstance(node.data, Mapping) or "value" not in node.data:
            return node
        for extra in [key for key in node.data if key not in ("value", "source")]:
            self.note("unknown_key", f"a figure has `value` and `source`, no {extra!r}")
        self.keep_source(node.data.get("source"))
        value = node.data["value"]
        return replace(value, key_line=node.key_line or value.key_line)

    def keep_source(self, source: Node | None) -> None:
        """Keep where a figure, or all of a mapping, was found."""
        if source is None or source.data is None or self.reading.sources is None:
            return
        if isinstance(source.data, str):
            self.reading.sources.append((self.path, source.data))
        else:
            self.note("wrong_type", "a source is a sentence", source.line)

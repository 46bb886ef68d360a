"""One mapping of a YAML module: every field checked, every defect noted with its line.

Comes in: a `Node`. Goes out: values of the right Python type, or None where the field is absent
or defective. Must not know: what the fields are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stitch.errors import LayoutError, closest
from stitch.forms.nodes import Node, ProblemLog
from stitch.program import MAX_RANK, DataType


class Fields:
    """The fields of a mapping; `what` names it in messages."""

    def __init__(self, node: Node | None, what: str, log: ProblemLog) -> None:
        self.what = what
        self.log = log
        self.line = 1 if node is None else node.line
        self._fields: Mapping[str, Node] = {}
        if node is not None and isinstance(node.data, Mapping):
            self._fields = node.data
        elif node is not None:
            log.note("bad_value", node.line, f"{what} is a mapping, not {node.describe()}")

    def items(self) -> Iterable[tuple[str, Node]]:
        """All fields in the order of the file."""
        return self._fields.items()

    def get(self, key: str) -> Node | None:
        """A field, or None; `key: null` counts as absent."""
        found = self._fields.get(key)
        return None if found is None or found.data is None else found

    def line_of(self, key: str) -> int:
        """The line of a field, or of the mapping."""
        found = self._fields.get(key)
        return self.line if found is None else found.line

    def only(self, allowed: Iterable[str]) -> None:
        """Notes every field that has no meaning here."""
        words = tuple(allowed)
        for key, node in self._fields.items():
            if key not in words:
                near = closest(key, words)
                hint = f"; {near}" if near else ""
                detail = f"{self.what} has no key {key!r}; allowed: {', '.join(words)}{hint}"
                self.log.note("unknown_key", node.key_line or node.line, detail)

    def wrong(self, key: str, wanted: str) -> None:
        """Notes that a field is not what it should be."""
        found = self._fields.get(key)
        got = "nothing" if found is None else found.describe()
        kind = "missing_key" if found is None else "bad_value"
        self.log.note(kind, self.line_of(key), f"{self.what}: {key} must be {wanted}, not {got}")

    def text(self, key: str) -> str | None:
        """A word; numbers count as the words that they are written as."""
        found = self.get(key)
        if found is None:
            return None
        if isinstance(found.data, tuple | Mapping):
            self.wrong(key, "a word")
            return None
        return found.raw

    def number(self, key: str) -> int | float | None:
        """A number."""
        found = self.get(key)
        if found is None:
            return None
        if isinstance(found.data, bool) or not isinstance(found.data, int | float):
            self.wrong(key, "a number")
            return None
        return found.data

    def shape(self, key: str, *, required: bool = False) -> tuple[int, ...] | None:
        """A list of dimensions."""
        found = self.get(key)
        if found is None:
            if required:
                self.wrong(key, "a list of dimensions, such as [64, 64]")
            return None
        parts = found.data if isinstance(found.data, tuple) else (found,)
        wanted = f"a list of at most {MAX_RANK} whole numbers that are not negative"
        single = not isinstance(found.data, tuple)
        if len(parts) > MAX_RANK or (single and not _is_dimension(found.data)):
            self.wrong(key, wanted)
            return None
        for at, part in enumerate(parts):
            if not _is_dimension(part.data):
                size = " or beyond 2^40" if isinstance(part.data, int) and part.data > 0 else ""
                detail = (
                    f"{self.what}: {key} must be {wanted}{size}, and its element {at} is "
                    f"{part.describe()}"
                )
                self.log.note("bad_value", part.line, detail)
                return None
        return tuple(part.data for part in parts if isinstance(part.data, int))

    def data_type(self, key: str, *, required: bool = False) -> DataType | None:
        """The name of a data type."""
        name = self.text(key)
        if name is None:
            if required and self.get(key) is None:
                self.wrong(key, "a data type, such as float32")
            return None
        try:
            return DataType.parse(name)
        except LayoutError as error:
            near = closest(name, (t.value for t in DataType))
            hint = f"; {near}" if near else ""
            detail = f"{self.what}: {error.what}; allowed: {error.expected}{hint}"
            self.log.note("bad_value", self.line_of(key), detail)
            return None


def _is_dimension(data: object) -> bool:
    return isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 2**40

"""Reading the figures of a description: every defect is noted, none stops the reading.

Comes in: one mapping of a parsed file, with its lines. Goes out: checked figures, the sources named
beside them, and the list of all problems, each with file and line. A figure is a bare value, or
`{value: 64, source: where I found it}`; a `source` key in a mapping speaks for all of its figures.
Knows nothing of machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from stitch.errors import closest
from stitch.forms import Node, ProblemLog, number_of


@dataclass
class Findings:
    """What the reading of one file has found so far: problems, and the sources of figures."""

    log: ProblemLog
    sources: list[tuple[str, str]] = field(default_factory=list)

    def note(self, kind: str, line: int, place: str, detail: str) -> None:
        """Record one defect: its machine-readable kind, line, dotted place, and sentence."""
        self.log.note(kind, line, f"{place}: {detail}" if place else detail)


class Section:
    """One mapping of the file. Each figure read is checked; a bad one is noted and replaced.

    `sound` turns false with the first bad figure: checks that compare figures ask it first.
    """

    def __init__(self, node: Node, where: str, findings: Findings, keys: tuple[str, ...]) -> None:
        self.where = where
        self.findings = findings
        self.sound = True
        self.line = node.key_line or node.line
        self.content: Mapping[str, Node] = {}
        if isinstance(node.data, Mapping):
            self.content = node.data
        else:
            self.reject("wrong_type", "", f"a mapping is needed, not {node.describe()}")
        known = (*keys, "source")
        for key in self.content:
            if key not in known:
                near = closest(key, known)
                hint = f"; {near}" if near else ""
                self.reject("unknown_key", key, f"no such key{hint} (known: {', '.join(known)})")
        self._note_source(self.content.get("source"), where, self.line)

    def _note_source(self, found: Node | None, place: str, line: int) -> None:
        """Keep the source of a place; a defect where it is no sentence."""
        if found is None or found.data is None:
            return
        if isinstance(found.data, str):
            self.findings.sources.append((place, found.data))
        else:
            self.sound = False
            self.findings.note("wrong_type", line, f"{place}.source", "a source is a sentence")

    def place(self, key: str) -> str:
        """The dotted name of a key of this section."""
        return f"{self.where}.{key}" if self.where else key

    def line_of(self, key: str) -> int:
        """The line of a key; of the section where it has none such."""
        found = self.content.get(key)
        return self.line if found is None else found.key_line

    def reject(self, kind: str, key: str, detail: str) -> None:
        """Note a defect of a key of this section; `""`: of the section itself."""
        self.sound = False
        place = self.place(key) if key else self.where
        self.findings.note(kind, self.line_of(key), place, detail)

    def has(self, key: str) -> bool:
        """Whether the file has this key (a key without a value counts as left out)."""
        found = self.content.get(key)
        return found is not None and found.data is not None

    def value(self, key: str) -> Node | None:
        """The bare value of a key, its source recorded; None, noted as missing, without one."""
        found = self.content.get(key)
        if found is not None and isinstance(found.data, Mapping) and "value" in found.data:
            for extra in [k for k in found.data if k not in ("value", "source")]:
                self.reject("unknown_key", key, f"a figure has `value` and `source`, no {extra!r}")
            self._note_source(found.data.get("source"), self.place(key), found.key_line)
            found = found.data["value"]
        if found is not None and found.data is not None:
            return found
        if self.sound_mapping:
            self.reject("missing_key", key, "this key is needed")
        return None

    @property
    def sound_mapping(self) -> bool:
        """Whether there is a mapping at all: a section that is none has no keys to miss."""
        return bool(self.content) or self.sound

    def text(self, key: str) -> str:
        """A name: text that is not empty."""
        found = self.value(key)
        if found is not None and isinstance(found.data, str) and found.data.strip():
            return found.data
        if found is not None:
            self.reject("wrong_type", key, f"text is needed, not {found.describe()}")
        return "?"

    def integer(self, key: str, least: int, default: int | None = None) -> int:
        """A whole number of at least `least`; `default` where the key may be left out."""
        if default is not None and not self.has(key):
            return default
        found = self.value(key)
        if found is None:
            return least
        if not isinstance(found.data, int) or isinstance(found.data, bool):
            self.reject("wrong_type", key, f"a whole number is needed, not {found.describe()}")
            return least
        if not least <= found.data < 2**63:
            self.reject("out_of_range", key, f"at least {least} is needed, not {found.describe()}")
            return least
        return found.data

    def number(self, key: str, *, positive: bool, default: float | None = None) -> float:
        """A finite number, above zero if `positive`, else not below it."""
        if default is not None and not self.has(key):
            return default
        found = self.value(key)
        return 1.0 if found is None else self._number(key, "", found, positive=positive)

    def _number(self, key: str, point: str, found: Node, *, positive: bool) -> float:
        """Check a value of a key, or of one point of its curve."""
        place = self.place(key) + point
        number = parse_number(found.data)
        if number is None:
            kind, detail = "wrong_type", f"a number is needed, not {found.describe()}"
        elif not math.isfinite(number) or number < 0 or (positive and number == 0):
            bound = "above 0" if positive else "of 0 or more"
            kind = "out_of_range"
            detail = f"a finite number {bound} is needed, not {found.describe()}"
        else:
            return number
        self.sound = False
        self.findings.note(kind, found.key_line or found.line, place, detail)
        return 1.0

    def curve(self, key: str) -> tuple[tuple[int, float], ...]:
        """Transfer bytes → rate: at least one point, sizes and rates rising."""
        found, before = self.value(key), self.sound
        if found is None:
            return ((1, 1.0),)
        if not isinstance(found.data, Mapping) or not found.data:
            self.reject("wrong_type", key, "a mapping of transfer bytes to rates is needed")
            return ((1, 1.0),)
        self.sound = True
        points, lines = [], []
        for word, rate in found.data.items():
            nbytes = number_of(word)
            if not isinstance(nbytes, int) or nbytes < 1:
                self.sound = False
                detail = f"{word[:60]!r} is no size of a transfer"
                self.findings.note("out_of_range", rate.key_line, self.place(key), detail)
                continue
            points.append((nbytes, self._number(key, f".{nbytes}", rate, positive=True)))
            lines.append(rate.key_line)
        if self.sound:
            self._check_rising(key, points, lines)
        self.sound = self.sound and before
        return tuple(points) or ((1, 1.0),)

    def _check_rising(self, key: str, points: list[tuple[int, float]], lines: list[int]) -> None:
        for (a, b), line in zip(pairwise(points), lines[1:], strict=True):
            if b[0] <= a[0] or b[1] < a[1]:
                self.sound = False
                self.findings.note(
                    "not_rising",
                    line,
                    f"{self.place(key)}.{b[0]}",
                    f"{b[0]} bytes at {b[1]:g} must not follow {a[0]} bytes at {a[1]:g}: "
                    "sizes rise, and rates do not fall",
                )


def parse_number(found: object) -> float | None:
    """The number that a YAML scalar stands for, or None.

    >>> parse_number("1e9"), parse_number(2), parse_number(True), parse_number("fast")
    (1000000000.0, 2.0, None, None)
    """
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        return float(found)
    except (ValueError, OverflowError):
        return None

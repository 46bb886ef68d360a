"""Reading the figures of a description: every defect is noted, none stops the reading.

Comes in: one mapping of a parsed file. Goes out: checked figures, the sources named beside them,
and the list of all problems. A figure is a bare value, or `{value: 64, source: where I found it}`;
a `source` key in a mapping speaks for all of its figures. Knows nothing of machines.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from itertools import pairwise

from stitch.errors import Problem


@dataclass
class Findings:
    """What the reading of one file has found so far: problems, and the sources of figures."""

    problems: list[Problem] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)

    def note(self, kind: str, where: str, detail: str) -> None:
        """Record one defect: its machine-readable kind, the dotted place, the sentence."""
        self.problems.append(Problem(kind, where, detail))


def closest(word: str, known: tuple[str, ...]) -> str:
    """`"; did you mean 'x'?"` for a word that resembles a known one, else nothing.

    >>> closest("alignmnet", ("alignment", "base"))
    "; did you mean 'alignment'?"
    """
    match = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


class Section:
    """One mapping of the file. Each figure read is checked; a bad one is noted and replaced.

    `sound` turns false with the first bad figure: checks that compare figures ask it first.
    """

    def __init__(
        self, content: object, where: str, findings: Findings, keys: tuple[str, ...]
    ) -> None:
        self.where = where
        self.findings = findings
        self.sound = True
        self.content: dict[object, object] = {}
        if isinstance(content, dict):
            self.content = content
        else:
            self.reject("wrong_type", where, f"a mapping is needed, not {show(content)}")
        known = (*keys, "source")
        for key in self.content:
            if key not in known:
                self.reject(
                    "unknown_key",
                    self.place(str(key)),
                    f"no such key{closest(str(key), known)} (known: {', '.join(known)})",
                )
        source = self.content.get("source")
        if isinstance(source, str):
            findings.sources.append((where, source))
        elif source is not None:
            self.reject("wrong_type", self.place("source"), "a source is a sentence")

    def place(self, key: str) -> str:
        """The dotted name of a key of this section."""
        return f"{self.where}.{key}" if self.where else key

    def reject(self, kind: str, where: str, detail: str) -> None:
        """Note a defect of this section."""
        self.sound = False
        self.findings.note(kind, where, detail)

    def has(self, key: str) -> bool:
        """Whether the file has this key (a key without a value counts as left out)."""
        return self.content.get(key) is not None

    def value(self, key: str) -> object:
        """The bare value of a key, its source recorded; None, noted as missing, without one."""
        found = self.content.get(key)
        if isinstance(found, dict) and "value" in found:
            for extra in [k for k in found if k not in ("value", "source")]:
                self.reject(
                    "unknown_key", self.place(f"{key}.{extra}"), "a figure has `value`, `source`"
                )
            source = found.get("source")
            if isinstance(source, str):
                self.findings.sources.append((self.place(key), source))
            elif source is not None:
                self.reject("wrong_type", self.place(f"{key}.source"), "a source is a sentence")
            found = found["value"]
        if found is None and self.sound_mapping:
            self.reject("missing_key", self.place(key), "this key is needed")
        return found

    @property
    def sound_mapping(self) -> bool:
        """Whether there is a mapping at all: a section that is none has no keys to miss."""
        return bool(self.content) or self.sound

    def text(self, key: str) -> str:
        """A name: text that is not empty."""
        found = self.value(key)
        if isinstance(found, str) and found.strip():
            return found
        if found is not None:
            self.reject("wrong_type", self.place(key), f"text is needed, not {show(found)}")
        return "?"

    def integer(self, key: str, least: int, default: int | None = None) -> int:
        """A whole number of at least `least`; `default` where the key may be left out."""
        if default is not None and not self.has(key):
            return default
        found = self.value(key)
        if found is None:
            return least
        if not isinstance(found, int) or isinstance(found, bool):
            self.reject(
                "wrong_type", self.place(key), f"a whole number is needed, not {show(found)}"
            )
            return least
        if not least <= found < 2**63:
            self.reject(
                "out_of_range", self.place(key), f"at least {least} is needed, not {show(found)}"
            )
            return least
        return found

    def number(self, key: str, *, positive: bool, default: float | None = None) -> float:
        """A finite number, above zero if `positive`, else not below it."""
        if default is not None and not self.has(key):
            return default
        return self.as_number(self.value(key), self.place(key), positive=positive)

    def as_number(self, found: object, where: str, *, positive: bool) -> float:
        """Check a bare value; YAML reads `1e9` (without a point) as text, so text may be one."""
        if found is None:
            return 1.0
        number = parse_number(found)
        if number is None:
            self.reject("wrong_type", where, f"a number is needed, not {show(found)}")
            return 1.0
        if not math.isfinite(number) or number < 0 or (positive and number == 0):
            bound = "above 0" if positive else "of 0 or more"
            self.reject(
                "out_of_range", where, f"a finite number {bound} is needed, not {show(found)}"
            )
            return 1.0
        return number

    def curve(self, key: str) -> tuple[tuple[int, float], ...]:
        """Transfer bytes → rate: at least one point, sizes and rates rising."""
        found = self.value(key)
        where, before = self.place(key), self.sound
        if found is None:
            return ((1, 1.0),)
        if not isinstance(found, dict) or not found:
            self.reject("wrong_type", where, "a mapping of transfer bytes to rates is needed")
            return ((1, 1.0),)
        self.sound = True
        points = []
        for nbytes, rate in found.items():
            if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
                self.reject("out_of_range", where, f"{show(nbytes)} is no size of a transfer")
                continue
            place = f"{where}.{nbytes}"
            points.append((nbytes, self.as_number(rate, place, positive=True)))
        if self.sound:
            self._check_rising(where, points)
        self.sound = self.sound and before
        return tuple(points) or ((1, 1.0),)

    def _check_rising(self, where: str, points: list[tuple[int, float]]) -> None:
        for a, b in pairwise(points):
            if b[0] <= a[0] or b[1] < a[1]:
                self.reject(
                    "not_rising",
                    f"{where}.{b[0]}",
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


def show(found: object) -> str:
    """A value as an error shows it: short, whatever the file holds."""
    if isinstance(found, dict):
        return "a mapping"
    if isinstance(found, list):
        return "a list"
    if isinstance(found, int) and abs(found) >= 2**64:
        return "a number beyond 64 bits"
    return repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."

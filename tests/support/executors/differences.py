"""The table of where executors differ on values at the edges of their types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "executor_differences.md"
HEADER = ["operators", "kernels", "values", "differ in", "why"]
#: Said of kernels that differ only where a library splits sums so.
SOMEWHERE = " on some processors"
#: Of the table of nodes as they are written.
ORIGINALS = ["operators", "other", "differs in", "what Stitch computes, and why"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: each of these operators differs, by these kernels, on each class of values."""

    operators: tuple[str, ...]
    kernels: tuple[str, ...]
    classes: tuple[str, ...]
    way: str
    reason: str
    #: Of the kernels, those that differ on some processors and not on others.
    optional: tuple[str, ...] = ()


def lines(text: str | None = None) -> tuple[Line, ...]:
    """The lines of the table."""
    found: list[Line] = []
    for line in (PAGE.read_text(encoding="utf-8") if text is None else text).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != len(HEADER):
            continue
        if cells == HEADER or set(cells[0]) <= set("-:"):
            continue
        operators, kernels, classes, way, reason = cells
        named = [(word, name) for word in _listed(kernels) for name in _installed(word)]
        if named:
            installed = tuple(name for _, name in named)
            optional = tuple(name for word, name in named if word.endswith(SOMEWHERE))
            found.append(
                Line(_listed(operators), installed, _listed(classes), way, reason, optional)
            )
    return tuple(found)


def originals() -> set[tuple[str, str]]:
    """Operators, and which other computes a node of them otherwise as it is written."""
    text, found = PAGE.read_text(encoding="utf-8"), set()
    _, _, table = text.partition("| " + " | ".join(ORIGINALS) + " |\n")
    for line in table.splitlines()[1:]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(ORIGINALS):
            found |= {(op, who) for op in _listed(cells[0]) for who in _listed(cells[1])}
    return found


def _installed(word: str) -> Iterator[str]:
    """The kernels of a word: `name`, `name < version`, `name with flag`, `name without flag`,
    `name on some processors`; none where another version is there, or a processor that is not so
    (flags as in `/proc/cpuinfo`)."""
    word = word.removesuffix(SOMEWHERE)
    word, _, missing = word.partition(" without ")
    word, _, flag = word.partition(" with ")
    if missing in _processor() or (flag and flag not in _processor()):
        return
    name, _, below = word.partition(" < ")
    if not below or _numbers(version(name)) < _numbers(below):
        yield name


@cache
def _processor() -> frozenset[str]:
    """What the processor can do, in Linux' words."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    said = (line for line in told.splitlines() if line.startswith("flags"))
    return frozenset(word for line in said for word in line.split())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _listed(cell: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in cell.split(","))

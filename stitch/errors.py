"""The exception classes of Stitch, and the format of their messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

#: Known names compared with an unknown one, at most.
MAX_NEAR_NAMES = 1_000
#: Longer names are not compared.
MAX_NEAR_CHARACTERS = 200
#: Limit of the work for one unknown name; comparing two names costs up to their lengths' product.
MAX_NEAR_WORK = 1_000_000


class StitchError(Exception):
    """Base of all errors that Stitch raises on purpose.

    >>> print(StitchError("no such slot", where="program 'main'", expected="x", got="y"))
    no such slot
      where: program 'main'
      expected: x
      got: y
    """

    exit_code = 6

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        parts = (
            ("where", self.where),
            ("expected", self.expected),
            ("got", self.got),
            ("try", self.remedy),
        )
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in parts if text)])

    def brief(self) -> str:
        """Return the message on one line, with the first of several listed problems.

        >>> StitchError("they do not fit:\\n  - one is too long\\n  - one is missing").brief()
        'they do not fit: one is too long'
        """
        first, *listed = self.what.splitlines() or [""]
        return f"{first} {listed[0].strip().removeprefix('- ')}" if listed else first

    def sentence(self) -> str:
        """Return message, expected and got on one line, for lists of errors."""
        parts = (("expected ", self.expected), ("got ", self.got))
        return "; ".join([self.what, *(label + text for label, text in parts if text)])


class UsageError(StitchError):
    """Wrong options of a command or arguments of a call: exit code 2."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One defect of a file: a machine-readable kind, its location, and a sentence."""

    kind: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail} [{self.kind}]"


class CompileError(StitchError):
    """A module cannot be compiled (unknown operator, shapes that do not match): exit code 3.

    `problems`: every defect of a program that is not well formed.
    """

    exit_code = 3
    problems: tuple[Problem, ...] = ()


class FormatError(StitchError):
    """A file is invalid; `problems` lists every defect: exit code 3."""

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        problems: tuple[Problem, ...] = (),
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problems = problems
        super().__init__(what, where=where, expected=expected, got=got, remedy=remedy)

    def __str__(self) -> str:
        return "\n".join([StitchError.__str__(self), *(f"  - {p}" for p in self.problems)])


class IncompatibleError(FormatError):
    """A valid file for another version, feature set or machine: exit code 4."""

    exit_code = 4


class LinkError(StitchError):
    """An output does not match the input it is linked to; names both: exit code 6."""


class LayoutError(StitchError):
    """An illegal layout, or a tensor in another layout than declared: exit code 6."""


class OutOfMemoryError(StitchError):
    """A space cannot hold what a task needs; names bytes, holes and a remedy: exit code 5.

    `certificate`: the proof of the planner that the memory does not suffice, if it has one.
    """

    exit_code = 5
    certificate: object = None


class TaskError(StitchError):
    """A task failed, or a handle was used after its tensor was freed: exit code 6."""


class InternalError(StitchError):
    """A defect of Stitch itself, not of its input: exit code 6."""


def unknown(
    what: str, word: object, known: Collection[str], kind: type[StitchError] = UsageError, *,
    remedy: str | None = None, none: str = "none", **more: Any,
) -> StitchError:  # fmt: skip
    """Return the error for an unknown word: it lists the known ones and names the nearest.

    `remedy` is for words without a near one, `none` the text if none is known.
    """
    near = closest(str(word), known) or remedy
    return kind(what, remedy=near, **({"expected": ", ".join(known) or none} | more))


def closest(word: str, known: Iterable[str], before: str = "") -> str:
    """Return "did you mean ...?" with the nearest known word, or nothing.

    `before` is a prefix of the question.

    >>> closest("alignmnet", ("alignment", "base")), closest("x", ())
    ("did you mean 'alignment'?", '')
    """
    near = nearest(word, known, cutoff=0.5)
    return f"{before}did you mean {near[0]!r}?" if near else ""


def nearest(
    word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> tuple[str, ...]:
    """Return the known words near to a word, nearest first.

    `cutoff` is the similarity from 0 to 1. Words may come from hostile files: work is bounded, and
    long words are skipped.
    """
    import difflib  # Imported here: rarely needed.

    word = str(word)
    if len(word) > MAX_NEAR_CHARACTERS:
        return ()
    work, names = 0, list[str]()
    for name in islice(known, MAX_NEAR_NAMES):
        if len(name) <= MAX_NEAR_CHARACTERS:
            work += len(word) * len(name)
            if work > MAX_NEAR_WORK:
                break
            names.append(name)
    return tuple(difflib.get_close_matches(word, names, most, cutoff))

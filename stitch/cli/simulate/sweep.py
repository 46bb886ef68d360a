"""Sweeps: figures of a machine and the values that each takes, as `--sweep` names them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from stitch.budget import parse_nbytes
from stitch.errors import FormatError, UsageError
from stitch.machine import Machine, varied_machine

FORM = "FIGURE=START:STOP:STEP or FIGURE=A,B,C, such as l1.bank_nbytes=256KiB:2MiB:64KiB"
#: Machines of one command.
MAX_POINTS = 1_000
#: Defects that make every value of a figure wrong; others are those of one machine.
_OF_THE_FIGURE = {"unknown_key", "wrong_type", "unknown_word", "missing_key", "misplaced_key"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A figure by its dotted name, and its values."""

    figure: str
    values: tuple[int | float, ...]


def parse_sweep(text: str) -> Sweep:
    """Parse a value of `--sweep`; raise `UsageError`.

    >>> parse_sweep("l1.bank_nbytes=256KiB:384KiB:64KiB").values
    (262144, 327680, 393216)
    >>> parse_sweep("noc.turns=0,0.5").values
    (0, 0.5)
    """
    figure, equals, values = text.partition("=")
    if not (figure and equals and values):
        raise UsageError(f"--sweep={text} names no values", expected=FORM)
    parts = values.split(":")
    if len(parts) == 1:
        return Sweep(figure, tuple(_number(word, text) for word in values.split(",")))
    if len(parts) != 3:
        raise UsageError(f"--sweep={text} is no range", expected=FORM)
    start, stop, step = (_number(part, text) for part in parts)
    if step <= 0 or stop < start:
        raise UsageError(
            f"--sweep={text} has no values", expected="START at most STOP, and STEP above 0",
            remedy=None,
        )  # fmt: skip
    count = math.floor((stop - start) / step + 1e-9) + 1
    if count > MAX_POINTS:
        raise _too_many(count)
    return Sweep(figure, tuple(start + at * step for at in range(count)))


def _number(word: str, text: str) -> int | float:
    for parse in (int, float, parse_nbytes):
        try:
            number: int | float = parse(word)
        except (ValueError, UsageError):
            continue
        if math.isfinite(number):
            return number
    raise UsageError(f"--sweep={text}: {word!r} is no number", expected=FORM)


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"this sweep has {count:,} machines", expected=f"at most {MAX_POINTS:,}",
        remedy="take a larger STEP, or fewer figures",
    )  # fmt: skip


def points(sweeps: Sequence[Sweep]) -> Iterator[Mapping[str, int | float]]:
    """Yield every combination of the sweeps' values; raise `UsageError` for too many."""
    figures = [sweep.figure for sweep in sweeps]
    if len(set(figures)) < len(figures):
        raise UsageError("--sweep names a figure twice", got=", ".join(figures))
    count = math.prod(len(sweep.values) for sweep in sweeps)
    if count > MAX_POINTS:
        raise _too_many(count)
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip(figures, values, strict=True))


def machine_at(base: str, point: Mapping[str, int | float]) -> Machine:
    """Return a machine with the figures of a point.

    Raises:
        UsageError: There is no such figure, or it is no number.
        FormatError: The machine is not sound with these values.
    """
    words = " ".join(f"{figure}={value}" for figure, value in point.items())
    try:
        return varied_machine(base, point, f"{base} {words}")
    except FormatError as error:
        details = [p.detail for p in error.problems if p.kind in _OF_THE_FIGURE]
        if not details:
            raise
        raise UsageError(
            f"--sweep={words} does not fit a machine: {'; '.join(details)}", where=base,
            expected=FORM, remedy=f"stitch machine {quote(base)} --sources",
        ) from error  # fmt: skip

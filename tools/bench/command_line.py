"""What the command lines of the benchmarks share: types of their words, and exit codes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable

from stitch.errors import StitchError


def from_zero(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def from_one(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def several_from_one(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on with commas between, such as 2,8,64."""
    return tuple(map(from_one, text.split(",")))


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def part(text: str) -> float:
    """A number from 0 to 1, such as 0.1 for ten per cent."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part from 0 to 1: 0.1 is ten per cent")
    return number


def extents(text: str) -> tuple[int, ...]:
    """The shape of a tensor of two dimensions or more, such as 2048x2048."""
    sizes = text.split("x")
    if len(sizes) < 2 or not all(_digits(size) and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 2048x2048")
    return tuple(map(int, sizes))


def bench_parser(text: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a benchmark that `text` describes, with the options that each has."""
    parser = argparse.ArgumentParser(
        description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    return parser


def exit_code_for(missed: Iterable[str], *, check: bool) -> int:
    """Print each missed goal to stderr; 1 if there is one and `check`, else 0."""
    goals = list(missed)
    for goal in goals:
        print(f"goal missed: {goal}", file=sys.stderr)
    return int(check and bool(goals))


def refused(bench: str, error: StitchError) -> int:
    """Print what is wrong with what a benchmark was given; the error's exit code."""
    print(f"{bench}: {error}", file=sys.stderr)
    return error.exit_code


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # It is in no range.


def _at_least(least: int, text: str) -> int:
    if not _digits(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20

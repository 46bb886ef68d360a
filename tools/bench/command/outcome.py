"""How a benchmark ends: the goals that were missed, or the one error that kept it from running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from stitch.errors import FormatError, StitchError


def told(missed: Iterable[str], *, check: bool) -> int:
    """Names each missed goal beside what is printed; the exit code, 1 for any where it `check`s."""
    goals = list(missed)
    for goal in goals:
        print(f"goal missed: {goal}", file=sys.stderr)
    return int(check and bool(goals))


def refused(bench: str, error: StitchError) -> int:
    """Says what is wrong with what a benchmark was given; the exit code."""
    print(f"{bench}: {error}", file=sys.stderr)
    return error.exit_code


def text_of(path: Path) -> str:
    """The text of a file that a benchmark was given; raises `FormatError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from error

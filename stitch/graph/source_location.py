"""Source locations: the line of the user's code that asked for an operation.

File names without their folders, so that the same module gives the same bytes wherever it lies.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

from stitch.errors import CompileError

#: Packages whose frames stand between the user's line and the builder.
_OURS = frozenset({"stitch", "numpy"})


def user_location() -> str:
    """`file:line` of the nearest frame outside Stitch and NumPy; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OURS:
            name = PurePath(frame.f_code.co_filename).name
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def mistake(
    what: str, *, expected: str | None = None, got: str | None = None, remedy: str | None = None
) -> CompileError:
    """What is wrong with a line of the user's: the error to raise, with that line."""
    return CompileError(what, where=user_location(), expected=expected, got=got, remedy=remedy)

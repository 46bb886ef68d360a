"""Source locations: the user's line that requested an operation.

File names have no folders, so that a module compiles to the same bytes from any folder.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

from stitch.errors import CompileError

#: Packages whose stack frames are skipped.
_OURS = frozenset({"stitch", "numpy"})


def user_location() -> str:
    """Return `file:line` of the nearest frame outside Stitch and NumPy, or an empty string."""
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
    """Return a `CompileError` at the user's line."""
    return CompileError(what, where=user_location(), expected=expected, got=got, remedy=remedy)

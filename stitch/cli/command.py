"""Shared by the commands: entry points, printing, error messages and exit codes.

Imports only what `--version` needs; the rest is imported when the command is loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from stitch.errors import StitchError
from stitch.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

EXIT_OK = 0
EXIT_MISMATCH = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 5
EXIT_FAILURE = 6
#: A limit that the command was given (copies, bytes) was exceeded.
EXIT_OVER_LIMIT = 7
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: Whether standard output is for an output, and reports go to standard error.
_ASIDE: ContextVar[bool] = ContextVar("reports_aside", default=False)
#: Whether written files are not named (`--quiet`).
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Command(NamedTuple):
    """A command, loaded: what reads its words, and what does what they ask for."""

    read: Callable[[Sequence[str]], Namespace]
    body: Callable[[Namespace], int]


def version_text(prog: str) -> str:
    """What `--version` says."""
    return f"{prog} {__version__}"


def with_underscores(words: Sequence[str]) -> list[str]:
    """Option names with underscores for hyphens; what follows `=` or a lone `--` stays.

    >>> with_underscores(["--dry-run", "--name=a-b", "--", "--x-y"])
    ['--dry_run', '--name=a-b', '--', '--x-y']
    """
    out = list(words)
    for at, word in enumerate(out):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            out[at] = "--" + name[2:].replace("-", "_") + equals + value
    return out


def printable(text: str) -> str:
    r"""Text without control characters: names from files are data, terminals obey them.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    return _CONTROL.sub(lambda character: character.group().encode("unicode_escape").decode(), text)


def reports_aside() -> None:
    """From now on the command's reports go to standard error: an output takes standard output."""
    _ASIDE.set(True)


def say(text: str) -> None:
    """Print to standard output; to standard error after `reports_aside`."""
    if _ASIDE.get():
        say_aside(text)
        return
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def say_aside(text: str) -> None:
    """Print to standard error: warnings, progress, anything that is not the result."""
    print(printable(text), file=sys.stderr)


def say_written(prog: str, paths: Iterable[str | Path]) -> None:
    """Name each written file in a line on standard error, unless the command is quiet."""
    if not _QUIET.get():
        for path in paths:
            say_aside(f"{prog}: wrote {path}")


def entry_point(prog: str, module: str) -> Callable[..., int]:
    """The `main` of a command: loads its module when it is called, and does what its words ask."""

    def main(argv: Sequence[str] | None = None) -> int:
        return _carry_out(prog, lambda: import_module(module).command(), argv)

    return main


def _carry_out(prog: str, load: Callable[[], Command], argv: Sequence[str] | None) -> int:
    """Load a command, read its words, do them, and turn every failure into an exit code."""
    _open_standard_handles()
    words = with_underscores(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    _ASIDE.set(False)
    _QUIET.set(False)
    try:
        if words[:1] == ["--version"]:
            say(version_text(prog))
            code = EXIT_OK
        else:
            code = _exit_code(load, words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _leave_standard_output()
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        what, code = failure_of(error)
        if what.startswith("internal error") and not debug:
            what += "\n  try: --debug shows the traceback; please report it"
        elif isinstance(error, StitchError | MemoryError | OSError):
            what = f"error: {what}"
        return _failed(prog, what, code, debug)


def failure_of(error: BaseException) -> tuple[str, int]:
    """What is said of an exception that ends a command, and the exit code."""
    if isinstance(error, StitchError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, MemoryError):
        return "out of host memory", EXIT_OUT_OF_MEMORY
    if isinstance(error, BrokenPipeError):
        return os_error_text(error), EXIT_BROKEN_PIPE
    if isinstance(error, OSError):
        return os_error_text(error), EXIT_FAILURE
    return f"internal error: {type(error).__name__}: {error}", EXIT_FAILURE


def _exit_code(load: Callable[[], Command], words: Sequence[str]) -> int:
    """Load a command and do what its words ask for."""
    from stitch.budget import allowing
    from stitch.files import noting_files

    command = load()
    try:
        with noting_files():
            parsed = command.read(words)
            _QUIET.set(parsed.quiet)
            with allowing(parsed.max_memory):
                return command.body(parsed)
    except SystemExit as stop:  # argparse: help, version, wrong usage
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE


def _open_standard_handles() -> None:
    """Where standard output or error was closed, what is written there fails, and nothing else.

    Else the next file that is opened would get its number, and a library's messages.
    """
    for name, way in (("stdin", os.O_WRONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, way)
            if name != "stdin":
                setattr(sys, name, os.fdopen(handle, "w", encoding="utf-8", closefd=False))


def os_error_text(error: OSError) -> str:
    """What the system said, and about which path."""
    where = "" if error.filename is None else f"\n  where: {error.filename}"
    return (error.strerror or str(error) or type(error).__name__) + where


def _failed(prog: str, message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"{prog}: {printable(message)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _leave_standard_output()
    return code


def _leave_standard_output() -> None:
    """What standard output led to is closed: the interpreter's last flush goes nowhere.

    It would fail again, and make the exit code 120.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

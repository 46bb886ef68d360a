"""Shared by the commands: entry points, printing, error messages and exit codes.

Imports only what `--version` needs; the rest is imported when the command is loaded.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from importlib import import_module

from stitch.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

EXIT_OK = 0
EXIT_MISMATCH = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 5
EXIT_FAILURE = 6
#: A limit of the options (copies, bytes) was exceeded.
EXIT_OVER_LIMIT = 7
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: Whether reports go to standard error, because an output uses standard output.
_ASIDE: ContextVar[bool] = ContextVar("reports_aside", default=False)
#: Whether written files are not named (`--quiet`).
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
#: Whether results and errors are printed as JSON (`--json`).
_JSON: ContextVar[bool] = ContextVar("json", default=False)
#: The name of the running command, as it was called: `stitch-run` or `stitch run`.
_PROG: ContextVar[str] = ContextVar("prog", default="stitch")
#: By value of an option: the file of settings that sets it.
_SETTINGS: ContextVar[dict[str, str]] = ContextVar("settings")


class Command:
    """A loaded command: its argument parser and its body."""

    def __init__(
        self, read: Callable[[Sequence[str]], Namespace], body: Callable[[Namespace], int]
    ) -> None:
        self.read, self.body = read, body


def version_text(prog: str) -> str:
    """Return the text of `--version`."""
    return f"{prog} {__version__}"


def with_underscores(arguments: Sequence[str]) -> list[str]:
    """Replace hyphens in option names by underscores, not after `=` or a lone `--`.

    >>> with_underscores(["--dry-run", "--name=a-b", "--", "--x-y"])
    ['--dry_run', '--name=a-b', '--', '--x-y']
    """
    out = list(arguments)
    for at, word in enumerate(out):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            out[at] = "--" + name[2:].replace("-", "_") + equals + value
    return out


def printable(text: str) -> str:
    r"""Escape control characters, which terminals would interpret.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    if text.isprintable():
        return text
    import re

    control = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(control, lambda found: found[0].encode("unicode_escape").decode(), text)


def reports_aside() -> None:
    """Send the command's reports to standard error."""
    _ASIDE.set(True)


def say(text: str) -> None:
    """Print to standard output; to standard error after `reports_aside`."""
    if _ASIDE.get():
        say_aside(text)
        return
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def say_result(body: Any, lines: Callable[[], Iterable[str]]) -> None:
    """Print a result: with `--json` its plain data, otherwise as lines of text."""
    if _JSON.get():
        import json

        say(json.dumps(body, indent=2))
    else:
        for line in lines():
            say(line)


def is_json() -> bool:
    """Return whether results are printed as JSON."""
    return _JSON.get()


def say_aside(text: str) -> None:
    """Print warnings and progress to standard error."""
    print(printable(text), file=sys.stderr)


def prog() -> str:
    """Return the name of the running command, as it was called: `stitch-run` or `stitch run`."""
    return _PROG.get()


def in_this_name(text: str) -> str:
    """Write `stitch run` for `stitch-run`, and so on, where the command was called so."""
    import re

    old = r"\bstitch-(run|compile|link|inspect)\b"
    return re.sub(old, r"stitch \1", text) if prog().startswith("stitch ") else text


def note_setting(value: str | list[str], where: str) -> None:
    """Note which file set the value of an option, for errors about the value."""
    for one in [value] if isinstance(value, str) else value:
        _SETTINGS.get()[one] = where


def say_written(paths: Iterable[str | Path]) -> None:
    """Name each written file in a line on standard error, unless the command is quiet."""
    if not _QUIET.get():
        for path in paths:
            say_aside(f"{prog()}: wrote {path}")


class EntryPoint:
    """The `main` of a command, which loads its module when it is called.

    Args:
        name: The command's own name: `stitch-run`, or `stitch pack` for a subcommand only.
        module: The module whose `command()` returns the command.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module

    def __call__(self, argv: Sequence[str] | None = None, prog: str = "") -> int:
        """Run the command with its words (default: the process's); return the exit code.

        `prog` is the name by which it was called, such as `stitch run`.
        """
        return _carry_out(prog or self.name, self.load, argv)

    def load(self, prog: str = "") -> Command:
        """Load the command, with its options."""
        if prog:
            _PROG.set(prog)
        command: Command = import_module(self._module).command()
        return command

    def parser(self, prog: str = "") -> ArgumentParser:
        """Load the parser of the command's options, under its own name or `prog`."""
        read: Any = self.load(prog or self.name).read
        parser: ArgumentParser = read.__self__
        return parser


def _carry_out(prog: str, load: Callable[[], Command], argv: Sequence[str] | None) -> int:
    """Load and run a command; turn every failure into an exit code."""
    _open_standard_handles()
    arguments = with_underscores(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    _ASIDE.set(False)
    _QUIET.set(False)
    _JSON.set("--json" in options)
    _PROG.set(prog)
    _SETTINGS.set({})
    try:
        if arguments[:1] == ["--version"]:
            say(version_text(prog))
            code = EXIT_OK
        else:
            with _plugin_files(arguments):
                code = _exit_code(load, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _leave_standard_output()
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error, arguments, debug="--debug" in options)


def failure_of(error: BaseException) -> tuple[str, int]:
    """Return the message and exit code for an exception that ends a command."""
    from stitch.errors import StitchError

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


def _exit_code(load: Callable[[], Command], arguments: Sequence[str]) -> int:
    """Load a command, parse its arguments and run it."""
    command = load()
    try:
        parsed = command.read(arguments)
    except SystemExit as stop:  # argparse: help, version
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    from stitch.budget import allowing  # It loads NumPy.
    from stitch.cli.phases import logging_to_stderr, phases
    from stitch.files import noting_files

    _QUIET.set(parsed.quiet)
    with (
        logging_to_stderr(parsed.verbose, printable), noting_files(), allowing(parsed.max_memory),
        phases(shown=not parsed.quiet) as timed,
    ):  # fmt: skip
        try:
            return command.body(parsed)
        finally:
            if parsed.timings:
                say_aside(f"{prog()}: timings: {timed.text()}")


def _plugin_files(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Run the files of `--plugin`, before other options are checked that may name plugins."""
    from contextlib import nullcontext

    if not any(word.startswith("--plugin") for word in arguments):
        return nullcontext()
    from argparse import ArgumentParser

    from stitch.plugins import files

    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--plugin", action="append", default=[], nargs="?", const="")
    paths = early.parse_known_args(arguments)[0].plugin
    return files([path for path in paths if path])


def _open_standard_handles() -> None:
    """Open closed standard handles, so that only writing to them fails.

    Otherwise the next opened file would get the handle's number, and a library's messages.
    """
    for name, flags in (("stdin", os.O_WRONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, flags)
            if name != "stdin":
                setattr(sys, name, os.fdopen(handle, "w", encoding="utf-8", closefd=False))


def os_error_text(error: OSError) -> str:
    """Return the system's message and the path."""
    where = "" if error.filename is None else f"\n  where: {error.filename}"
    return (error.strerror or str(error) or type(error).__name__) + where


def _failed(error: BaseException, arguments: Sequence[str], *, debug: bool) -> int:
    """Print the one message of a failure, and a command to type instead; return the exit code."""
    from contextlib import suppress

    from stitch.cli.error_report import corrected, error_json
    from stitch.errors import StitchError

    if debug:
        import traceback

        traceback.print_exc()
    what, code = failure_of(error)
    command = corrected(error, prog(), arguments) if isinstance(error, StitchError) else None
    for value, where in _SETTINGS.get().items():
        if repr(value) in what and not any(word.endswith(value) for word in arguments):
            what, command = f"{what}\n  set by: {where}", None
    if what.startswith("internal error") and not debug:
        what += "\n  try: --debug shows the traceback; please report it"
    what = in_this_name(what)
    with suppress(OSError):
        if _JSON.get():
            say_result({"error": error_json(error, what, code) | {"command": command}}, tuple)
        else:
            if isinstance(error, StitchError | MemoryError | OSError):
                what = f"error: {what}"
            if command is not None:
                what += f"\n  command: {command}"
            print(f"{prog()}: {printable(what)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _leave_standard_output()
    return code


def _leave_standard_output() -> None:
    """Redirect a closed standard output to the null device.

    Otherwise the interpreter's last flush fails again and makes the exit code 120.
    """
    from contextlib import suppress

    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

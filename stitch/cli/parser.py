"""Argument parsing: argparse with one-line errors that suggest the nearest option."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from stitch.cli.command import in_this_name, note_setting, prog, version_text
from stitch.errors import UsageError, closest, nearest

EXIT_CODES = """\
exit codes:
  0 ok   1 an output differs from the expected one   2 usage   3 bad file
  4 incompatible version or machine   5 out of memory   6 other failure
  7 more copies or bytes than allowed   130 interrupted (Ctrl-C)"""

_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"argument (\S+): (.*)", re.DOTALL)


#: An option's name, and its arguments for `add_argument`.
Option: TypeAlias = tuple[str, dict[str, Any]]
#: A parser, or a group of its options.
Group: TypeAlias = "argparse.ArgumentParser | argparse._ArgumentGroup"


#: The heading of the options of all commands, which come last.
_COMMON = "options of every command"


def _help_formatter() -> type[argparse.HelpFormatter]:
    """Return what formats help: with colours on a terminal, else without importing rich."""
    if not sys.stdout.isatty():
        return argparse.RawDescriptionHelpFormatter
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Formatter(RawDescriptionRichHelpFormatter):
        group_name_formatter = str  # Headings as they are written.
        help_markup = text_markup = False  # Brackets stand for themselves.

    return Formatter


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError`, one line, instead of printing its usage."""

    def format_help(self) -> str:
        """Return the help; its usage names the positional arguments only."""
        files = [f"[{a.metavar} ...]" if a.nargs == "*" else f"[{a.metavar}]"
                 for a in self._get_positional_actions()]  # fmt: skip
        self._action_groups.sort(key=lambda group: group.title == _COMMON)
        self.formatter_class = _help_formatter()
        self.usage = self.usage or " ".join([self.prog.replace("%", "%%"), "[OPTION ...]", *files])
        return super().format_help()

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments, with the defaults of the project's settings.

        No option is required: commands check what is missing.
        """
        lists: dict[str, list[str]] = {}
        if not {"-h", "--help", "--version"}.intersection(arguments):
            lists = self._set_project_defaults()
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(self._unknown(unknown))
        # argparse would append to a default that is a list.
        for name, values in lists.items():
            if not getattr(parsed, name):
                setattr(parsed, name, values)
        return parsed

    def _set_project_defaults(self) -> dict[str, list[str]]:
        """Set the defaults of options from `[tool.stitch]`, where this command takes them.

        Returns those that are lists, which are not set.
        """
        from stitch.cli.settings import OPTIONS, project_settings

        own = {action.dest: action for action in self._actions if action.dest in OPTIONS.values()}
        if not own:
            return {}
        lists = {}
        settings = project_settings()
        for name, value in settings.defaults().items():
            action = own.get(name)
            if action is not None and (not action.choices or value in action.choices):
                if isinstance(value, list):
                    lists[name] = value
                else:
                    self.set_defaults(**{name: value})
                note_setting(value, f"[tool.stitch] of {settings.file}")
        return lists

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with one line."""
        raise UsageError(self._reworded(message))

    def _reworded(self, message: str) -> str:
        if match := _CHOICE.fullmatch(message):
            option, given, listed = match.groups()
            choices = listed.replace("'", "").split(", ")
            return f"{option} {not_one_of(choices, given)}"
        if match := _ARGUMENT.fullmatch(message):
            option, what = match.groups()
            return f"{option} {'needs a value' if what == 'expected one argument' else what}"
        return message

    def _unknown(self, unknown: list[str]) -> str:
        for argument in unknown:
            word = argument.partition("=")[0]
            if word.startswith("-") and word != "-":
                names = [
                    name for action in self._actions for name in action.option_strings
                    if "=" not in argument or action.nargs != 0
                ]  # fmt: skip
                if Path(argument).exists():
                    return f"there is no option {word}; the file of that name is ./{argument}"
                # Without hyphens, which would make all options alike.
                stems = {name.lstrip("-"): name for name in names}
                near = [stems[stem] for stem in nearest(word.lstrip("-"), stems)]
                hint = f": did you mean {near[0]!r}?" if near else ""
                return f"there is no option {word}{hint}"
        return f"unexpected arguments {' '.join(unknown)!r}"


def make_parser(description: str, examples: str) -> Parser:
    """Return a parser with the options of all commands, examples and exit codes."""
    parser = Parser(
        prog=prog(),
        description=description,
        epilog=f"examples:\n{in_this_name(examples)}\n\n{EXIT_CODES}\n\n"
        "Hyphens are accepted for underscores.",
        allow_abbrev=False,
        add_help=False,
    )
    common = parser.add_argument_group(_COMMON)
    common.add_argument("-h", "--help", action="help", help="show this text and exit")
    common.add_argument("--debug", action="store_true", help="show a traceback with an error")
    common.add_argument(
        "--max_memory", metavar="SIZE", type=size,
        help="limit of host memory, such as 2GiB (default: 80%% of the memory of this computer or "
        "of its control group); a run that would exceed it fails with exit code 5",
    )  # fmt: skip
    common.add_argument("--plugin", action="append", default=[], metavar="FILE.py",
                        help="run a Python file that calls stitch.register before anything else; "
                        "plugins of installed packages need none")  # fmt: skip
    common.add_argument("-q", "--quiet", action="store_true",
                        help="do not name the written files on standard error")  # fmt: skip
    common.add_argument("-v", "--verbose", action="count", default=0,
                        help="log what is read, compiled, planned and run on standard error; "
                        "-vv logs details (as with STITCH_LOG=info or debug)")  # fmt: skip
    common.add_argument("--json", action="store_true", help="print the result, or the error, as "
                        "one JSON document on standard output")  # fmt: skip
    common.add_argument("--timings", action="store_true",
                        help="print how long each phase took on standard error")  # fmt: skip
    common.add_argument("--version", action="version", version=version_text(prog()))
    return parser


def add_options(parser: Group, *options: Option) -> None:
    """Add several options to a parser or a group."""
    for name, how in options:
        parser.add_argument(name, **how)


def size(text: str) -> str:
    """Check an amount of memory, for argparse; return the text."""
    from stitch.budget import parse_nbytes  # It loads NumPy.

    try:
        parse_nbytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"takes {error.expected}, not {text!r}") from error
    return text


def file_path(text: str) -> str:
    """Refuse an empty path, of an unset shell variable perhaps: it means the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def positive(text: str) -> int:
    """Parse an integer of at least 1.

    >>> positive("3")
    3
    """
    return _whole(text, 1)


def count(text: str) -> int:
    """Parse an integer of at least 0.

    >>> count("0")
    0
    """
    return _whole(text, 0)


def not_negative(text: str) -> float:
    """Parse a number of at least 0.

    >>> not_negative("1e-3")
    0.001
    """
    number = real(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"takes a number of at least 0, not {text!r}")
    return number


def real(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a number, not {text!r}") from None


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"takes an integer of at least {least}, not {text!r}")
    return number


def not_one_of(choices: Sequence[str], given: str) -> str:
    """Return the error for a value that is no choice, without the name of its option.

    >>> not_one_of(("numpy", "torch"), "nump")
    "takes numpy or torch, not 'nump': did you mean 'numpy'?"
    """
    either = ", ".join(choices[:-1]) + " or " if choices[:-1] else ""
    return f"takes {either}{choices[-1]}, not {given!r}{closest(given, choices, ': ')}"

"""Argument parsing: argparse with one-line errors that suggest the nearest option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from stitch.budget import parse_nbytes
from stitch.cli.command import version_text
from stitch.errors import UsageError, closest

EXIT_CODES = """\
exit codes:
  0 ok   1 an output is not as expected   2 usage   3 bad file
  4 incompatible version or machine   5 out of memory   6 other failure
  7 more copies or bytes than allowed   130 interrupted (Ctrl-C)"""

_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"argument (\S+): (.*)", re.DOTALL)


#: An option's name, and what argparse is told of it.
Option: TypeAlias = tuple[str, dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError`, one line, instead of printing its usage."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The words, parsed. An unknown option is told before a missing one: it may be that one."""
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:
            _, strangers = self.parse_known_args(words)
        finally:
            for action in required:
                action.required = True
        if strangers:
            self.error(self._unknown(strangers))
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the words."""
        raise UsageError(f"{self._said(message)} (--help lists what {self.prog} takes)")

    def _said(self, message: str) -> str:
        if match := _CHOICE.fullmatch(message):
            option, given, listed = match.groups()
            choices = listed.replace("'", "").split(", ")
            return (
                f"{option} takes {_either(choices)}, not {given!r}{closest(given, choices, ': ')}"
            )
        if match := _ARGUMENT.fullmatch(message):
            option, what = match.groups()
            return f"{option} {'needs a value' if what == 'expected one argument' else what}"
        return message

    def _unknown(self, strangers: list[str]) -> str:
        for stranger in strangers:
            word = stranger.partition("=")[0]
            if word.startswith("-") and word != "-":
                names = [name for action in self._actions for name in action.option_strings]
                if Path(stranger).exists():
                    return f"there is no option {word}; the file of that name is ./{stranger}"
                return f"there is no option {word}{closest(word, names, ': ')}"
        return f"there is nothing to do with {' '.join(strangers)!r}"


def make_parser(prog: str, description: str, examples: str) -> Parser:
    """A parser with the options of all commands, examples and exit codes."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=f"examples:\n{examples}\n\n{EXIT_CODES}\n\nHyphens are accepted for underscores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    parser.add_argument(
        "--max_memory", metavar="SIZE", type=size,
        help="bytes of the host's memory that may be taken, such as 2GiB; more is refused before "
        "it is allocated (default: 80%% of the machine's, or of its control group's)",
    )  # fmt: skip
    parser.add_argument("-q", "--quiet", action="store_true",
                        help="do not name the written files on standard error")  # fmt: skip
    parser.add_argument("--version", action="version", version=version_text(prog))
    return parser


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *options: Option
) -> None:
    """Several options at once, for a parser or a group of its options."""
    for name, how in options:
        parser.add_argument(name, **how)


def size(text: str) -> str:
    """An amount of memory, as it is written."""
    try:
        parse_nbytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"takes {error.expected}, not {text!r}") from error
    return text


def place(text: str) -> str:
    """A file or a folder. An empty name, as of a shell's variable that is not set, is none: it
    would be the folder where one is."""
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def positive(text: str) -> int:
    """A whole number from 1 on.

    >>> positive("3")
    3
    """
    return _whole(text, 1)


def count(text: str) -> int:
    """A whole number from 0 on.

    >>> count("0")
    0
    """
    return _whole(text, 0)


def not_negative(text: str) -> float:
    """A number from 0 on.

    >>> not_negative("1e-3")
    0.001
    """
    number = real(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"takes a number from 0 on, not {text!r}")
    return number


def real(text: str) -> float:
    """A number.

    >>> real("0.5")
    0.5
    """
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
        raise argparse.ArgumentTypeError(f"takes a whole number from {least} on, not {text!r}")
    return number


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + f" or {choices[-1]}"

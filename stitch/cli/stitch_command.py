"""`stitch NAME ...`: runs one subcommand, which is the module `stitch.cli.NAME_command`.

A subcommand's module is imported when it is called; nothing here imports NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stitch.cli.command import EXIT_OK, Command, EntryPoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from stitch.errors import UsageError

#: By heading of the help: subcommand → what it does.
SUBCOMMANDS = {
    "modules": {
        "compile": "compile a module into a .ttb file",
        "link": "link .ttb modules into one program",
        "inspect": "show .ttb files, and what stitching them costs",
    },
    "formats": {
        "schema": "print the schema of .ttb files or of a form of YAML files",
        "export": "write a program as ONNX, for Model Explorer, or in DOT",
    },
    "runs": {
        "run": "run modules or a pipeline on a simulated device",
        "report": "write a page about a recorded run, or about two",
        "diff": "compare the copies of two runs, and check budgets",
    },
    "memory and machines": {
        "simulate": "plan one pass on machines, and on machines with varied figures",
        "pack": "find offsets for buffers with known lifetimes (MiniMalloc's CSV)",
    },
    "about this installation": {
        "machine": "list the known machines, or show one",
        "examples": "list the examples, or copy one into a folder",
        "doctor": "check this installation, and say what each part of it gives",
        "completion": "print the script that completes `stitch` in bash or zsh",
    },
}
NAMES = tuple(name for names in SUBCOMMANDS.values() for name in names)
#: Subcommands that are commands of their own as well, such as `stitch-run`.
ALONE = ("compile", "inspect", "link", "run")
#: By subcommand: what takes its words.
MAINS = {
    name: EntryPoint(f"stitch{'-' if name in ALONE else ' '}{name}", f"stitch.cli.{name}_command")
    for name in NAMES
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in NAMES:
        name = arguments[0]
        return MAINS[name](arguments[1:], f"stitch {name}")
    return _help(arguments)


def subcommand_parsers() -> dict[str, tuple[str, ArgumentParser]]:
    """Load every subcommand; return what it does and its parser, by name."""
    named = ((n, what) for names in SUBCOMMANDS.values() for n, what in names.items())
    return {name: (what, MAINS[name].parser(f"stitch {name}")) for name, what in named}


def command() -> Command:
    """Return the command without a subcommand, which prints help."""
    return Command(_read, lambda _: EXIT_OK)


#: Prints the help or the version; any other word is an error.
_help = EntryPoint("stitch", __name__)


def _read(arguments: Sequence[str]) -> Namespace:
    """Print help and stop, as argparse does; raise `UsageError` for an unknown word."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise _unknown(arguments)
    from stitch.cli.parser import Parser

    parser = Parser(
        "stitch", "stitch SUBCOMMAND ...", "Stitch compiled tensor programs.",
        "`stitch SUBCOMMAND --help` lists its options.", add_help=False,
    )  # fmt: skip
    for heading, names in SUBCOMMANDS.items():
        group = parser.add_argument_group(heading)
        for name, what in names.items():
            group.add_argument(name, help=what)
    parser.print_help()
    raise SystemExit(EXIT_OK)


def _unknown(arguments: Sequence[str]) -> UsageError:
    """Return the error for a first word that is no subcommand, with the corrected command."""
    import shlex

    from stitch.errors import UsageError, nearest

    first = arguments[0]
    if first.startswith("-"):
        named = next((at for at, word in enumerate(arguments) if word in NAMES), None)
        words = ["--help"]
        if named is not None:
            words = [arguments[named], *arguments[:named], *arguments[named + 1 :]]
        what = f"options follow the subcommand, and {first} is before it"
        return UsageError(what, remedy=shlex.join(["stitch", *words]))
    words = [*nearest(first, NAMES), *arguments[1:]]
    if not nearest(first, NAMES):
        words = ["run", *arguments] if first.endswith((".ttb", ".yaml", ".yml")) else ["--help"]
    return UsageError(
        f"there is no subcommand {first!r}",
        expected=", ".join(NAMES),
        remedy=shlex.join(["stitch", *words]),
    )

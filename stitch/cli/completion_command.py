"""`stitch completion`: print the script that completes `stitch` in a shell, made by shtab."""

from __future__ import annotations

import argparse
import re

import shtab

from stitch.cli.command import EXIT_OK, Command, say_result
from stitch.cli.parser import make_parser
from stitch.cli.stitch_command import subcommand_parsers
from stitch.errors import UsageError

EXAMPLES = """\
  stitch completion bash > ~/.local/share/bash-completion/completions/stitch
  stitch completion zsh > "${fpath[1]}/_stitch"
  eval "$(stitch completion bash)"           for this shell only"""

SHELLS = ("bash", "zsh")
_FILE = re.compile(r"FILE|WHAT|WHERE|SOURCE|\.yaml|\.json|\.ttsys")
_FOLDER = re.compile(r"FOLDER|DIR")


def command() -> Command:
    """Return `stitch completion` with its options."""
    parser = make_parser("Print the script that completes `stitch` in a shell.", EXAMPLES)
    parser.add_argument("shell", nargs="?", metavar="|".join(SHELLS), help="the shell")
    return Command(parser.read, _completion)


def _completion(options: argparse.Namespace) -> int:
    if options.shell not in SHELLS:
        raise UsageError(
            "the script of which shell?" if options.shell is None
            else f"there is no script for the shell {options.shell!r}",
            expected=" or ".join(SHELLS), remedy="stitch completion bash",
        )  # fmt: skip
    script = completion_script(options.shell)
    say_result({"shell": options.shell, "script": script}, lambda: [script])
    return EXIT_OK


def completion_script(shell: str) -> str:
    """Return the script that completes `stitch` and the options of each subcommand."""
    whole = argparse.ArgumentParser(prog="stitch", allow_abbrev=False)
    whole.add_argument("--version", action="store_true", help="show the version and exit")
    names = whole.add_subparsers(dest="subcommand")
    for name, (what, parser) in subcommand_parsers().items():
        one = names.add_parser(name, help=what, parents=[parser], add_help=False)
        for action in one._actions:
            _add_completion(action)
    script: str = shtab.complete(whole, shell)
    return script


def _add_completion(action: argparse.Action) -> None:
    """Complete files, folders and listed values, as the option's metavar names them."""
    metavar = str(action.metavar)
    if metavar.startswith("{"):
        action.choices = metavar.strip("{}").split(",")
    elif action.choices is None and _FOLDER.search(metavar):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # shtab reads it
    elif action.choices is None and _FILE.search(metavar):
        action.complete = shtab.FILE  # type: ignore[attr-defined]

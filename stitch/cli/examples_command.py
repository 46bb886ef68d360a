"""`stitch examples`: list the examples, or copy one into a folder."""

from __future__ import annotations

import argparse

from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.example_files import example_summaries, write_example
from stitch.cli.parser import file_path, make_parser

EXAMPLES = """\
  stitch examples
  stitch examples digits
  stitch examples full_l1 --into=scratch"""


def command() -> Command:
    """Return `stitch examples` with its options."""
    parser = make_parser("List the examples, or copy one into a folder.", EXAMPLES)
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help="the example to copy (default: list all)")  # fmt: skip
    parser.add_argument("--into", metavar="FOLDER", type=file_path, default=".",
                        help="an existing folder (default: this one)")  # fmt: skip
    return Command(parser.read, _examples)


def _examples(options: argparse.Namespace) -> int:
    if options.name is None:
        summaries = example_summaries()
        say_result(summaries, lambda: [f"{name}: {text}" for name, text in summaries.items()])
        return EXIT_OK
    target, how = write_example(options.name, options.into)
    say_written([target])
    say_result({"wrote": str(target), "run": how}, lambda: ["to run it:", how])
    return EXIT_OK

"""`stitch machine`: list the known machines, or show one with every figure."""

from __future__ import annotations

import argparse

from stitch import plugins
from stitch.cli.command import EXIT_OK, Command, say_result
from stitch.cli.machine_facts import machine_facts, machine_line, machine_lines
from stitch.cli.parser import make_parser
from stitch.machine import load_machine, machine_names

EXAMPLES = """\
  stitch machine
  stitch machine wormhole_n150
  stitch machine mine.yaml --sources
  stitch machine tiny --json"""


def command() -> Command:
    """Return `stitch machine` with its options."""
    parser = make_parser("List the known machines, or show one.", EXAMPLES)
    parser.add_argument("machine", nargs="?", metavar="NAME|machine.yaml|.ttsys",
                        help="the machine to show (default: list the known ones)")  # fmt: skip
    parser.add_argument("--sources", action="store_true",
                        help="also print where each figure comes from")  # fmt: skip
    return Command(parser.read, _show)


def _show(options: argparse.Namespace) -> int:
    if options.machine is None:
        names = [*machine_names(), *plugins.names("machines")]
        body = {"machines": [machine_facts(load_machine(name)) for name in names]}
        say_result(body, lambda: map(machine_line, names))
        return EXIT_OK
    machine = load_machine(options.machine)
    shown, lines = machine_facts(machine), machine_lines(machine)
    if options.sources:
        shown["sources"] = dict(machine.sources)
        lines += [f"  {figure}: {source}" for figure, source in machine.sources]
    say_result(shown, lambda: lines)
    return EXIT_OK
